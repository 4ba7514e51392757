"""The files of a folder of cleaned documents, and how they are read."""

from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path, PurePosixPath

import zstandard

from modelwright.core.errors import ArtifactError
from modelwright.data.clean.steps.step import DroppedDocument
from modelwright.data.document import Document, Kind, Split

KEPT, DROPPED, REPORT = "kept.jsonl.zst", "dropped.jsonl.zst", "report.json"


def without_dropped(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split paths of files into those to read and those of cleaned folders that are not kept documents. A folder is
    recognized by its kept and its dropped documents.
    """
    paths = [PurePosixPath(name) for name in names]
    parts = [{path.parent for path in paths if path.name == part} for part in (KEPT, DROPPED)]
    cleaned = parts[0] & parts[1]
    own = [path.name != KEPT and not cleaned.isdisjoint(path.parents) for path in paths]
    return (
        [name for name, is_own in zip(names, own, strict=True) if not is_own],
        [name for name, is_own in zip(names, own, strict=True) if is_own],
    )


def read_kept(folder: Path, *, split: Split | None = None, kind: Kind | None = None) -> Iterator[Document]:
    """The kept documents of one split and kind, or of all, in order. Raises `ArtifactError` if they are missing."""
    for line in _lines(folder / KEPT):
        document = Document.from_json(line)
        if split in (None, document.split) and kind in (None, document.kind):
            yield document


def read_dropped(folder: Path) -> Iterator[DroppedDocument]:
    """The dropped documents. Raises `ArtifactError` if they are missing."""
    for line in _lines(folder / DROPPED):
        yield DroppedDocument.from_json(line)


def _lines(path: Path) -> Iterator[str]:
    try:
        decompressor = zstandard.ZstdDecompressor()
        with open(path, "rb") as raw, decompressor.stream_reader(raw, read_across_frames=True) as stream:
            yield from TextIOWrapper(stream, encoding="utf-8", newline="\n")
    except FileNotFoundError:
        raise ArtifactError(f"{path}: is missing; run the clean stage") from None
    except (zstandard.ZstdError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: is damaged ({error}); run the clean stage again") from None
