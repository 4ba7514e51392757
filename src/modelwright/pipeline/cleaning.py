"""Sources to a folder of cleaned documents: the first stage of a run, and `modelwright clean`, which also tries it
on a sample and writes results to a store that fsspec knows (`s3://bucket/folder`).

In addition to the files of `data.clean` the folder contains `sources.json`, a report on the sources, and
`quarantine.jsonl`, with a line for each skipped record.
"""

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import fsspec
import fsspec.core

from modelwright.core.artifacts import StorageError, check_folder, lock_folder, make_folder, write_atomic, writing
from modelwright.core.config import ConfigError, DataError, difference, digest, dump
from modelwright.core.progress import Progress
from modelwright.core.resources import num_usable_cores
from modelwright.core.texts import redact_text
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.folder import DROPPED, KEPT_NAME, ORDER, REPORT, kept_files, read_dropped
from modelwright.data.clean.parquet import (
    FILE_NAME,
    FOLDER,
    check_parquet,
    names_of_splits,
    remove_parquet,
    write_parquet,
)
from modelwright.data.clean.report import CleanReport, describe_drops, explain
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


_LOCAL = "file://"


@dataclass(frozen=True)
class ResultStore:
    """A folder on a store. url: as the user wrote it; path: path of the folder on `filesystem`."""

    url: str
    filesystem: fsspec.AbstractFileSystem
    path: str

    @classmethod
    def open(cls, url: str, option: str) -> "ResultStore":
        """Finds the store of a URL. Raises `ConfigError` that names the option for a store that fsspec does not know,
        or whose package is missing.
        """
        protocol = url.partition("://")[0]
        try:
            filesystem, path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            remedy = "pip install 'modelwright[remote]'" if protocol == "s3" else str(error)
            raise ConfigError(f"{option}: {url} needs a package: {remedy}") from None
        except ValueError as error:
            raise ConfigError(f"{option}: {url} is not a usable URL ({error})") from None
        if not str(path).strip("/"):
            raise ConfigError(f"{option}: {url} names no folder; for example {protocol}://bucket/cleaned")
        return cls(url, filesystem, str(path).rstrip("/"))

    def check(self) -> None:
        """Writes and removes a small file, so that missing rights are known before the work. Raises `StorageError`."""
        name = f"{self.path}/.modelwright-check"
        with self._reporting("be written"):
            self.filesystem.makedirs(self.path, exist_ok=True)
            self.filesystem.pipe_file(name, b"modelwright")
            self.filesystem.rm_file(name)

    def upload(self, folder: Path, names: Sequence[str]) -> None:
        """Copies files of a folder, in this order; an existing one is replaced as a whole. Raises `StorageError`."""
        with self._reporting("be written"):
            for parent in {name.rpartition("/")[0] for name in names} - {""}:
                self.filesystem.makedirs(f"{self.path}/{parent}", exist_ok=True)
            for name in names:
                self.filesystem.put_file(str(folder / name), f"{self.path}/{name}")

    def remove(self, folder: str, pattern: re.Pattern[str], *, keep: Sequence[str] = ()) -> None:
        """Removes the files of a folder, "" for the store's folder itself, whose whole name matches, but not those of
        `keep`. Raises `StorageError`.
        """
        with self._reporting("be written"):
            self.filesystem.invalidate_cache()  # fsspec caches listings, which other processes may have changed
            try:
                paths: Any = self.filesystem.ls(f"{self.path}/{folder}".rstrip("/"), detail=False)
            except FileNotFoundError:
                return
            for path in paths:
                name = path.rpartition("/")[2]
                if pattern.fullmatch(name) and name not in keep:
                    self.filesystem.rm_file(path)

    def fetch(self, folder: Path, names: Sequence[str]) -> None:
        """Copies files into a folder. Raises `StorageError`."""
        with self._reporting("be read"):
            for name in names:
                self.filesystem.get_file(f"{self.path}/{name}", str(folder / name))

    def read(self, name: str) -> bytes:
        """Reads a file; b"" if it does not exist. Raises `StorageError`."""
        with self._reporting("be read"):
            try:
                content: Any = self.filesystem.cat_file(f"{self.path}/{name}")
                return content
            except FileNotFoundError:
                return b""

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Missing credentials and names that do not resolve are errors of each store's own library.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StorageError(f"{self.url}: cannot {what} ({reason}); check the address and the credentials") from None


def is_store(out: str) -> bool:
    """Returns True if `out` is on a store, not a folder of this machine."""
    return "://" in out and not out.startswith(_LOCAL)


def local_path(out: str) -> str:
    """Returns the path of a folder of this machine, which may be written as a `file://` URL."""
    return out.removeprefix(_LOCAL)


