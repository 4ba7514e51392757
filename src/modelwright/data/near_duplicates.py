"""Near-duplicates: documents are taken from the best to the worst, and one is dropped if its Jaccard similarity with
one that was kept is at least the threshold. Candidates are kept documents that share a MinHash band
(`steps/shingles.py`).

The documents of one value of a band are a *group*. Its candidates stand in slots that are counted beforehand, one fewer
than it has documents and at most 200. So a document takes at most 4 bytes for each band that it shares with another
one; which groups it is in is read from files, in the order in which documents are taken.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.data.disk_file import DiskFile
from modelwright.data.duplicate_corpus import HELDOUT, NO_NUMBER, Corpus, Duplicate, DuplicatesConfig, no_numbers
from modelwright.data.steps.shingles import NUM_BANDS, SHINGLE_WORDS, jaccard

_MOST_CANDIDATES = 200
"""A document with more candidates is compared with those that have the most bands in common."""
_MOST_PER_BAND = 200
"""Kept documents that are candidates through one band. Pages of one template share bands without being near-duplicates,
and comparing each with all others would take quadratic time; two that are near-duplicates also share bands that come
from their own text."""
_NO_GROUP = NO_NUMBER
_FILL_BITS = 16
_FILL = 2**_FILL_BITS - 1
"""The first slot of a group counts its slots (upper bits) and how many of them hold a candidate."""
_READ_AT_ONCE = 8192
_REMEMBERED_BITS = 18
"""Bits of the number of pairs whose similarity is remembered."""
_MULTIPLIER = 0x9E3779B97F4A7C15


class BandGroups:
    """The groups of each band, and the documents that are in any, from the best to the worst."""

    def __init__(self, order: NDArray[np.uint32], folder: Path, slots: list[NDArray[np.uint32]]) -> None:
        """order: the documents; folder: with the places of each one's groups in the slots of a band; slots: of the
        groups of each band, one group after another.
        """
        self.order = order
        self.slots = [one.data for one in slots]  # single values are read much faster than from an array
        self._places = [DiskFile(_places_file(folder, band)) for band in range(len(slots))]

    @classmethod
    def of(
        cls, corpus: Corpus, config: DuplicatesConfig, num_new: int, *, members: NDArray[np.bool_]
    ) -> "BandGroups":  # fmt: skip
        """The groups of those `members` that have enough words, band by band."""
        order = _best_first(corpus, config, num_new, members)
        columns = (corpus.bands.column(band)[order] for band in range(NUM_BANDS))
        return cls.of_columns(order, columns, corpus.bands.folder, most=_MOST_PER_BAND)

    @classmethod
    def of_columns(
        cls, order: NDArray[np.uint32], columns: Iterable[NDArray[Any]], folder: Path, *, most: int
    ) -> "BandGroups":
        """The groups of some documents, in the order in which they are taken. columns: one band of all of them at a
        time; folder: for files; most: candidates of a group, at most 65,535.
        """
        slots = [_group_band(hashes, folder, band, min(most, _FILL)) for band, hashes in enumerate(columns)]
        return cls(order, folder, slots)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Each document with the places of its groups, in order."""
        for start in range(0, len(self.order), _READ_AT_ONCE):
            stop = min(len(self.order), start + _READ_AT_ONCE)
            rows = np.stack([places.read(np.uint32, start, stop) for places in self._places], axis=1)
            in_group = np.flatnonzero((rows != NO_NUMBER).any(axis=1))
            yield from zip(self.order[start + in_group].tolist(), rows[in_group].tolist(), strict=True)

    def at(self, position: int) -> list[int]:
        """The places of the groups of one document, by its position in the order."""
        return [int(places.read(np.uint32, position, position + 1)[0]) for places in self._places]

    def groups(self, places: Sequence[int]) -> list[tuple[memoryview, int]]:
        """The slots of each band in which a document shares a group, with the place of the group."""
        return [(self.slots[band], place) for band, place in enumerate(places) if place != _NO_GROUP]


def _best_first(
    corpus: Corpus, config: DuplicatesConfig, num_new: int, is_member: NDArray[np.bool_]
) -> NDArray[np.uint32]:
    """The numbers of the documents in the order in which they are taken."""
    length = corpus.num_shingles
    members = np.flatnonzero(is_member & (length > config.min_near_words - SHINGLE_WORDS)).astype(np.uint32)
    is_new, is_trained_on = members < num_new, corpus.split[members] != HELDOUT
    keys = (members, -length[members], -corpus.quality[members], is_trained_on, is_new)
    return members[np.lexsort(keys)]


def _places_file(folder: Path, band: int) -> Path:
    return folder / f"places{band:02d}.bin"


def _group_band(hashes: NDArray[Any], folder: Path, band: int, most: int) -> NDArray[np.uint32]:
    """The empty slots of the groups of a band, at most so many of each. The place of each document's group, by its
    position, goes into a file.
    """
    places, ranked = no_numbers(len(hashes)), np.argsort(hashes, kind="stable")
    hashes = hashes[ranked]
    is_shared = np.zeros(len(hashes), np.bool_)
    is_shared[1:] = hashes[1:] == hashes[:-1]
    is_first = ~is_shared
    is_shared[:-1] |= is_shared[1:]
    starts = np.flatnonzero(is_first[is_shared])
    sizes = np.diff(starts, append=int(is_shared.sum()))
    capacities = np.minimum(sizes - 1, most)
    firsts = np.cumsum(capacities + 1) - capacities - 1
    slots = np.zeros(int((capacities + 1).sum()), np.uint32)
    slots[firsts] = capacities << _FILL_BITS
    places[ranked[is_shared]] = np.repeat(firsts.astype(np.uint32), sizes)
    places.tofile(_places_file(folder, band))
    return slots


def kept_in(band: memoryview, place: int) -> memoryview:
    """The documents of a group that are kept, as far as there was room for them."""
    return band[place + 1 : place + 1 + (band[place] & _FILL)]


def keep_in(groups: Sequence[tuple[memoryview, int]], number: int) -> None:
    """Put a document that is kept into its groups, where there is room."""
    for band, place in groups:
        head = band[place]
        if head & _FILL < head >> _FILL_BITS:
            band[place + 1 + (head & _FILL)] = number
            band[place] = head + 1


class NearDuplicates:
    """Adds documents from the best to the worst, and marks near-duplicates of those that were kept before as dropped
    in the corpus. similarities: of pairs that were compared before.
    """

    def __init__(self, corpus: Corpus, config: DuplicatesConfig, num_new: int, similarities: "Similarities") -> None:
        self._corpus, self._similarities, self._min_jaccard = corpus, similarities, config.min_jaccard
        self._num_new = num_new
        self._groups: BandGroups | None = None
        self._instead = no_numbers(len(corpus))
        self._similarity = np.zeros(len(corpus), np.float32)
        self._late = np.empty(0, np.uint32), np.empty(0, np.int64)

    def add_all(self, groups: BandGroups) -> None:
        """Add all documents that are alive."""
        self._groups = groups
        for number, places in groups:
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
        return number if instead == _NO_GROUP else instead

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
            if similarity >= self._min_jaccard:
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
