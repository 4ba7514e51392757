"""Cleaning in five stages: what they keep and what they drop, both as files to look at.

    format      markup, broken encodings, Unicode, white space, URLs
    quality     length, repetition, entropy, symbols: limits by kind of document
    noise       a classifier of trusted text against junk
    duplicates  exact, contained and near-duplicates
    privacy     personal data and secrets, replaced by markers

A folder of cleaned documents holds:

    kept.jsonl.zst      documents, one JSON object a line
    dropped.jsonl.zst   the same with `step`, `reason` and `detail`
    report.json         the counts and the limits in effect

The work is cut into shards. Each is read, measured and written by itself, on all cores; what needs the whole corpus
(automatic limits, duplicates) is decided in between from small arrays. Every shard's results are files that are whole
or absent (`shard_files.py`), so a run that was killed goes on where it was, with the same result to the byte.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import digest
from modelwright.core.errors import ArtifactError, DataError, writing
from modelwright.core.progress import Progress
from modelwright.core.resources import num_usable_cores
from modelwright.data.clean_config import CleanConfig
from modelwright.data.clean_decisions import Measured, decide
from modelwright.data.clean_folder import DROPPED, KEPT, REPORT
from modelwright.data.clean_noise import ReadTrusted
from modelwright.data.clean_shards import measure_shard, write_shard
from modelwright.data.document import Document, Kind, Split
from modelwright.data.shard_files import ShardFiles, numbered, pack_lines, write_file
from modelwright.data.workers import InProcess, LocalProcesses, ShardEngine

STAGES = ("format", "quality", "noise", "duplicates", "privacy")
_SHARD_CHARS = 8_000_000
_FEWEST_SHARDS_FOR_PROCESSES = 4
_VERSION = 2
"""Raised when the same documents and settings give another result."""


@dataclass(kw_only=True)
class CleanReport:
    """`kept[kind][split]` and `dropped[step][reason]`, each `{"documents": n, "bytes": UTF-8 bytes}`; `replaced`:
    values of each kind that the stage privacy replaced; `failed_validators`: how often each of its validators raised
    an exception, so that the value stayed; `limits`: of the stage quality, by kind of document;
    `remedies`: options that keep what this stage dropped, by reason;
    `noise`: how the classifier was trained, and its precision and recall on documents and generators it did not see.
    """

    num_documents: int = 0
    num_bytes: int = 0
    kept: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    dropped: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)
    failed_validators: dict[str, int] = field(default_factory=dict)
    limits: dict[str, dict[str, float]] = field(default_factory=dict)
    remedies: dict[str, str] = field(default_factory=dict)
    noise: dict[str, Any] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        return sum(entry["documents"] for splits in self.kept.values() for entry in splits.values())

    @property
    def num_dropped(self) -> int:
        return sum(entry["documents"] for reasons in self.dropped.values() for entry in reasons.values())


@dataclass(frozen=True)
class DroppedDocument:
    """A document that cleaning dropped, the stage that dropped it, and why."""

    document: Document
    step: str
    reason: str
    detail: str


_REMEDIES = {
    "inside a training text": "--clean.duplicates.contained off",
    "inside another text": "--clean.duplicates.contained heldout",
    "near-duplicate": "--clean.duplicates.near false",
    "noise": "--clean.noise.trusted []",
}
"""The option that keeps what is dropped, by the reason, where it is not a limit of the stage quality."""


def describe_drops(report: CleanReport) -> str:
    """`71 dropped: 66 duplicate, 5 near-duplicate (keep them with --clean.duplicates.near false)`."""
    reasons: list[str] = []
    for entries in report.dropped.values():
        for reason, entry in entries.items():
            remedy = report.remedies.get(reason) or _REMEDIES.get(reason)
            hint = f" (keep {'them' if entry['documents'] > 1 else 'it'} with {remedy})" if remedy else ""
            reasons.append(f"{entry['documents']:,} {reason}{hint}")
    return f"{report.num_dropped:,} dropped" + (f": {', '.join(reasons)}" if reasons else "")


def clean_documents(
    documents: Iterator[Document],
    config: CleanConfig,
    folder: Path,
    progress: Progress,
    *,
    work: Path | None = None,
    key: str = "",
    facts: Callable[[], Mapping[str, Any]] = dict,
    engine: ShardEngine | None = None,
    read_trusted: ReadTrusted = lambda sources, most: [],
    seed: int = 0,
) -> tuple[CleanReport, dict[str, Any]]:
    """Clean the documents and write the three files into `folder` (created if absent).

    work: folder for what is unfinished, which the caller removes; by default one in `folder`. key: identifies the
    documents; with the same key and settings, work that was interrupted is resumed, and documents that were all read
    before are not read again. facts: called when all documents are read; what it returned then is returned with the
    report, also after a resume. engine: where shards are processed, by default on all cores of this machine.
    read_trusted: reads the sources of `noise.trusted`. seed: of the stage noise.

    Raises `DataError` if no training document is left, and `StorageError` if the disk is full.
    """
    own_work = folder / "work" if work is None else None
    identity = {"key": key, "clean": replace(config, num_workers=0), "seed": seed, "version": _VERSION}
    work = (work or folder / "work") / digest(identity)[:16]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not key:
            shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        split = _split(documents, config, work, progress, facts)
        run = _Run(
            config, work, split, engine or _local_engine(config, split["num_shards"]), progress, read_trusted, seed
        )
        run.measure()
        run.decide()
        report = run.write()
        _join(folder / KEPT, work, split["num_shards"], "kept.zst")
        _join(folder / DROPPED, work, split["num_shards"], "dropped.zst")
        assert report.num_kept + report.num_dropped == report.num_documents, "a stage lost or added documents"
        write_atomic(folder / REPORT, json.dumps(asdict(report), indent=1))
        if own_work is not None:
            shutil.rmtree(own_work)
    if not any(split != "heldout" for splits in report.kept.values() for split in splits):
        reasons = f"{describe_drops(report)}; {report.num_kept:,} held out by --data.validation_fraction"
        text = f"no training document is left of {report.num_documents} ({reasons})"
        raise DataError(f"{text}; relax the settings of cleaning or add more text")
    return report, split["facts"]


def read_kept(folder: Path, *, split: Split | None = None, kind: Kind | None = None) -> Iterator[Document]:
    """The kept documents of one split and kind, or of all, in order. Raises `ArtifactError` if they are missing."""
    for line in _lines(folder / KEPT):
        document = Document.from_json(line)
        if split in (None, document.split) and kind in (None, document.kind):
            yield document


def read_dropped(folder: Path) -> Iterator[DroppedDocument]:
    """The dropped documents. Raises `ArtifactError` if they are missing."""
    for line in _lines(folder / DROPPED):
        entry = json.loads(line)
        step, reason, detail = (entry.pop(name) for name in ("step", "reason", "detail"))
        yield DroppedDocument(Document.from_plain(entry), step, reason, detail)


def _local_engine(config: CleanConfig, num_shards: int) -> ShardEngine:
    if num_shards < _FEWEST_SHARDS_FOR_PROCESSES:
        return InProcess()
    return LocalProcesses(config.num_workers or num_usable_cores())


def _split(
    documents: Iterator[Document], config: CleanConfig, work: Path, progress: Progress,
    facts: Callable[[], Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Write the documents as shards; returns their number and those of documents and bytes."""
    marker = work / "split.json"
    if marker.exists():
        split = json.loads(marker.read_text())
        if all(files.facts("raw") is not None for files in numbered(work, split["num_shards"])):
            return split
    progress.begin("read", 0, "documents")
    totals = Counter[str]()
    shard: list[Document] = []
    num_chars = num_shards = 0

    def flush() -> None:
        nonlocal num_shards, num_chars
        files = ShardFiles(work, num_shards)
        write_file(files.path("raw.zst"), pack_lines((document.to_json() for document in shard), level=1))
        files.finish("raw", ["raw.zst"], {})
        num_shards, num_chars = num_shards + 1, 0
        shard.clear()
        progress.advance(totals["num_documents"])

    for document in documents:
        shard.append(document)
        num_chars += len(document.text)
        totals["num_documents"] += 1
        totals["num_bytes"] += len(document.text.encode("utf-8", "replace"))
        if len(shard) == config.shard_documents or num_chars > _SHARD_CHARS:
            flush()
    if shard:
        flush()
    progress.end()
    split = {"num_shards": num_shards, "facts": dict(facts()), **{name: totals[name] for name in _TOTALS}}
    write_atomic(marker, json.dumps(split))
    return split


