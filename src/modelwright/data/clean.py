"""Cleaning: the steps in their order, what they keep and what they drop, both as files to look at.

The order, final (those in brackets join later at their place):

    [schema: records against a JSON Schema] -> [repair: HTML, mojibake] -> normalize -> length -> repetition
    -> [quality filters] -> duplicates -> [near-duplicates] -> [personal data]

Cheap steps stand before dear ones, repairs before judgments, and personal data last, on the text that stays.

    kept.jsonl.zst      documents, one JSON object a line
    dropped.jsonl.zst   the same with `step` and `reason`
    report.json         the counts
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper
from operator import attrgetter
from pathlib import Path

import zstandard

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ArtifactError, DataError, writing
from modelwright.core.progress import Progress
from modelwright.data.document import Document, Kind, Split
from modelwright.data.steps.duplicates import Duplicates, DuplicatesConfig
from modelwright.data.steps.length import Length, LengthConfig
from modelwright.data.steps.normalize import Normalize, NormalizeConfig
from modelwright.data.steps.repetition import Repetition, RepetitionConfig
from modelwright.data.steps.step import CleaningStep

KEPT, DROPPED, REPORT = "kept.jsonl.zst", "dropped.jsonl.zst", "report.json"
_PROGRESS_EVERY = 500


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """The steps' settings, in their order."""

    normalize: NormalizeConfig = field(default_factory=NormalizeConfig)
    length: LengthConfig = field(default_factory=LengthConfig)
    repetition: RepetitionConfig = field(default_factory=RepetitionConfig)
    duplicates: DuplicatesConfig = field(default_factory=DuplicatesConfig)


@dataclass(kw_only=True)
class CleanReport:
    """`kept[kind][split]` and `dropped[step][reason]`, each `{"documents": n, "bytes": UTF-8 bytes}`."""

    num_documents: int = 0
    num_bytes: int = 0
    kept: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    dropped: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        return sum(entry["documents"] for splits in self.kept.values() for entry in splits.values())

    @property
    def num_dropped(self) -> int:
        return sum(entry["documents"] for reasons in self.dropped.values() for entry in reasons.values())


_SETTINGS = {
    "binary data": "normalize.max_control_fraction",
    "too short": "length.min_chars",
    "too long": "length.max_chars",
    "repeated lines": "repetition.max_duplicate_line_fraction",
    "table of data": "repetition.max_data_fraction",
    "inside a training text": "duplicates.check_contained",
}
"""The setting that decides, by the reason that the steps give."""


def describe_drops(report: CleanReport, config: CleanConfig) -> str:
    """`71 dropped: 66 duplicate, 5 too long (--clean.length.max_chars 2000000)`."""
    reasons = []
    for step in report.dropped.values():
        for reason, entry in step.items():
            setting = _SETTINGS.get(reason, "")
            value = attrgetter(setting)(config) if setting else None
            reasons.append(f"{entry['documents']:,} {reason}" + (f" (--clean.{setting} {value})" if setting else ""))
    return f"{report.num_dropped:,} dropped" + (f": {', '.join(reasons)}" if reasons else "")


def build_steps(config: CleanConfig, scratch: Path) -> list[CleaningStep]:
    """The steps in their order; `scratch` is a folder for what waits on disk."""
    return [
        Normalize(config.normalize),
        Length(config.length),
        Repetition(config.repetition),
        Duplicates(config.duplicates, scratch),
    ]


def clean_documents(
    documents: Iterator[Document], config: CleanConfig, folder: Path, progress: Progress
) -> CleanReport:
    """Run the steps over the documents and write the three files into `folder` (made if absent).

    Raises `DataError` when no training document is left, and `StorageError` when the disk is full.
    """
    report = CleanReport()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _DocumentFile(folder / KEPT) as kept, _DocumentFile(folder / DROPPED) as dropped:
            stream = _counted(documents, report, progress)
            for step in build_steps(config, folder):
                stream = _run(step, stream, dropped, report)
            for document in stream:
                kept.write(document.to_json())
                _count(report.kept, document.kind, document.split, document)
    assert report.num_kept + report.num_dropped == report.num_documents, "a step lost or added documents"
    write_atomic(folder / REPORT, json.dumps(asdict(report), indent=1))
    if not any("train" in splits for splits in report.kept.values()):
        reasons = f"{describe_drops(report, config)}; {report.num_kept:,} held out by --data.validation_fraction"
        text = f"no training document is left of {report.num_documents} ({reasons})"
        raise DataError(f"{text}; relax the settings of cleaning or add more text")
    return report


def read_kept(folder: Path, *, split: Split | None = None, kind: Kind | None = None) -> Iterator[Document]:
    """The kept documents of one side and kind, or of all, in order. Raises `ArtifactError` when they are not there."""
    for line in _lines(folder / KEPT):
        document = Document.from_json(line)
        if split in (None, document.split) and kind in (None, document.kind):
            yield document


def read_dropped(folder: Path) -> Iterator[tuple[Document, str, str]]:
    """The dropped documents with `(step, reason)`."""
    for line in _lines(folder / DROPPED):
        entry = json.loads(line)
        step, reason = entry.pop("step"), entry.pop("reason")
        yield Document(**entry), step, reason


def _run(
    step: CleaningStep, documents: Iterator[Document], dropped: "_DocumentFile", report: CleanReport
) -> Iterator[Document]:
    def drop(document: Document, reason: str) -> None:
        dropped.write(json.dumps({"step": step.name, "reason": reason, **vars(document)}, ensure_ascii=False))
        _count(report.dropped, step.name, reason, document)

    return step(documents, drop)


def _counted(documents: Iterator[Document], report: CleanReport, progress: Progress) -> Iterator[Document]:
    for document in documents:
        report.num_documents += 1
        report.num_bytes += len(document.text.encode("utf-8", "replace"))
        if report.num_documents % _PROGRESS_EVERY == 0:
            progress.advance(report.num_documents, dropped=report.num_dropped)
        yield document
    progress.advance(report.num_documents, dropped=report.num_dropped)


def _count(counters: dict[str, dict[str, dict[str, int]]], first: str, second: str, document: Document) -> None:
    entry = counters.setdefault(first, {}).setdefault(second, {"documents": 0, "bytes": 0})
    entry["documents"] += 1
    entry["bytes"] += len(document.text.encode("utf-8", "replace"))


class _DocumentFile:
    """A compressed JSON Lines file being written."""

    def __init__(self, path: Path) -> None:
        self._raw = open(path, "wb")  # noqa: SIM115 - closed in __exit__
        stream = zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(self._raw)
        self._text = TextIOWrapper(stream, encoding="utf-8", newline="\n")

    def write(self, line: str) -> None:
        self._text.write(line + "\n")

    def __enter__(self) -> "_DocumentFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._text.close()
        self._raw.close()


def _lines(path: Path) -> Iterator[str]:
    try:
        with open(path, "rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            yield from TextIOWrapper(stream, encoding="utf-8", newline="\n")
    except FileNotFoundError:
        raise ArtifactError(f"{path}: is missing; run the clean stage") from None
    except (zstandard.ZstdError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: is damaged ({error}); run the clean stage again") from None
