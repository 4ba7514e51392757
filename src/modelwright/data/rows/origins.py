"""Origins of packed rows: their source and score, and the document of each of their pieces.

A mixture weighs the source and a curriculum sorts by the score; augmentation changes the document while a model trains.
`pack` writes next to the rows, where their sequences have an `Origin`:

    origins.bin           int32 [pieces, 5] in the order of lengths.bin: the number of the document, the number of the
                          sequence among those of the document, the piece's first token in the sequence, how many
                          tokens at its beginning an earlier piece has too, and whether the sequence ends with it
    documents.jsonl       the documents, one a line, in the order in which they were packed
    document_offsets.bin  int64 [documents + 1], where each line starts
"""

import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import DataError
from modelwright.data.document import Document

ORIGINS, DOCUMENTS, DOCUMENT_OFFSETS = "origins.bin", "documents.jsonl", "document_offsets.bin"
COMPRESSION_RATIO = "compression_ratio"
# Fixed, because scores depend on it.
COMPRESSION_LEVEL = 6


class Origin(NamedTuple):
    """Origin of a sequence of tokens. part: its number among the sequences of the document, which are consecutive."""

    document: Document
    part: int = 0


class PieceOrigin(NamedTuple):
    """Origin of a piece of a row. document: number for `RowOrigins.document`; part: number of the sequence in the
    document; first: index of the piece's first token in the sequence; num_repeated: tokens at its beginning that an
    earlier piece has too; is_last: the sequence ends with the piece.
    """

    document: int
    part: int
    first: int
    num_repeated: int
    is_last: bool


class OriginSpool:
    """Writes origins while rows are packed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pieces = array("i")
        self._offsets = array("q", [0])
        self._last: Document | None = None
        self._file = open(folder / DOCUMENTS, "wb", buffering=2**20)  # noqa: SIM115

    def add(self, origin: Origin, *, first: int, num_repeated: int, is_last: bool) -> None:
        """Adds the origin of the next piece."""
        # The pieces of a document are consecutive, so comparing with the last one stores each document once.
        if origin.document is not self._last:
            self._last = origin.document
            # Lone surrogates survive the round trip.
            num_bytes = self._file.write(origin.document.to_json().encode("utf-8", "surrogatepass") + b"\n")
            self._offsets.append(self._offsets[-1] + num_bytes)
        self._pieces.extend((len(self._offsets) - 2, origin.part, first, num_repeated, int(is_last)))

    def write(self, order: np.ndarray) -> None:
        """Writes the origins of the pieces in this order [pieces]."""
        self.close()
        pieces = np.frombuffer(self._pieces, dtype=np.int32).reshape(-1, len(PieceOrigin._fields))
        if len(pieces) != len(order):
            raise ValueError("only some of the sequences have an origin")
        pieces[order].tofile(self.folder / ORIGINS)
        np.frombuffer(self._offsets, dtype=np.int64).tofile(self.folder / DOCUMENT_OFFSETS)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class RowOrigins:
    """The origins of the rows in a folder, mapped into memory."""

    pieces: np.ndarray
    """Fields of `PieceOrigin` [pieces, 5] int32."""
    row_starts: np.ndarray
    """Index of each row's first piece, [rows + 1] int64."""
    text: np.ndarray
    """Bytes of the documents."""
    offsets: np.ndarray
    """Index of each document's first byte, [documents + 1] int64."""

    @classmethod
    def open(cls, folder: Path) -> "RowOrigins":
        """Maps the origins of a folder. Raises `ArtifactError` if the rows were packed without origins."""
        try:
            offsets = np.fromfile(folder / DOCUMENT_OFFSETS, dtype=np.int64)
            return cls(
                pieces=np.memmap(folder / ORIGINS, dtype=np.int32, mode="r").reshape(-1, len(PieceOrigin._fields)),
                row_starts=np.memmap(folder / "offsets.bin", dtype=np.int64, mode="r"),
                text=np.memmap(folder / DOCUMENTS, dtype=np.uint8, mode="r"),
                offsets=offsets,
            )
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"{folder}: the documents of the rows are missing ({error}); run the pack stage again"
            ) from None

    def of_row(self, row: int) -> Sequence[PieceOrigin]:
        """Returns the origins of the pieces in one row, in order."""
        rows = self.pieces[self.row_starts[row] : self.row_starts[row + 1]].tolist()
        return [
            PieceOrigin(document, part, first, num_repeated, bool(is_last))
            for document, part, first, num_repeated, is_last in rows
        ]

    def document(self, number: int) -> Document:
        """Returns the document of a number."""
        line = self.text[self.offsets[number] : self.offsets[number + 1]].tobytes()
        return Document.from_json(line.decode("utf-8", "surrogatepass"))


def row_source(document: Document, group_by: Literal["none", "kind", "source"]) -> str:
    """Returns the name of the source to which the rows of a document belong; "" without sources."""
    return {"none": "", "kind": document.kind, "source": document.source}[group_by]


def row_score(document: Document, score: str) -> float | None:
    """Returns the score of a document: compressed over uncompressed bytes (zlib; a repetitive text is easy), or its
    numeric field `score` from `meta`; None if `score` is "".

    Raises `DataError` if the field is missing or not a finite number.
    """
    if not score:
        return None
    if score == COMPRESSION_RATIO:
        raw = document.text.encode("utf-8", "replace")
        return len(zlib.compress(raw, COMPRESSION_LEVEL)) / max(1, len(raw))
    value = document.meta.get(score)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        names = ", ".join(map(str, document.meta)) or "none"
        raise DataError(
            f"{document.id}: the field {score!r} is {value!r}, not a number (fields of the record: {names}); "
            "name it in data.keep_fields and give every record one, or set batching.curriculum.by to "
            f"{COMPRESSION_RATIO}"
        )
    return float(value)
