"""Cleaning: runs documents through a list of steps, and writes the kept and the dropped documents as files.

`STEPS` in `data/clean/config.py` lists the steps. `folder.py` says which files a folder of cleaned documents holds.

The work is cut into shards. Each is read, measured and written separately, on all cores; decisions that need the whole
corpus (automatic limits, duplicates) are made in between from small arrays. Every shard's results are files that are
complete or absent (`ShardFiles`), so a run that was killed resumes, with the same result to the byte.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from modelwright.core.artifacts import write_atomic, writing
from modelwright.core.config import DataError, digest, is_installed
from modelwright.core.progress import Progress
from modelwright.data.clean.folder import DROPPED, KEPT_FILES, KEPT_NAME, ORDER, REPORT, files_by_split
from modelwright.data.clean.report import CleanReport, describe_drops
from modelwright.data.clean.steps.quality import language_of
from modelwright.data.clean.steps.step import (
    DOCUMENTS,
    IDS,
    CorpusStep,
    CountingStep,
    Drop,
    DroppedDocument,
    MeasuredCorpus,
    Phase,
    Redactor,
    ShardFiles,
    Step,
    as_array,
    divide,
    numbered,
    pack_lines,
    unpack_lines,
)
from modelwright.data.document import KINDS, Document
from modelwright.data.workers import InProcess, ShardEngine

SHARD_DOCUMENTS = 1000
# A shard of long texts ends early, because a worker process holds all of it in memory.
_SHARD_CHARS = 8_000_000
_IN_PROCESS = InProcess()
# Version of the results: raised when the same documents and steps give another result or other files of it.
_VERSION = 5
WRITTEN = "written"
# The language is recognized for every twentieth document of a shard, and for 25 at most, because that takes as long as
# all other steps of some documents.
_LANGUAGE_OF_EVERY = 20
_MOST_LANGUAGES = 25
# Languages are recognized only in shards with at least this many documents: for fewer, loading the model is not worth
# 100 MB of memory and half a second.
_FEWEST_FOR_LANGUAGES = 500
# Zstandard's level for files that are read once and removed.
_FAST = 1


def clean_documents(
    documents: Iterator[Document],
    steps: Sequence[Step | CorpusStep],
    folder: Path,
    progress: Progress,
    *,
    work: Path | None = None,
    key: str = "",
    facts: Callable[[], Mapping[str, Any]] = dict,
    engine: ShardEngine = _IN_PROCESS,
    shard_documents: int = SHARD_DOCUMENTS,
) -> tuple[CleanReport, dict[str, Any]]:
    """Runs the documents through the steps and writes the files of `folder.py` into `folder` (created if absent).

    steps: any list; ours are made by `build_steps`.
    work: folder for unfinished work, which the caller removes; by default one in `folder`.
    key: identifies the documents; with the same key and steps, interrupted work is resumed, and documents that were all
    read before are not read again.
    facts: called when all documents are read; its result is returned with the report, also after a resume.
    engine: where shards are processed, by default in this process.
    shard_documents: number of documents that are read, measured and written at a time.

    Raises `DataError` if no training document is left, and `StorageError` if the disk is full.
    """
    own_work = folder / "work" if work is None else None
    # A step is identified by its class, and by its settings if it is a dataclass.
    identities = [
        [
            type(step).__qualname__,
            step.name,
            {entry.name: getattr(step, entry.name) for entry in fields(step) if entry.compare}
            if is_dataclass(step)
            else {},
        ]
        for step in steps
    ]
    identity = {"key": key, "steps": identities, "version": _VERSION}
    work = (work or folder / "work").absolute() / digest(identity)[:16]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not key:
            shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        run = _Run(divide(steps), work, engine, progress)
        read = run.read(documents, shard_documents, facts)
        for phase in range(len(run.phases) - 1):
            if phase:  # the first phase is measured while it is read
                run.map("measure", measure_shard, phase, read.num_documents, [()] * read.num_shards)
            run.decide(phase, read)
        report = run.write(read)
        report.files = files_by_split(_join(folder, work, read.num_shards))
        assert report.num_kept + report.num_dropped == report.num_documents, "a step lost or added documents"
        write_atomic(folder / REPORT, json.dumps(report.plain(), indent=1))
        # Last: a process that is killed before still finds its work.
        if own_work is not None:
            shutil.rmtree(own_work)
    if not any(split != "heldout" for splits in report.kept.values() for split in splits):
        reasons = f"{describe_drops(report)}; {report.num_kept:,} held out by --data.validation_fraction"
        text = f"no training document is left of {report.num_documents} ({reasons})"
        raise DataError(f"{text}; relax the settings of cleaning or add more text")
    return report, dict(read.facts)


@dataclass(frozen=True)
class _Read:
    """Totals of the documents that were read. facts: supplied by the caller that reads them."""

    num_shards: int
    num_documents: int
    num_bytes: int
    facts: Mapping[str, Any]


def measured(phase: int) -> str:
    """The stage of a shard whose documents went through the steps of a phase and were measured."""
    return f"measured{phase}"


def decided(phase: int) -> str:
    """The stage of a shard for which the corpus steps of a phase have decided."""
    return f"decided{phase}"


@dataclass(frozen=True)
class StepJob:
    """A shard, and the phase of the steps that is to be done."""

    files: ShardFiles
    phases: tuple[Phase, ...]
    phase: int
    documents: tuple[Document, ...] = ()
    """Documents that were read, for the first phase of a shard that is not measured yet."""


@dataclass(frozen=True)
class StepResult:
    """num_documents: number of documents in the shard; facts: of its stage."""

    number: int
    num_documents: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class _Run:
    """The work on all shards."""

    phases: tuple[Phase, ...]
    work: Path
    engine: ShardEngine
    progress: Progress

    def read(
        self, documents: Iterator[Document], shard_documents: int, facts: Callable[[], Mapping[str, Any]]
    ) -> _Read:
        """Reads the documents; each shard goes through the first phase right after it was read."""
        marker = self.work / "read.json"
        if marker.exists():
            read = _Read(**json.loads(marker.read_text()))
            if all(files.facts(measured(0)) is not None for files in numbered(self.work, read.num_shards)):
                return read
        shards = map(tuple, _shards(documents, shard_documents))
        results = self.map("read and measure", measure_shard, 0, 0, shards)
        read = _Read(
            num_shards=len(results),
            num_documents=sum(result.num_documents for result in results),
            num_bytes=sum(result.facts["bytes"] for result in results),
            facts=dict(facts()),
        )
        write_atomic(marker, json.dumps(vars(read)))
        return read

    def decide(self, phase: int, read: _Read) -> None:
        """Lets the corpus steps of a phase decide which documents are dropped."""
        marker, shards = self.work / f"{decided(phase)}.json", list(numbered(self.work, read.num_shards))
        if marker.exists() and all(files.facts(decided(phase)) is not None for files in shards):
            return
        corpus = MeasuredCorpus(
            shards=shards, stage=measured(phase), folder=self.work, key=self.work.name, engine=self.engine
        )
        report, dropped = CleanReport(), list[tuple[str, NDArray[np.int64], Mapping[int, Drop]]]()
        for step in self.phases[phase].corpus_steps if shards else ():
            decisions = step.decide(corpus)
            report.add(step.name, decisions.report)
            numbers = np.sort(np.fromiter(decisions.drops, np.int64, len(decisions.drops)))
            numbers = numbers[corpus.alive[numbers]]  # a document is dropped by the first step that drops it
            dropped.append((step.name, numbers, decisions.drops))
            corpus.alive[numbers] = False
        for files, start, end in zip(shards, corpus.starts[:-1], corpus.starts[1:], strict=True):
            entries: list[tuple[int, str, str, str]] = []
            for name, numbers, drops in dropped:
                for number in map(int, numbers[slice(*np.searchsorted(numbers, [start, end]))]):
                    drop = drops[number]
                    entries.append((number - int(start), name, drop.reason, drop.detail))
            files.write(decided(phase), {}, {"drops": sorted(entries)})
        write_atomic(marker, json.dumps(report.plain()))

    def write(self, read: _Read) -> CleanReport:
        report, last = CleanReport(num_documents=read.num_documents, num_bytes=read.num_bytes), len(self.phases) - 1
        for phase in range(last):
            report.merge(json.loads((self.work / f"{decided(phase)}.json").read_text()))
        facts: list[dict[str, Any]] = [{}] * read.num_shards
        for result in self.map("write", write_shard, last, read.num_documents, [()] * read.num_shards):
            facts[result.number] = result.facts
        for entry in facts:  # in order, so that the report is the same however the shards were finished
            report.count(entry)
        report.steps = [step.name for phase in self.phases for step in (*phase.steps, *phase.corpus_steps)]
        report.dropped = {name: report.dropped[name] for name in report.steps if name in report.dropped}
        return report

    def map(
        self, name: str, function: Callable[[StepJob], StepResult], phase: int, num_documents: int,
        shards: Iterable[tuple[Document, ...]],
    ) -> list[StepResult]:  # fmt: skip
        """Runs a function on all shards, which are empty in later phases: their documents are in files."""
        self.progress.begin(name, num_documents, "documents")
        jobs = (
            StepJob(ShardFiles(self.work, number), self.phases, phase, shard) for number, shard in enumerate(shards)
        )
        results, done = list[StepResult](), 0
        for result in self.engine.map(function, jobs):
            done += result.num_documents
            self.progress.advance(done)
            results.append(result)
        self.progress.end()
        return results


def _shards(documents: Iterator[Document], shard_documents: int) -> Iterator[list[Document]]:
    shard: list[Document] = []
    num_chars = 0
    for document in documents:
        shard.append(document)
        num_chars += len(document.identity)
        if len(shard) == shard_documents or num_chars > _SHARD_CHARS:
            yield shard
            shard, num_chars = [], 0
    if shard:
        yield shard


def _join(folder: Path, work: Path, num_shards: int) -> list[str]:
    """Writes the files of all shards one after another: Zstandard frames can be concatenated. Returns their names."""
    empty = ((name, b"") for name in (ORDER, DROPPED))  # these files exist even without any shard
    contents = (
        (name, content.tobytes())
        for shard in numbered(work, num_shards)
        for name, content in shard.read_arrays(WRITTEN).items()
    )
    files: dict[str, IO[bytes]] = {}
    with ExitStack() as stack:
        for name, content in chain(empty, contents):
            if name not in files:
                files[name] = stack.enter_context(open(folder / f"{name}.partial", "wb"))
            files[name].write(content)
    # An earlier report goes first: a process that is killed between the files leaves a folder that is not read.
    (folder / REPORT).unlink(missing_ok=True)
    for name in files:
        (folder / f"{name}.partial").replace(folder / name)
    for path in folder.iterdir():  # files of an earlier result, which had documents of another split or kind
        if KEPT_NAME.fullmatch(path.name) and path.name not in files:
            path.unlink()
    return list(files)


def measure_shard(job: StepJob) -> StepResult:
    """Runs the documents through the steps of a phase, and measures the others for its corpus steps.

    Raises `DataError` for a corpus step that measures under the name of another one's column.
    """
    stage, phase = measured(job.phase), job.phases[job.phase]
    facts = job.files.facts(stage)
    if facts is None:
        kept: list[Document] = []
        dropped: list[DroppedDocument] = []
        for result, _ in _results(job):
            if isinstance(result, DroppedDocument):
                dropped.append(result)
            else:
                kept.append(result)
        arrays: dict[str, NDArray[Any]] = {
            "kind": np.array([KINDS.index(document.kind) for document in kept], np.int8),
            "split": np.array([document.split == "heldout" for document in kept], np.int8),
        }
        for step in phase.corpus_steps:
            new = step.measure(kept, arrays)
            if taken := [name for name in new if name in (*arrays, IDS, DOCUMENTS, "dropped")]:
                raise DataError(f"{step.name}: measures {taken[0]!r}, which another step measures; rename the column")
            arrays |= new
        arrays |= {
            IDS: as_array(json.dumps([document.id for document in kept]).encode()),
            DOCUMENTS: as_array(pack_lines((document.to_json() for document in kept), level=_FAST)),
            "dropped": as_array(pack_lines((entry.to_json() for entry in dropped), level=_FAST)),
        }
        num_bytes = sum(len(document.text.encode("utf-8", "replace")) for document in job.documents)
        counts = _sum([step.take_counts() for step in phase.steps if isinstance(step, CountingStep)])
        facts = {"documents": len(kept) + len(dropped), "bytes": num_bytes, "counts": counts}
        job.files.write_arrays(stage, arrays, facts)
    return StepResult(job.files.number, facts["documents"], facts)


def write_shard(job: StepJob) -> StepResult:
    """Runs the documents through the last steps, and writes the kept documents and those dropped in any phase."""
    facts = job.files.facts(WRITTEN)
    if facts is None:
        steps = [step for phase in job.phases for step in phase.steps]
        tally = _Tally(steps)
        for phase in range(job.phase):
            job.files.verify(measured(phase))
            for line in unpack_lines(job.files.array(measured(phase), "dropped").tobytes()):
                tally.drop(DroppedDocument.from_json(line))
        for result, line in _results(job):
            if isinstance(result, DroppedDocument):
                tally.drop(result)
            else:
                tally.keep(result, line)
        arrays = {KEPT_FILES[place]: as_array(pack_lines(lines)) for place, lines in sorted(tally.kept.items())}
        order = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(tally.order))
        arrays |= {ORDER: as_array(order), DROPPED: as_array(pack_lines(tally.dropped))}
        earlier = [(job.files.facts(measured(phase)) or {}).get("counts", {}) for phase in range(job.phase)]
        own = [step.take_counts() for step in steps if isinstance(step, CountingStep)]
        facts = {
            **{which: [(*names, entry) for names, entry in part.items()] for which, part in tally.entries.items()},
            "counts": _sum([*earlier, *own, tally.counts()]),
            "documents": len(tally.order) + len(tally.dropped),
        }
        job.files.write_arrays(WRITTEN, arrays, facts)
    return StepResult(job.files.number, facts["documents"], facts)


def _results(job: StepJob) -> Iterator[tuple[Document | DroppedDocument, str]]:
    """Yields the documents that enter a phase, dropped as the corpus steps of the phase before decided, or after the
    steps of this one; with the line of JSON that they were read from if they are unchanged, "" otherwise.
    """
    steps = job.phases[job.phase].steps
    if job.phase == 0:
        yield from ((_through(document, steps), "") for document in job.documents)
        return
    before = job.phase - 1
    job.files.verify(measured(before))
    drops = {index: drop for index, *drop in job.files.finished(decided(before))["drops"]}
    for index, line in enumerate(unpack_lines(job.files.array(measured(before), DOCUMENTS).tobytes())):
        document = Document.from_json(line)
        result = DroppedDocument(document, *drops[index]) if index in drops else _through(document, steps)
        yield result, line if result is document else ""


def _through(document: Document, steps: Sequence[Step]) -> Document | DroppedDocument:
    for step in steps:  # a document is dropped by the first step that drops it, and later ones do not see it
        result = step(document)
        if isinstance(result, Drop):
            return DroppedDocument(document, step.name, result.reason, result.detail)
        document = result
    return document


def _sum(counts: Sequence[Any]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter[str]] = {}
    for entry in counts:
        for name, counters in entry.items():
            total.setdefault(name, Counter()).update(counters)
    return {name: dict(counters) for name, counters in total.items()}


class _Tally:
    """The lines of kept and dropped documents, and counts of their documents and bytes.

    kept: by index of the file in `KEPT_FILES`; order: these indices, in the order of the documents; entries: counts by
    kind and split of kept documents, and by step and reason of dropped ones.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._redactors = [step for step in steps if isinstance(step, Redactor)]
        self.kept: dict[int, list[str]] = {}
        self.order = bytearray()
        self.dropped: list[str] = []
        self.entries: dict[str, dict[tuple[str, str], dict[str, int]]] = {"kept": {}, "dropped": {}}
        self._lengths = {"kept": Counter[str](), "dropped": Counter[str]()}
        self._sampled: list[Document] = []
        self._num_of_language = 0

    def keep(self, document: Document, line: str) -> None:
        """line: JSON of the document, "" if it is not known."""
        self._add("kept", document.kind, document.split, document.text)
        if document.kind in ("prose", "qa"):
            if self._num_of_language % _LANGUAGE_OF_EVERY == 0:
                self._sampled.append(document)
            self._num_of_language += 1
        place = KEPT_FILES.index(f"kept-{document.split}-{document.kind}.jsonl.zst")
        self.kept.setdefault(place, []).append(line or document.to_json())
        self.order.append(place)

    def drop(self, entry: DroppedDocument) -> None:
        document = entry.document
        self._add("dropped", entry.step, entry.reason, document.text)
        for step in self._redactors:  # the file of dropped documents is shown to people
            document = step.redact(document)
        self.dropped.append(DroppedDocument(document, entry.step, entry.reason, entry.detail).to_json())

    def counts(self) -> dict[str, dict[str, int]]:
        """Lengths and languages, by field of `CleanReport`."""
        lengths = {f"{which}_lengths": dict(counter) for which, counter in self._lengths.items()}
        is_large = len(self.order) + len(self.dropped) >= _FEWEST_FOR_LANGUAGES and is_installed("clean")
        sampled = self._sampled[:: -(-len(self._sampled) // _MOST_LANGUAGES) or 1] if is_large else []
        return {**lengths, "languages": dict(Counter(map(language_of, sampled)))}

    def _add(self, which: str, first: str, second: str, text: str) -> None:
        self._lengths[which][str(1 << max(0, len(text).bit_length() - 1))] += 1
        entry = self.entries[which].setdefault((first, second), {"documents": 0, "bytes": 0})
        entry["documents"] += 1
        entry["bytes"] += len(text.encode("utf-8", "replace"))
