"""Near-duplicates: documents are taken from the best to the worst, and one is dropped if its Jaccard similarity with
one that was kept is at least the threshold. Candidates are kept documents that share a MinHash band
(`steps/shingles.py`), found by `data/band_groups.py`.
"""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.data.band_groups import BandGroups, keep_in, kept_in
from modelwright.data.duplicate_corpus import HELDOUT, NO_NUMBER, Corpus, Duplicate, DuplicatesConfig, no_numbers
from modelwright.data.steps.shingles import NUM_BANDS, SHINGLE_WORDS, jaccard
from modelwright.data.workers import ShardEngine

_MOST_CANDIDATES = 200
"""A document with more candidates is compared with those that have the most bands in common."""
_MOST_PER_BAND = 200
"""Kept documents that are candidates through one band. Pages of one template share bands without being near-duplicates,
and comparing each with all others would take quadratic time; two that are near-duplicates also share bands that come
from their own text."""
_REMEMBERED_BITS = 18
"""Bits of the number of pairs whose similarity is remembered."""
_MULTIPLIER = 0x9E3779B97F4A7C15


def _best_first(
    corpus: Corpus, config: DuplicatesConfig, num_new: int, is_member: NDArray[np.bool_]
) -> NDArray[np.uint32]:
    """The numbers of the documents in the order in which they are taken."""
    length = corpus.num_shingles
    members = np.flatnonzero(is_member & (length > config.min_near_words - SHINGLE_WORDS)).astype(np.uint32)
    is_new, is_trained_on = members < num_new, corpus.split[members] != HELDOUT
    keys = (members, -length[members], -corpus.quality[members], is_trained_on, is_new)
    return members[np.lexsort(keys)]


class NearDuplicates:
    """Adds documents from the best to the worst, and marks near-duplicates of those that were kept before as dropped
    in the corpus. similarities: of pairs that were compared before; engine: where documents are grouped by band.
    """

    def __init__(
        self, corpus: Corpus, config: DuplicatesConfig, num_new: int, similarities: "Similarities", engine: ShardEngine
    ) -> None:
        self._corpus, self._config, self._num_new = corpus, config, num_new
        self._similarities, self._engine = similarities, engine
        self._groups: BandGroups | None = None
        self._instead = no_numbers(len(corpus))
        self._similarity = np.zeros(len(corpus), np.float32)
        self._late = np.empty(0, np.uint32), np.empty(0, np.int64)

    def add_all(self, members: NDArray[np.bool_]) -> None:
        """Add all documents that are alive. members [N]: which may be added, late ones included."""
        order = _best_first(self._corpus, self._config, self._num_new, members)
        self._groups = BandGroups.of(
            order, self._corpus.bands, self._engine, num_bands=NUM_BANDS, most=_MOST_PER_BAND
        )  # fmt: skip
        for number, places in self._groups:
            if self._corpus.alive[number]:
                self._add(number, places)

    def expect(self, numbers: NDArray[np.int64]) -> None:
        """Documents that are not alive now and may be added late."""
        if self._groups is not None:
            positions = np.flatnonzero(np.isin(self._groups.order, numbers))
            positions = positions[np.argsort(self._groups.order[positions])]
            self._late = self._groups.order[positions], positions

    def add_late(self, number: int) -> None:
        """Add a document that was expected, after all others."""
        place = int(np.searchsorted(self._late[0], number))
        if self._groups is not None and place < len(self._late[0]) and self._late[0][place] == number:
            self._add(number, self._groups.at(int(self._late[1][place])))

    def kept_instead(self, number: int) -> int:
        """The document that was kept instead of one that was dropped; any other itself."""
        instead = int(self._instead[number])
        return number if instead == NO_NUMBER else instead

    def found(self) -> Duplicate:
        numbers = np.flatnonzero(self._instead != NO_NUMBER)
        instead = self._instead[numbers].astype(np.int64)
        return Duplicate(numbers, "near-duplicate", instead, self._similarity[numbers])

    def _add(self, number: int, places: list[int]) -> None:
        """Keep a document, or mark it as dropped."""
        assert self._groups is not None
        slots = self._groups.groups(places)
        if number >= self._num_new or not self._is_dropped(number, slots):
            keep_in(slots, number)

    def _is_dropped(self, number: int, slots: list[tuple[memoryview, int]]) -> bool:
        """Drop a document if a kept candidate is similar enough, in the order of shared bands."""
        shared = Counter[int]()
        for band, place in slots:
            shared.update(kept_in(band, place).tolist())
        for candidate in sorted(shared, key=lambda one: (-shared[one], one))[:_MOST_CANDIDATES]:
            if self._corpus.kind[candidate] != self._corpus.kind[number]:
                continue
            similarity = self._similarities.of(number, candidate)
            if similarity >= self._config.min_jaccard:
                self._instead[number], self._similarity[number] = candidate, similarity
                self._corpus.alive[number] = False
                return True
        return False


class Similarities:
    """Jaccard similarities of pairs of documents; the last ones asked for are remembered, because all may be decided
    again with other documents alive.
    """

    def __init__(self, corpus: Corpus, min_jaccard: float) -> None:
        self._store, self._min_jaccard = corpus.shingles, min_jaccard
        self._pairs = np.zeros(1 << _REMEMBERED_BITS, np.uint64).data
        self._values: Any = np.zeros(1 << _REMEMBERED_BITS, np.float64).data

    def of(self, number: int, candidate: int) -> float:
        """The similarity of two documents, 0 where their lengths alone make it smaller than needed."""
        pair = (number << 32 | candidate) + 1
        place = pair * _MULTIPLIER % 2**64 >> 64 - _REMEMBERED_BITS
        if self._pairs[place] != pair:
            own, other = self._store.unique(number), self._store.unique(candidate)
            is_possible = min(len(own), len(other)) >= self._min_jaccard * max(len(own), len(other))
            self._pairs[place], self._values[place] = pair, jaccard(own, other) if is_possible else 0.0
        return self._values[place]