_TOTALS = ("num_documents", "num_bytes")


@dataclass(frozen=True)
class _Run:
    """The work on all shards."""

    config: CleanConfig
    work: Path
    split: dict[str, Any]
    engine: ShardEngine
    progress: Progress
    read_trusted: ReadTrusted
    seed: int

    def measure(self) -> None:
        self._map("measure", measure_shard)

    def decide(self) -> None:
        """Decide for all shards which documents are dropped after the stage format."""
        marker = self.work / "decided.json"
        all_files = list(numbered(self.work, self.split["num_shards"]))
        if marker.exists() and all(files.facts("decided") is not None for files in all_files):
            return
        shards = [Measured.load(files) for files in all_files]
        facts, drops = decide(shards, self.config, self.seed, self.work, self.engine, self.read_trusted)
        starts = np.cumsum([0, *(len(shard.features) for shard in shards)])
        for files, start, end in zip(all_files, starts[:-1], starts[1:], strict=True):
            own = [(number - int(start), *drops[number]) for number in range(start, end) if number in drops]
            write_file(files.path("drops.json"), json.dumps(own).encode())
            files.finish("decided", ["drops.json"], {})
        write_atomic(marker, json.dumps(facts))

    def write(self) -> CleanReport:
        decided = json.loads((self.work / "decided.json").read_text())
        report = CleanReport(**decided, **{name: self.split[name] for name in _TOTALS})
        counts: list[dict[str, Any]] = [{}] * self.split["num_shards"]
        for number, facts in self._map("write", write_shard):
            counts[number] = facts
        for facts in counts:  # in order, so that the report is the same however the shards were finished
            for name in ("kept", "dropped"):
                for first, second, entry in facts[name]:
                    total = getattr(report, name).setdefault(first, {}).setdefault(second, {"documents": 0, "bytes": 0})
                    for unit in total:
                        total[unit] += entry[unit]
            for name in ("replaced", "failed_validators"):
                setattr(report, name, dict(Counter(getattr(report, name)) + Counter(facts[name])))
        report.dropped = {step: report.dropped[step] for step in STAGES if step in report.dropped}
        return report

    def _map(self, name: str, function: Callable[[Any], Any]) -> list[tuple[int, dict[str, Any]]]:
        items = [(str(self.work), number, self.config) for number in range(self.split["num_shards"])]
        self.progress.begin(name, self.split["num_documents"], "documents")
        result, done = [], 0
        for number, num_documents, facts in self.engine.map(function, items):
            done += num_documents
            self.progress.advance(done)
            result.append((number, facts))
        self.progress.end()
        return result


def _join(target: Path, work: Path, num_shards: int, name: str) -> None:
    """The files of all shards one after another: Zstandard frames may follow each other."""
    partial = target.with_name(target.name + ".partial")
    with open(partial, "wb") as joined:
        for files in numbered(work, num_shards):
            joined.write(files.read("written", name))
    partial.replace(target)


def _lines(path: Path) -> Iterator[str]:
    try:
        decompressor = zstandard.ZstdDecompressor()
        with open(path, "rb") as raw, decompressor.stream_reader(raw, read_across_frames=True) as stream:
            yield from TextIOWrapper(stream, encoding="utf-8", newline="\n")
    except FileNotFoundError:
        raise ArtifactError(f"{path}: is missing; run the clean stage") from None
    except (zstandard.ZstdError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: is damaged ({error}); run the clean stage again") from None
