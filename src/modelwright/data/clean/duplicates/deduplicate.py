"""Deduplication of a whole corpus, from the fingerprints of its documents.

In this order: training documents whose text, answer or summary is that of a held-out document; exact duplicates, of
which the first stays; documents whose whole text is inside another one, found by the hashes of their word 5-grams;
near-duplicates, of which the best stays.
Only documents of one kind are duplicates of each other, but a training document must not reveal a held-out one of any
kind. A held-out document wins over its near-duplicates in training; one that is inside a training text is dropped
instead, because the longer text has more to teach. It then costs no other training document: if some were dropped for
it, everything is decided again without it.

Memory: less than 100 bytes a document, most of them for near-duplicates (`near_duplicates.py`); the 5-grams and the
band hashes of all documents stay on disk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from modelwright.data.clean.duplicates.corpus import (
    HELDOUT,
    NO_NUMBER,
    TRAIN,
    Corpus,
    Duplicate,
    DuplicatesConfig,
    exact,
    no_numbers,
)
from modelwright.data.clean.duplicates.near_duplicates import NearDuplicates, Similarities
from modelwright.data.clean.duplicates.shingles import SHINGLE_WORDS
from modelwright.data.document import KINDS
from modelwright.data.workers import ShardEngine

# Bits of the filter for very many needles; for fewer it has 64 places for each.
_FILTER_BITS = 26
# Different questions may share a part of their answers.
_PAIRS = KINDS.index("qa")


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
            self._pairs = self._search()
        needles, outers = self._pairs[:, alive[self._pairs].all(axis=0)]
        order = np.lexsort((outers, needles))
        needles, first = np.unique(needles[order], return_index=True)  # with the outer document of the lowest number
        numbers, instead = needles.astype(np.int64), outers[order][first].astype(np.int64)
        result: list[Duplicate] = []
        for reason, split in (("inside a training text", HELDOUT), ("inside another text", TRAIN)):
            own = self._corpus.split[numbers] == split
            result.append(Duplicate(numbers[own], reason, instead[own], np.ones(int(own.sum()), np.float32)))
        return result

    def _search(self) -> NDArray[np.uint32]:
        """The numbers of documents and of those that contain them [2, P]."""
        needles, pairs = self._needles(), [np.empty((0, 2), np.uint32)]
        for first, _, flat in self._corpus.shingles.chunks(self._num_new if needles is not None else 0):
            assert needles is not None
            found = list(_search(first, flat, needles, self._corpus, self._searched))
            pairs.append(np.array(found, np.uint32).reshape(-1, 2))
        return np.concatenate(pairs).T

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
