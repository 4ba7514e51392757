"""The files of a folder of cleaned documents, and their readers.

    kept-SPLIT-KIND.jsonl.zst    documents of one split and kind in their order, one JSON object a line
    order.zst                    a byte for each kept document in the order of the corpus: the place of its file in
                                 `KEPT_FILES`
    dropped.jsonl.zst            the others, with `step`, `reason` and `detail`
    report.json                  the counts, the limits in effect, and the names of the files by split and kind

A reader decodes only the files that it needs. Several of them together give the documents in the order of the corpus.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import zstandard

from modelwright.core.artifacts import ArtifactError
from modelwright.data.clean.steps.step import DroppedDocument
from modelwright.data.document import KINDS, SPLITS, Document, Kind, Split

ORDER, DROPPED, REPORT = "order.zst", "dropped.jsonl.zst", "report.json"
_ALL_SPLITS: tuple[Split, ...] = (*SPLITS, "open")
# `order.zst` holds places in this tuple: a new split or kind needs a new `_VERSION` of cleaning.
KEPT_FILES = tuple(f"kept-{split}-{kind}.jsonl.zst" for split in _ALL_SPLITS for kind in KINDS)
# Earlier versions wrote one file, `kept.jsonl.zst`. Its folder is recognized, or its dropped text would be read.
KEPT_NAME = re.compile(r"kept(-\w+-\w+)?\.jsonl\.zst")
_CHUNK_BYTES = 2**16


def files_by_split(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Maps split and kind to the `KEPT_FILES` that are among the names."""
    result: dict[str, dict[str, str]] = {}
    for place, name in enumerate(KEPT_FILES):
        if name in names:
            split, kind = divmod(place, len(KINDS))
            result.setdefault(_ALL_SPLITS[split], {})[KINDS[kind]] = name
    return result


def without_dropped(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits paths of files into those to read and those of cleaned folders that are not kept documents. A folder is
    recognized by its kept and its dropped documents.
    """
    paths = [PurePosixPath(name) for name in names]
    with_kept = {path.parent for path in paths if KEPT_NAME.fullmatch(path.name)}
    cleaned = with_kept & {path.parent for path in paths if path.name == DROPPED}
    own = [not KEPT_NAME.fullmatch(path.name) and not cleaned.isdisjoint(path.parents) for path in paths]
    return (
        [name for name, is_own in zip(names, own, strict=True) if not is_own],
        [name for name, is_own in zip(names, own, strict=True) if is_own],
    )


def kept_files(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """The names of the files of kept documents, by split and kind; files without documents are not written.

    Raises `ArtifactError` if the report is missing or damaged, or if an earlier version wrote the folder.
    """
    path = folder / REPORT
    try:
        files = json.loads(path.read_bytes()).get("files")
    except FileNotFoundError:
        raise ArtifactError(f"{path}: is missing; run the clean stage") from None
    except (ValueError, AttributeError):
        raise ArtifactError(f"{path}: is damaged; run the clean stage again") from None
    if files is None:
        text = "an earlier version wrote this folder, with all kept documents in one file"
        raise ArtifactError(f"{folder}: {text}; run the clean stage again")
    return files


def read_kept(folder: Path, *, split: Split | None = None, kinds: Collection[Kind] = KINDS) -> Iterator[Document]:
    """The kept documents of one split, or of all, and of these kinds, in the order of the corpus.

    Only the files of these documents are decoded. Raises `ArtifactError` if they are missing or damaged.
    """
    names = [
        name
        for of_split, files in kept_files(folder).items()
        for kind, name in files.items()
        if split in (None, of_split) and kind in kinds
    ]
    if unknown := [name for name in names if name not in KEPT_FILES]:
        raise ArtifactError(f"{folder / REPORT}: is damaged: names {unknown[0]!r}; run the clean stage again")
    lines = {KEPT_FILES.index(name): _lines(folder / name) for name in names}
    if len(lines) < 2:  # a single file is in order
        for of_file in lines.values():
            yield from map(Document.from_json, of_file)
        return
    # `order.zst` merges the files: each of its bytes names the file that has the next document of the corpus.
    with _opened(folder / ORDER) as stream:
        for chunk in iter(lambda: stream.read(_CHUNK_BYTES), b""):
            for place in chunk:
                if place not in lines:
                    continue
                line = next(lines[place], None)
                if line is None:
                    path = folder / KEPT_FILES[place]
                    raise ArtifactError(f"{path}: is damaged (it ends too early); run the clean stage again")
                yield Document.from_json(line)


def read_dropped(folder: Path) -> Iterator[DroppedDocument]:
    """The dropped documents. Raises `ArtifactError` if they are missing."""
    for line in _lines(folder / DROPPED):
        yield DroppedDocument.from_json(line)


def _lines(path: Path) -> Iterator[str]:
    with _opened(path) as stream:
        yield from TextIOWrapper(stream, encoding="utf-8", newline="\n")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file decompressed. Read errors in the block become `ArtifactError`."""
    try:
        decompressor = zstandard.ZstdDecompressor()
        with open(path, "rb") as raw, decompressor.stream_reader(raw, read_across_frames=True) as stream:
            yield stream
    except FileNotFoundError:
        raise ArtifactError(f"{path}: is missing; run the clean stage") from None
    except (zstandard.ZstdError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: is damaged ({error}); run the clean stage again") from None