SETTINGS, WORK = "settings.json", "work"
_SEED = 1
"""Seed of a run with the default settings."""
_SAMPLE_DOCUMENTS = 5000
_EXAMPLES_PER_REASON = 2
_EXCERPT_CHARS = 80


def clean_sources(
    data: SourceConfig, clean: CleanConfig, out: str, progress: Progress, *, parquet: bool = False
) -> list[str]:  # fmt: skip
    """Cleans the sources into the folder `out`, of this machine or of a store; returns the lines to print.

    parquet: write the kept documents as Parquet files, too. Raises `ConfigError` for a folder that is not usable for
    the result.
    """
    if not is_store(out):
        return _clean_into_folder(data, clean, _checked(local_path(out), data.sources), out, progress, parquet)
    store = ResultStore.open(out, "--out")
    place, sources = f"{store.url.rstrip('/')}/", [f"{source.rstrip('/')}/" for source in data.sources]
    if clash := [one for one in sources if "://" in one and (place.startswith(one) or one.startswith(place))]:
        text = f"--out: {store.url} and the source {clash[0].rstrip('/')} lie in each other"
        raise ConfigError(f"{text}, so that the result would be read as text; choose a folder outside of the sources")
    store.check()
    # Cleaned into a folder of the working directory, which an interrupted command resumes, then copied.
    name = store.path.rpartition("/")[2]
    folder = _checked(f"{name}-{digest(store.url)[:8]}.work", data.sources)
    earlier = store.read(SETTINGS)
    with writing(folder):
        folder.mkdir(exist_ok=True)
        if earlier and not (folder / SETTINGS).exists():
            (folder / SETTINGS).write_bytes(earlier)
    lines = _clean_into_folder(data, clean, folder, store.url, progress, parquet)
    # Old tables, and below old files of kept documents, are removed: the new files need not overwrite all of them.
    store.remove(FOLDER, FILE_NAME)
    tables = [f"{FOLDER}/{path.name}" for path in sorted((folder / FOLDER).glob("*"))]
    kept = _kept_names(folder)
    store.remove("", KEPT_NAME, keep=kept)
    # The report comes last: a folder with a report is complete.
    store.upload(folder, [*kept, ORDER, DROPPED, *tables, QUARANTINE, SOURCES, SETTINGS, REPORT])
    shutil.rmtree(folder)
    return lines


def _clean_into_folder(
    data: SourceConfig, clean: CleanConfig, folder: Path, out: str, progress: Progress, parquet: bool
) -> list[str]:  # fmt: skip
    # `out` is the folder as the user named it, for messages.
    make_folder(folder)
    if parquet:
        check_parquet(folder)
    with lock_folder(folder, "this folder; wait for it or choose another --out"):
        # The result does not depend on how, and in how many processes, the shards are cleaned.
        deciding = {name: value for name, value in dump(clean).items() if name not in ("engine", "num_workers")}
        settings = {"data": dump(data), "clean": deciding}
        changed = ""
        try:
            earlier = cast(dict[str, Any], json.loads((folder / SETTINGS).read_text()))
        except (OSError, ValueError):
            changed = "unknown settings" if (folder / REPORT).exists() else ""
        else:
            now = json.loads(json.dumps(settings))
            names = [*_names(difference(now, earlier)), *_names(difference(earlier, now))]
            changed = ", ".join(dict.fromkeys(names))
        if changed:
            progress.note(f"clean: {out} holds the result of other settings, which is replaced: {changed}")
        key = digest({"data": settings["data"], "sources": fingerprint(data, clean)})
        # The run that reads the result divides it into splits, unless the user asks for them here.
        is_open = data.validation_fraction == 0
        remove_parquet(folder)  # first: whatever interrupts the rest, old tables are never next to a new result
        # Before the work: a result whose command was killed before its end is not one of unknown settings.
        write_atomic(folder / SETTINGS, json.dumps(settings, indent=1))
        cleaned, sources, unread = clean_into(
            data, clean, folder, folder / WORK, key, progress, seed=_SEED, leave_open=is_open
        )
        tables = write_parquet(folder, folder / WORK, cleaned.num_kept, progress) if parquet else []
    base = out.rstrip("/")
    lines = [*unread, *_funnel(cleaned), *noise_warnings(cleaned)]
    if sources["skipped"]:
        lines.append(f"skipped records are listed in {base}/{QUARANTINE}")
    lines.append(describe_drops(cleaned))
    lines.append(f"kept {base}/kept-*.jsonl.zst, dropped {base}/{DROPPED}")
    if tables:
        files = {name: f"{base}/{FOLDER}/{name}-*.parquet" for name in names_of_splits(tables)}
        words = f'"parquet", data_files={files}' if is_store(out) else repr(base)
        lines.append(f"as Parquet: {base}/{FOLDER}; in Python: datasets.load_dataset({words})")
    if set(sources["documents"]) == {"qa"}:  # nothing to pretrain on
        return [*lines, f"fine-tune a model on it: modelwright finetune MODEL {shlex.quote(out)} --name mine"]
    return [*lines, f"train on it: modelwright run quickstart --name mine --data.sources {shlex.quote(out)}"]


