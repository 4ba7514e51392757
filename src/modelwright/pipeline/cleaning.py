"""Sources to a folder of cleaned documents: the first stage of a run, and `modelwright clean` (`clean_command.py`).

In addition to the files of `data.clean` the folder contains `sources.json`, a report on the sources, and
`quarantine.jsonl`, with a line for each skipped record.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import DataError, writing
from modelwright.core.progress import Progress
from modelwright.core.redact import redact_text
from modelwright.core.resources import num_usable_cores
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.report import CleanReport
from modelwright.data.clean.steps.noise import low_recall, refusal
from modelwright.data.images.read import companions
from modelwright.data.sources.corpora import corpus_words, find_corpus, without_corpora
from modelwright.data.sources.find_files import locate
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.workers import LocalProcesses, RayTasks, ShardEngine

QUARANTINE, SOURCES = "quarantine.jsonl", "sources.json"


def fingerprint(data: SourceConfig, clean: CleanConfig) -> list[list[str | int | float]]:
    """Returns names, sizes and modification times of all files on which the result depends, without reading them:
    sources, schema, a user's own steps, and files that settings of steps name. Raises `DataError` for a missing source.
    """
    result: list[list[str | int | float]] = []
    steps = clean.specs()
    sources = (*data.sources, *(source for spec, settings in steps for source in spec.values(spec.sources, settings)))
    for word in corpus_words():
        if word in sources and (decided_by := find_corpus(word).decided_by):
            result.append([word, *decided_by()])
    of_steps = [entry.rpartition(":")[0] for entry in clean.steps if isinstance(entry, str)]
    of_steps += [path for spec, settings in steps for path in spec.values(spec.files, settings)]
    named = [Path(name) for name in ([data.schema] if data.schema else []) + of_steps]
    for path in [file for one in named for file in ([one] if one.is_file() else sorted(one.glob("*")))]:
        if path.is_file():
            facts = path.stat()
            result.append([str(path), facts.st_size, facts.st_mtime])
    for file in locate(without_corpora(sources), lambda reason, where: None):
        for path, name in [(file.path, file.name), *((path, path) for path in companions(file))]:
            facts = file.filesystem.info(path)
            # Each kind of store has its own name for the time, or the version, of a file.
            changed = facts.get("mtime") or facts.get("LastModified") or facts.get("ETag") or ""
            result.append([name, int(facts.get("size") or 0), str(changed)])
    return result


def clean_into(
    data: SourceConfig,
    clean: CleanConfig,
    out: Path,
    work: Path,
    key: str,
    progress: Progress,
    *,
    seed: int,
    leave_open: bool = False,
) -> tuple[CleanReport, dict[str, Any], list[str]]:
    """Reads the sources and cleans them into `out`.

    work: folder of unfinished work, which the next call with the same key resumes. Returns the report, the facts about
    the sources, and remarks on text that was not read. seed: seed of the step noise. leave_open: as in
    `read_documents`. Raises like `data.clean.clean_documents`.
    """
    report, before = SourceReport(), fingerprint(data, clean)
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)

    def facts() -> dict[str, Any]:
        # Called once all is read: a source that has changed since the first fingerprint may have been read in part.
        after = fingerprint(data, clean)
        if changed := [entry[0] for entry in [*after, *before] if entry not in before or entry not in after]:
            raise DataError(f"{changed[0]}: has changed while it was read; run the same command when it is complete")
        return {"report": report.facts(), "summary": report.summary()}

    readers = LocalProcesses(clean.num_workers or num_usable_cores())
    from_sources = read_documents(data, report=report, leave_open=leave_open, engine=readers)
    documents = _quarantining(from_sources, report, work / QUARANTINE)
    cleaned, facts_read = clean_documents(
        documents,
        build_steps(clean, seed=seed),
        out,
        progress,
        work=work,
        key=key,
        facts=facts,
        engine=engine_of(clean),
    )
    with writing(out):
        shutil.copyfile(work / QUARANTINE, out / QUARANTINE)
        write_atomic(out / SOURCES, json.dumps(facts_read["report"], indent=1, ensure_ascii=False))
        shutil.rmtree(work, ignore_errors=True)
    return cleaned, facts_read["report"], [redact_text(line) for line in facts_read["summary"]]


def engine_of(clean: CleanConfig) -> ShardEngine:
    """Returns the engine that processes shards, as settings name it."""
    num_workers = clean.num_workers or num_usable_cores()
    return RayTasks(num_workers) if clean.engine == "ray" else LocalProcesses(num_workers)


def noise_warnings(report: CleanReport) -> list[str]:
    """Returns warnings about the classifier of the step noise."""
    if why := refusal(report.noise):
        return [why]
    names = low_recall(report.noise)
    if not names:
        return []
    return [f"the noise classifier hardly finds junk such as {', '.join(names)}, from which it did not learn"]


def _quarantining(documents: Iterator[Any], report: SourceReport, path: Path) -> Iterator[Any]:
    """Yields the documents; writes a line into a file for each record that is skipped while they are read."""
    with open(path, "w", encoding="utf-8") as file:

        def write(reason: str, where: str, problem: str) -> None:
            entry = {"where": redact_text(where), "reason": reason, "problem": redact_text(problem)}
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

        report.on_skip = write
        yield from documents
