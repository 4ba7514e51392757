"""What deduplication knows of a corpus, what it finds, and its settings. `data/deduplicate.py` decides."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError

NOTHING = -1
TRAIN, HELDOUT = 0, 1
"""Values of `Corpus.split`."""
_MOST_CACHED = 20_000


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
    """What question/answer pairs are compared by: `answer`, so that one answer to many questions is learned once, or
    `conversation`, which keeps answers that many questions have in common, such as labels."""
    index: str = ""
    """Folder that keeps the fingerprints of kept documents across runs; near-duplicates of earlier runs' documents are
    dropped, too."""
    min_near_words: int = constant(20)
    """Shorter documents are neither near-duplicates nor parts of longer ones: a single word makes a difference."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.min_jaccard <= 1:
            raise ConfigError(f"min_jaccard: must be from 0.5 to 1, got {self.min_jaccard}; 0.85 is usual")


@dataclass(kw_only=True)
class Corpus:
    """What deduplication knows of N documents. kind: int8; split: 1 held out, 0 any other; own, keys: see
    `Fingerprints`; quality: higher is better; num_shingles: int64; alive: not dropped yet.
    """

    kind: NDArray[np.int8]
    split: NDArray[np.int8]
    own: NDArray[np.uint64]
    keys: NDArray[np.uint64]
    quality: NDArray[np.float32]
    num_shingles: NDArray[np.int64]
    bands: NDArray[np.uint64]
    alive: NDArray[np.bool_]


@dataclass(frozen=True)
class Duplicate:
    """Why documents are dropped: their numbers, the reason, the number of the document kept instead of each (`NOTHING`
    if unknown) and the similarity to it.
    """

    numbers: NDArray[np.int64]
    reason: str
    instead: NDArray[np.int64]
    similarity: NDArray[np.float32]


class ShingleStore:
    """The 5-gram hashes of all documents, one after another in a file that is mapped into memory."""

    def __init__(self, flat: NDArray[np.uint32], offsets: NDArray[np.int64]) -> None:
        """flat: the hashes; offsets [N + 1]: where those of each document begin."""
        self.flat, self.offsets = flat, offsets
        self._sets: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()

    def row(self, document: int) -> NDArray[np.uint32]:
        """The hashes of one document, in the order of its text."""
        return self.flat[self.offsets[document] : self.offsets[document + 1]]

    def unique(self, document: int) -> NDArray[np.uint32]:
        """The different hashes of one document, sorted; the last ones asked for stay in memory."""
        if document in self._sets:
            self._sets.move_to_end(document)
        else:
            self._sets[document] = np.unique(self.row(document))
            if len(self._sets) > _MOST_CACHED:
                self._sets.popitem(last=False)
        return self._sets[document]


def exact(corpus: Corpus, num_new: int) -> Duplicate:
    """All but the first of equal texts; those of the index come before all others."""
    alive = np.flatnonzero(corpus.alive)
    alive = np.concatenate([alive[alive >= num_new], alive[alive < num_new]])
    _, first, inverse = np.unique(corpus.own[alive], return_index=True, return_inverse=True)
    kept = alive[first][inverse]
    repeated = (kept != alive) & (alive < num_new)
    return Duplicate(alive[repeated], "duplicate", kept[repeated], np.ones(int(repeated.sum()), np.float32))