def explain_document(out: str, identifier: str) -> str:
    """Returns what cleaning did to a document of a cleaned folder, of this machine or of a store. Raises `DataError`
    for an unknown document.
    """
    if not is_store(out):
        return explain(Path(local_path(out)), identifier)
    with tempfile.TemporaryDirectory() as name:
        store, folder = ResultStore.open(out, "--out"), Path(name)
        store.fetch(folder, [REPORT])
        store.fetch(folder, [*_kept_names(folder), ORDER, DROPPED])
        return explain(folder, identifier)


def _kept_names(folder: Path) -> list[str]:
    return [name for files in kept_files(folder).values() for name in files.values()]


def try_cleaning(data: SourceConfig, clean: CleanConfig, progress: Progress) -> list[str]:
    """Cleans a sample of the sources (`modelwright clean --dry-run`) and returns the lines to print. Writes nothing."""
    report = SourceReport()
    documents = read_documents(data, report=report, leave_open=True, sample=_SAMPLE_DOCUMENTS)
    clean = replace(clean, duplicates=replace(clean.duplicates, index=""))
    with tempfile.TemporaryDirectory() as name:
        folder, problem = Path(name), ""
        try:
            clean_documents(documents, build_steps(clean, seed=_SEED), folder, progress, engine=engine_of(clean))
        except DataError as error:
            if not (folder / REPORT).exists():
                raise
            problem = str(error)
        cleaned = CleanReport(**json.loads((folder / REPORT).read_text()))
        # The first dropped documents of each step and reason, with the beginning of the text.
        by_reason: dict[tuple[str, str], list[str]] = {}
        for dropped in read_dropped(folder):
            shown = by_reason.setdefault((dropped.step, dropped.reason), [])
            if len(shown) < 2 * _EXAMPLES_PER_REASON:  # two lines each
                words = " ".join(dropped.document.text[: 4 * _EXCERPT_CHARS].split())
                text = "".join(char for char in words if char.isprintable())[:_EXCERPT_CHARS]
                shown += [f"  {dropped.document.id}{': ' * bool(dropped.detail)}{dropped.detail}", f"    {text}"]
    about = f"trial on {cleaned.num_documents:,} documents from the beginning of every file; nothing is written"
    lines = [
        about,
        *report.summary(),
        *_funnel(cleaned),
        *noise_warnings(cleaned),
        *(line for (step, reason), shown in by_reason.items() for line in (f"{step}: {reason}", *shown)),
        problem or describe_drops(cleaned),
    ]
    if clean.duplicates.near:
        lines.append("a whole corpus has more duplicates than a sample of it")
    return lines


def _checked(out: str, sources: tuple[str, ...]) -> Path:
    """Returns the folder for the result. Raises `ConfigError` if it is not a folder, or if the next reading of the
    sources would read the result as text.
    """
    folder = Path(out)
    check_folder(folder, "--out")
    place, named, inside = folder.resolve(), without_corpora(sources), list[str]()
    for source in named:
        # A source is a folder, or a pattern of all depths below one.
        root = Path(source.partition("**")[0]).expanduser().resolve()
        if "://" not in source and root.is_dir() and (root == place or root in place.parents):
            inside.append(source)
    files = [file.name for file in locate(named, lambda reason, where: None) if place in Path(file.path).parents]
    if inside or files:
        text = f"--out: {out} lies in the source {inside[0]}" if inside else f"--out: {out} holds the source {files[0]}"
        raise ConfigError(f"{text}, so that its result would be read as text; choose a folder outside of the sources")
    return folder


def _names(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _names(cast(Mapping[str, Any], value), f"{prefix}{name}.")
        else:
            yield prefix + name


def _funnel(report: CleanReport) -> Iterator[str]:
    """Yields a line for each step that ran, with the documents before it and those that it dropped."""
    left = report.num_documents
    yield f"{'step':<16}{'documents':>12}{'dropped':>12}"
    for step in report.steps:
        dropped = sum(entry["documents"] for entry in report.dropped.get(step, {}).values())
        yield f"{step:<16}{left:>12,}{dropped:>12,}"
        left -= dropped
    yield f"{'kept':<16}{left:>12,}"
    if report.changed_examples:
        changed = ", ".join(f"{count:,} by {step}" for step, count in report.changed_examples.items())
        yield f"examples whose text was changed: {changed} (--clean.format.examples keep, --clean.privacy.replace none)"
    if report.replaced:
        yield "replaced: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.replaced.items()))
