"""Deduplication of a whole corpus, from the fingerprints of its documents.

In this order: training documents whose text, answer or summary is that of a held-out document; exact duplicates, of
which the first stays; documents whose whole text is inside another one, found by the hashes of their word 5-grams;
near-duplicates, of which the best stays.
Only documents of one kind are duplicates of each other, but a training document must not reveal a held-out one of any
kind. A held-out document wins over its near-duplicates in training; one that is inside a training text is dropped
instead, because the longer text has more to teach. It then costs no other training document: if some were dropped for
it, everything is decided again without it.

For near-duplicates, documents are visited from the best to the worst, and one is dropped if its Jaccard similarity with
a kept one is at least the threshold. Candidates are kept documents that share a MinHash band. Documents with an equal
value of a band are a group; an engine makes the groups band by band. The candidates of a group are in *slots* that are
counted beforehand, one fewer than it has documents and at most a given number. So a document takes at most 4 bytes of
memory for each band that it shares with another one; its groups are read from files, in the order of the visits.

Memory: less than 100 bytes a document, most of them for near-duplicates; the 5-grams and the band hashes of all
documents stay on disk.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from modelwright.data.clean.fingerprints import (
    HELDOUT,
    NO_NUMBER,
    NUM_BANDS,
    SHINGLE_WORDS,
    TRAIN,
    BandFiles,
    Corpus,
    Duplicate,
    DuplicatesConfig,
    exact,
    jaccard,
    no_numbers,
)
from modelwright.data.clean.steps.step import DiskFile
from modelwright.data.document import KINDS
from modelwright.data.workers import InProcess, ShardEngine

_FILL_BITS = 16
# The first slot of a group counts its slots (upper bits) and how many of them hold a candidate.
_FILL = 2**_FILL_BITS - 1
_READ_AT_ONCE = 8192
# Fewer documents are grouped in this process, because starting others takes longer.
_FEWEST_IN_WORKERS = 250_000
# A document with more candidates is compared with those that have the most bands in common.
_MOST_CANDIDATES = 200
# Kept documents that are candidates through one band. Pages of one template share bands without being near-duplicates,
# and comparing each with all others would take quadratic time; two that are near-duplicates also share bands that come
# from their own text.
_MOST_PER_BAND = 200
# Logarithm of the number of pairs whose similarity is remembered.
_REMEMBERED_BITS = 18
_MULTIPLIER = 0x9E3779B97F4A7C15
_ORDER_FILE = "order.bin"
# Bits of the filter for very many needles; for fewer it has 64 places for each.
_FILTER_BITS = 26
# Different questions may share a part of their answers.
_PAIRS = KINDS.index("qa")


def find_duplicates(
    corpus: Corpus, config: DuplicatesConfig, engine: ShardEngine, *, num_indexed: int = 0
) -> list[Duplicate]:
    """Finds all duplicates and marks them in `corpus.alive`.

    engine: where the documents of each MinHash band are grouped.
    num_indexed: this many documents at the end come from the index of earlier runs; they are never dropped, and only
    compared as exact and near-duplicates.
    """
    num_new = len(corpus) - num_indexed
    before = corpus.alive.copy()
    gives_away = corpus.alive & (corpus.split == HELDOUT)
    containments, similarities = Containments(corpus, config, num_new), Similarities(corpus, config.min_jaccard)
    while True:
        given_away = _given_away(corpus, gives_away)
        near = NearDuplicates(corpus, config, num_new, similarities, engine)
        corpus.alive[given_away.numbers] = False
        equal = exact(corpus, num_new)
        corpus.alive[equal.numbers] = False
        # Documents inside others may come back (`_still_inside`), so they are grouped with the others.
        before_inside = corpus.alive.copy()
        inside = containments.found() if config.contained != "off" else []
        for found in inside:
            corpus.alive[found.numbers] = False
        if config.near:
            near.add_all(before_inside)
            inside = [*_still_inside(inside, corpus, near), near.found()]
        for found in inside:
            corpus.alive[found.numbers] = False
        del near
        lost = given_away.instead[~corpus.alive[given_away.instead]]
        if not len(lost):
            break
        gives_away[lost] = False  # a held-out document that is dropped itself costs no training document
        corpus.alive[:] = before
    # Documents that came back may have changed which held-out documents stay.
    leaks = _given_away(corpus, corpus.alive & (corpus.split == HELDOUT))
    corpus.alive[leaks.numbers] = False
    result = [found for found in (given_away, equal, *inside, leaks) if len(found.numbers)]
    # A document that was kept instead of another one, and dropped later, is replaced by the one kept instead of it.
    instead_of = no_numbers(len(corpus))
    for found in result:
        instead_of[found.numbers] = found.instead
    for place, found in enumerate(result):
        instead = found.instead.copy()
        while (is_dropped := instead_of[instead] != NO_NUMBER).any():
            instead[is_dropped] = instead_of[instead[is_dropped]]
        result[place] = replace(found, instead=instead)
    return result


def _given_away(corpus: Corpus, by: NDArray[np.bool_]) -> Duplicate:
    """Finds training documents with a text, answer or summary of a held-out one; by [N]: held-out ones that count."""
    members, keys = corpus.shared.numbers, corpus.shared.values
    is_heldout = corpus.alive[members] & by[members]
    known, owners = keys[is_heldout].ravel(), np.repeat(members[is_heldout], keys.shape[1])
    known, owners = known[known != 0], owners[known != 0]
    is_training = corpus.alive[members] & (corpus.split[members] == TRAIN)
    hits = np.isin(keys[is_training], known)
    has_hit = hits.any(axis=1)
    numbers, values = members[is_training][has_hit], keys[is_training][has_hit]
    values = values[np.arange(len(numbers)), np.argmax(hits[has_hit], axis=1)]
    order = np.argsort(known, kind="stable")
    instead = owners[order[np.searchsorted(known[order], values)]] if len(numbers) else np.empty(0, np.int64)
    return Duplicate(numbers, "in the held-out set", instead, np.ones(len(numbers), np.float32))


@dataclass(frozen=True)
class _Needles:
    """Documents to look for inside others, by their first hash: numbers sorted by (first hash, length)."""

    firsts: NDArray[np.uint32]
    lasts: NDArray[np.uint32]
    numbers: NDArray[np.uint32]
    lengths: NDArray[np.uint32]
    filter: NDArray[np.bool_]
    """True at the upper bits of a hash that a needle begins with."""
    shift: np.uint32
    """Right shift that leaves the upper bits of a hash."""


class Containments:
    """Finds documents inside longer ones. Everything is decided repeatedly (`find_duplicates`), with other documents
    alive; the texts are searched once, for those that may be alive, which takes most of the time.
    """

    def __init__(self, corpus: Corpus, config: DuplicatesConfig, num_new: int) -> None:
        self._corpus, self._config, self._num_new = corpus, config, num_new
        self._searched = corpus.alive.copy()
        self._searched[exact(corpus, num_new).numbers] = False
        self._pairs: NDArray[np.uint32] | None = None

    def found(self) -> list[Duplicate]:
        """Returns documents inside others that are alive; one held out in a training document is dropped itself."""
        alive = self._corpus.alive
        is_new = alive & ~self._searched
        if self._pairs is None or is_new.any():
            self._searched |= is_new
            needles, pairs = self._needles(), [np.empty((0, 2), np.uint32)]
            for start, _, flat in self._corpus.shingles.chunks(self._num_new if needles is not None else 0):
                assert needles is not None
                contained = list(_search(start, flat, needles, self._corpus, self._searched))
                pairs.append(np.array(contained, np.uint32).reshape(-1, 2))
            # The numbers of documents and of those that contain them [2, P].
            self._pairs = np.concatenate(pairs).T
            del needles, pairs  # as large as the corpus
        needles, outers = self._pairs[:, alive[self._pairs].all(axis=0)]
        order = np.lexsort((outers, needles))
        needles, first = np.unique(needles[order], return_index=True)  # with the outer document of the lowest number
        numbers, instead = needles.astype(np.int64), outers[order][first].astype(np.int64)
        result: list[Duplicate] = []
        for reason, split in (("inside a training text", HELDOUT), ("inside another text", TRAIN)):
            own = self._corpus.split[numbers] == split
            result.append(Duplicate(numbers[own], reason, instead[own], np.ones(int(own.sum()), np.float32)))
        return result

    def _needles(self) -> _Needles | None:
        # A function of its own, so that its arrays of the whole corpus are freed before the search.
        corpus = self._corpus
        lengths = corpus.num_shingles.astype(np.uint32)
        has_text = self._searched & (lengths > 0)
        has_text[self._num_new :] = False
        wanted = has_text & (corpus.split == HELDOUT)
        if self._config.contained == "all":
            wanted |= has_text & (lengths > self._config.min_near_words - SHINGLE_WORDS) & (corpus.kind != _PAIRS)
        numbers = np.flatnonzero(wanted)
        if not len(numbers):
            return None
        firsts, lasts = corpus.shingles.ends(numbers)
        # Needles of equal first hashes follow one another, the shortest first, for the binary search of `_search`.
        order = np.lexsort((lengths[numbers], firsts))
        # At most one in 64 of the hashes that are in no needle passes the filter.
        shift = np.uint32(32 - min(_FILTER_BITS, len(numbers).bit_length() + 6))
        is_first = np.zeros(1 << (32 - int(shift)), np.bool_)
        is_first[firsts >> shift] = True
        numbers = numbers.astype(np.uint32)[order]
        return _Needles(firsts[order], lasts[order], numbers, lengths[numbers], is_first, shift)


def _search(
    first: int, flat: NDArray[np.uint32], needles: _Needles, corpus: Corpus, searched: NDArray[np.bool_]
) -> Iterator[tuple[int, int]]:
    """Yields `(needle, document that contains it)` among the `searched`. flat: hashes of documents from `first` on."""
    store = corpus.shingles
    start = int(store.offsets[first])
    places = np.flatnonzero(needles.filter[flat >> needles.shift])
    lows = np.searchsorted(needles.firsts, flat[places], side="left")
    highs = np.searchsorted(needles.firsts, flat[places], side="right")
    hits = np.flatnonzero(highs > lows)
    owners = np.searchsorted(store.offsets, start + places[hits], side="right") - 1
    for place, low, high, owner in zip(places[hits], lows[hits], highs[hits], owners, strict=True):
        outer = int(owner)
        if not searched[outer]:
            continue
        end = int(store.offsets[outer + 1])
        # One less than the length: an equal text is a duplicate and not inside.
        room = min(end - start - int(place), end - int(store.offsets[outer]) - 1)
        fits = np.searchsorted(needles.lengths[low:high], room, side="right")
        lengths = needles.lengths[low : low + int(fits)].astype(np.int64)
        # Thousands of documents may begin with one license: compare their ends before whole texts.
        ends = np.flatnonzero(flat[place + lengths - 1] == needles.lasts[low : low + int(fits)])
        for needle, length in zip(needles.numbers[low + ends], lengths[ends], strict=True):
            # Nothing is dropped for being inside a held-out document; a held-out one may be of another kind.
            of_kind = corpus.split[needle] == HELDOUT or corpus.kind[outer] == corpus.kind[needle]
            may_contain = of_kind and corpus.split[outer] == TRAIN
            if may_contain and np.array_equal(store.row(int(needle)), flat[place : place + length]):
                yield int(needle), outer


@dataclass(frozen=True)
class GroupJob:
    """A band whose documents are to be grouped. The file `order.bin` in the folder of the bands holds the numbers of
    the documents, uint32, in the order in which they are visited. most: slots of a group.
    """

    bands: BandFiles
    band: int
    most: int


def group_band(job: GroupJob) -> int:
    """Writes the index of each document's group in the slots of a band, by its position in the order, and the empty
    slots; returns the number of the band. Runs in worker processes, and takes less than 50 bytes a document.
    """
    folder = job.bands.folder
    hashes = job.bands.column(job.band)[np.fromfile(folder / _ORDER_FILE, np.uint32)]
    places, ranked = no_numbers(len(hashes)), np.argsort(hashes, kind="stable")
    hashes = hashes[ranked]
    is_shared = np.zeros(len(hashes), np.bool_)
    is_shared[1:] = hashes[1:] == hashes[:-1]
    del hashes
    is_first = ~is_shared
    is_shared[:-1] |= is_shared[1:]
    starts = np.flatnonzero(is_first[is_shared])
    sizes = np.diff(starts, append=int(is_shared.sum()))
    # The last document of a group is not a candidate for another one.
    capacities = np.minimum(sizes - 1, min(job.most, _FILL))
    # One slot more for the head: capacity in the high bits, fill in the low ones.
    firsts = np.cumsum(capacities + 1) - capacities - 1
    places[ranked[is_shared]] = np.repeat(firsts.astype(np.uint32), sizes)
    slots = np.zeros(int((capacities + 1).sum()), np.uint32)
    slots[firsts] = capacities << _FILL_BITS
    _write(places, folder / f"places{job.band:02d}.bin")
    _write(slots, folder / f"slots{job.band:02d}.bin")
    return job.band


class BandGroups:
    """The groups of each band, and the documents that are in any, from the best to the worst.

    order: the documents, in the order in which they are visited; most: candidates of a group, below 65,536.
    """

    def __init__(
        self, order: NDArray[np.uint32], bands: BandFiles, engine: ShardEngine, *, num_bands: int, most: int
    ) -> None:
        self.order, folder = order, bands.folder
        _write(order, folder / _ORDER_FILE)
        jobs = [GroupJob(bands, band, most) for band in range(num_bands)]
        for _ in (engine if len(order) >= _FEWEST_IN_WORKERS else InProcess()).map(group_band, jobs):
            pass  # the results are files
        slots = [np.fromfile(folder / f"slots{band:02d}.bin", np.uint32) for band in range(num_bands)]
        self.slots = [one.data for one in slots]  # single values are read much faster than from an array
        self.places = [DiskFile(folder / f"places{band:02d}.bin") for band in range(num_bands)]

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Yields each document with the places of its groups, in order."""
        for start in range(0, len(self.order), _READ_AT_ONCE):
            stop = min(len(self.order), start + _READ_AT_ONCE)
            rows = np.stack([places.read(np.uint32, start, stop) for places in self.places], axis=1)
            in_group = np.flatnonzero((rows != NO_NUMBER).any(axis=1))
            yield from zip(self.order[start + in_group].tolist(), rows[in_group].tolist(), strict=True)

    def groups(self, places: Sequence[int]) -> list[tuple[memoryview, int]]:
        """The slots of each band in which a document shares a group, with the place of the group."""
        return [(self.slots[band], place) for band, place in enumerate(places) if place != NO_NUMBER]


