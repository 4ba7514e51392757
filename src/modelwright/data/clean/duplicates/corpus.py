"""Settings of deduplication, its view of a corpus, and its findings. `deduplicate.py` decides.

In memory are 15 bytes a document, and what documents have in common with others; texts are compared from files.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError
from modelwright.data.clean.duplicates.shingles import NUM_BANDS
from modelwright.data.clean.measured_corpus import DiskFile

NOTHING = -1
NO_NUMBER = 2**32 - 1
"""`NOTHING` in arrays of uint32."""
TRAIN, HELDOUT = 0, 1
"""Values of `Corpus.split`."""
_CACHED_BYTES = 32 * 2**20
# 5-grams that are read from disk at a time.
_READ_AT_ONCE = 2**19


@dataclass(frozen=True, kw_only=True)
class DuplicatesConfig:
    """Exact, contained and near-duplicates."""

    contained: Literal["all", "heldout", "off"] = "all"
    """Drop prose and code whose whole text is inside a longer one of the same kind; `heldout` checks only whether
    held-out documents are inside training documents, of any kind."""
    near: bool = True
    """Drop near-duplicates."""
    min_jaccard: float = 0.85
    """Jaccard similarity of word 5-grams from which two documents are near-duplicates."""
    pairs_by: Literal["answer", "conversation"] = "answer"
    """Text by which question/answer pairs are compared: `answer`, so that one answer to many questions is learned once,
    or `conversation`, which keeps answers that many questions have in common, such as labels."""
    index: str = ""
    """Folder with the fingerprints of earlier runs' kept documents, whose near-duplicates are dropped, too."""
    min_near_words: int = constant(20)
    """Shorter documents are neither near-duplicates nor parts of longer ones: a single word makes a difference."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.min_jaccard <= 1:
            raise ConfigError(f"min_jaccard: must be from 0.5 to 1, got {self.min_jaccard}; 0.85 is usual")


class ShingleStore:
    """The 5-gram hashes of all documents, one after another in a file."""

    def __init__(self, path: Path, offsets: NDArray[np.int64]) -> None:
        """path: the hashes, uint32; offsets [N + 1]: index of the first hash of each document."""
        self.offsets = offsets
        self._file = DiskFile(path)
        self._sets: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()
        self._cached_bytes = 0

    def row(self, document: int) -> NDArray[np.uint32]:
        """The hashes of one document, in the order of its text."""
        return self._file.read(np.uint32, int(self.offsets[document]), int(self.offsets[document + 1]))

    def unique(self, document: int) -> NDArray[np.uint32]:
        """The different hashes of one document, sorted; the most recently used ones stay in memory."""
        if document in self._sets:
            self._sets.move_to_end(document)
            return self._sets[document]
        hashes = self._sets[document] = np.unique(self.row(document))
        self._cached_bytes += hashes.nbytes
        while self._cached_bytes > _CACHED_BYTES and len(self._sets) > 1:
            self._cached_bytes -= self._sets.popitem(last=False)[1].nbytes
        return hashes

    def chunks(self, num_documents: int) -> Iterator[tuple[int, int, NDArray[np.uint32]]]:
        """Yields `(first, last, hashes)` of many of the first `num_documents` at a time, `first` to below `last`."""
        first = 0
        while first < num_documents:
            last = int(np.searchsorted(self.offsets, self.offsets[first] + _READ_AT_ONCE, side="right")) - 1
            last = min(num_documents, max(last, first + 1))
            yield first, last, self._file.read(np.uint32, int(self.offsets[first]), int(self.offsets[last]))
            first = last

    def ends(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """The first and the last hash of each of some documents, which are in ascending order and not empty."""
        firsts, lasts = np.empty(len(documents), np.uint32), np.empty(len(documents), np.uint32)
        for first, last, flat in self.chunks(int(documents[-1]) + 1 if len(documents) else 0):
            own = slice(*np.searchsorted(documents, [first, last]))
            firsts[own] = flat[self.offsets[documents[own]] - self.offsets[first]]
            lasts[own] = flat[self.offsets[documents[own] + 1] - self.offsets[first] - 1]
        return firsts, lasts


@dataclass(frozen=True)
class BandFiles:
    """Hashes of all documents, a uint64 file a band: 16 of MinHash (0 without 5-grams), or parts of image hashes."""

    folder: Path

    def path(self, band: int) -> Path:
        return self.folder / f"band{band:02d}.bin"

    def column(self, band: int) -> NDArray[np.uint64]:
        """Reads a band of all documents."""
        return np.fromfile(self.path(band), np.uint64)

    def rows(self, first: int, last: int) -> NDArray[np.uint64]:
        """Reads all bands of MinHash of the documents from `first` to below `last` [last - first, 16]."""
        columns = [
            np.fromfile(self.path(band), np.uint64, count=last - first, offset=8 * first) for band in range(NUM_BANDS)
        ]
        return np.stack(columns, axis=1)


@dataclass(frozen=True)
class InCommon:
    """Documents that have a value in common with another one. numbers [P]: ascending; values [P, ...]: of each."""

    numbers: NDArray[np.int64]
    values: NDArray[np.uint64]

    @classmethod
    def of(cls, values: NDArray[np.uint64]) -> "InCommon":
        """Selects the documents whose value [N] is also that of another one."""
        order = np.argsort(values, kind="stable")
        same = values[order[1:]] == values[order[:-1]]
        repeated = np.zeros(len(values), np.bool_)
        repeated[order[1:][same]] = True
        repeated[order[:-1][same]] = True
        numbers = np.flatnonzero(repeated)
        return cls(numbers, values[numbers])


@dataclass(kw_only=True)
class Corpus:
    """The data of N documents for deduplication. kind: int8; split: int8, 1 held out, 0 any other; quality: float32,
    higher is better; alive: not dropped yet; equal: by the digest of kind, split and text; shared: held-out documents,
    and training documents with a digest of theirs, by the digests of text and summary [P, 2].
    """

    kind: NDArray[np.int8]
    split: NDArray[np.int8]
    quality: NDArray[np.float32]
    alive: NDArray[np.bool_]
    equal: InCommon
    shared: InCommon
    shingles: ShingleStore
    bands: BandFiles

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def num_shingles(self) -> NDArray[np.int64]:
        """Number of 5-grams of each document [N]; computed anew by every call."""
        return np.diff(self.shingles.offsets)


@dataclass(frozen=True)
class Duplicate:
    """Documents that are dropped for one reason: their numbers, the reason, the number of the document kept instead of
    each (`NOTHING` if unknown) and the similarity to it.
    """

    numbers: NDArray[np.int64]
    reason: str
    instead: NDArray[np.int64]
    similarity: NDArray[np.float32]


def no_numbers(length: int) -> NDArray[np.uint32]:
    """Makes an array for a document's number for each of `length` documents, filled with `NO_NUMBER`."""
    return np.full(length, NO_NUMBER, np.uint32)


def exact(corpus: Corpus, num_new: int) -> Duplicate:
    """Finds all but the first of equal texts; those of the index come before all others."""
    is_alive = corpus.alive[corpus.equal.numbers]
    numbers, values = corpus.equal.numbers[is_alive], corpus.equal.values[is_alive]
    num_own = int(np.searchsorted(numbers, num_new))
    # Rolled, so that the index's documents come first; the stable sort then keeps them as the first of equal ones.
    order = np.argsort(np.roll(values, -num_own), kind="stable")
    order += num_own
    order[order >= len(numbers)] -= len(numbers)
    numbers, values = numbers[order], values[order]
    del order  # the arrays of a large corpus fill memory; each is freed as soon as possible
    firsts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])[: len(values)])
    del values
    kept = np.repeat(numbers[firsts], np.diff(firsts, append=len(numbers)))
    repeated = (kept != numbers) & (numbers < num_new)
    numbers, kept = numbers[repeated], kept[repeated]
    order = np.argsort(numbers)
    return Duplicate(numbers[order], "duplicate", kept[order], np.ones(len(numbers), np.float32))