def kept_in(band: memoryview, place: int) -> memoryview:
    """The documents of a group that are kept, up to the number of its slots."""
    return band[place + 1 : place + 1 + (band[place] & _FILL)]


def keep_in(groups: Sequence[tuple[memoryview, int]], number: int) -> None:
    """Puts a kept document into its groups, if they have a free slot."""
    for band, place in groups:
        head = band[place]
        if head & _FILL < head >> _FILL_BITS:
            band[place + 1 + (head & _FILL)] = number
            band[place] = head + 1


def _write(values: NDArray[Any], path: Path) -> None:
    # A worker that was given up may still be at work on the same band, so a file is replaced as a whole.
    partial = path.with_suffix(f".{uuid4().hex}")
    values.tofile(partial)
    partial.replace(path)


class NearDuplicates:
    """Adds documents from the best to the worst; near-duplicates of kept ones are marked as dropped in the corpus.

    similarities: of pairs that were compared before; engine: where documents are grouped by band.
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
        """Adds all documents that are alive. members [N]: True for those that may be added, late ones included."""
        order, bands = self._best_first(members), self._corpus.bands
        self._groups = BandGroups(order, bands, self._engine, num_bands=NUM_BANDS, most=_MOST_PER_BAND)
        for number, places in self._groups:
            if self._corpus.alive[number]:
                self._add(number, places)

    def _best_first(self, members: NDArray[np.bool_]) -> NDArray[np.uint32]:
        # A function of its own, so that the keys of a large corpus are freed before its groups are made.
        corpus, length = self._corpus, self._corpus.num_shingles
        eligible = members & (length > self._config.min_near_words - SHINGLE_WORDS)
        numbers = np.flatnonzero(eligible).astype(np.uint32)
        is_new, is_trained_on = numbers < self._num_new, corpus.split[numbers] != HELDOUT
        # `lexsort` sorts by the last key first: earlier runs' documents, held-out ones, the better, the longer.
        keys = (numbers, -length[numbers], -corpus.quality[numbers], is_trained_on, is_new)
        return numbers[np.lexsort(keys)]

    def expect(self, numbers: NDArray[np.int64]) -> None:
        """Prepares for documents that are not alive now and may be added late."""
        if self._groups is not None:
            positions = np.flatnonzero(np.isin(self._groups.order, numbers))
            positions = positions[np.argsort(self._groups.order[positions])]
            self._late = self._groups.order[positions], positions

    def add_late(self, number: int) -> None:
        """Adds an expected document, after all others."""
        place = int(np.searchsorted(self._late[0], number))
        if self._groups is not None and place < len(self._late[0]) and self._late[0][place] == number:
            position = int(self._late[1][place])
            self._add(number, [int(one.read(np.uint32, position, position + 1)[0]) for one in self._groups.places])

    def kept_instead(self, number: int) -> int:
        """The document that was kept instead of a dropped one; any other document itself."""
        instead = int(self._instead[number])
        return number if instead == NO_NUMBER else instead

    def found(self) -> Duplicate:
        numbers = np.flatnonzero(self._instead != NO_NUMBER)
        instead = self._instead[numbers].astype(np.int64)
        return Duplicate(numbers, "near-duplicate", instead, self._similarity[numbers])

    def _add(self, number: int, places: list[int]) -> None:
        """Keeps a document, or marks it as dropped if a kept candidate is similar enough."""
        assert self._groups is not None
        slots = self._groups.groups(places)
        shared = Counter[int]()
        for band, place in slots if number < self._num_new else ():  # documents of earlier runs are never dropped
            shared.update(kept_in(band, place).tolist())
        # In the order of shared bands: the most similar ones first.
        for candidate in sorted(shared, key=lambda one: (-shared[one], one))[:_MOST_CANDIDATES]:
            if self._corpus.kind[candidate] != self._corpus.kind[number]:
                continue
            similarity = self._similarities.of(number, candidate)
            if similarity >= self._config.min_jaccard:
                self._instead[number], self._similarity[number] = candidate, similarity
                self._corpus.alive[number] = False
                return
        keep_in(slots, number)


def _still_inside(inside: list[Duplicate], corpus: Corpus, near: NearDuplicates) -> list[Duplicate]:
    """Selects the documents that are inside one that was kept after all. If the longer document was dropped as a
    near-duplicate, the one kept instead may lack the part; then the shorter document is itself compared with the kept
    ones.
    """
    numbers = np.concatenate([np.empty(0, np.int64), *(found.numbers for found in inside)])
    if not len(numbers):
        return inside
    near.expect(numbers)
    store, outer_of, kept = corpus.shingles, no_numbers(len(corpus)), no_numbers(len(corpus))
    for found in inside:
        outer_of[found.numbers] = found.instead
    lengths = store.offsets[numbers + 1] - store.offsets[numbers]
    # Longest first: an outer text is settled before the texts inside it.
    for number in map(int, numbers[np.lexsort((numbers, -lengths))]):
        outer = int(outer_of[number])
        outer = near.kept_instead(int(kept[outer]) if kept[outer] != NO_NUMBER else outer)
        is_inside = False
        if corpus.alive[outer]:
            whole, part = store.row(outer), store.row(number)
            starts = np.flatnonzero(whole[: max(0, len(whole) - len(part) + 1)] == part[0])
            is_inside = any(np.array_equal(whole[start : start + len(part)], part) for start in starts)
        if is_inside:
            kept[number] = outer
        else:
            corpus.alive[number] = True
            near.add_late(number)
    result: list[Duplicate] = []
    for found in inside:
        numbers = found.numbers[kept[found.numbers] != NO_NUMBER]
        instead = kept[numbers].astype(np.int64)
        result.append(Duplicate(numbers, found.reason, instead, np.ones(len(numbers), np.float32)))
    return result


class Similarities:
    """Jaccard similarities of pairs. Recent ones are remembered: everything may be decided again (`deduplicate.py`)."""

    def __init__(self, corpus: Corpus, min_jaccard: float) -> None:
        self._store, self._min_jaccard = corpus.shingles, min_jaccard
        self._pairs = np.zeros(1 << _REMEMBERED_BITS, np.uint64).data
        self._values: Any = np.zeros(1 << _REMEMBERED_BITS, np.float64).data

    def of(self, number: int, candidate: int) -> float:
        """The similarity of two documents, 0 if their lengths alone make it smaller than needed."""
        # Plus 1, because 0 marks an empty place.
        pair = (number << 32 | candidate) + 1
        # Fibonacci hashing (Knuth, vol. 3, 6.4): the high bits of the product.
        place = pair * _MULTIPLIER % 2**64 >> 64 - _REMEMBERED_BITS
        if self._pairs[place] != pair:
            own, other = self._store.unique(number), self._store.unique(candidate)
            is_possible = min(len(own), len(other)) >= self._min_jaccard * max(len(own), len(other))
            self._pairs[place], self._values[place] = pair, jaccard(own, other) if is_possible else 0.0
        return self._values[place]
