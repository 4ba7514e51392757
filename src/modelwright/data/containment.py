"""Documents whose whole text is inside a longer one, found by the hashes of their word 5-grams."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelwright.data.document import KINDS
from modelwright.data.duplicate_corpus import HELDOUT, TRAIN, Corpus, Duplicate, DuplicatesConfig, exact
from modelwright.data.steps.shingles import SHINGLE_WORDS

_FILTER_BITS = 26
"""Bits of the filter for very many needles; for fewer it has 64 places for each."""
_PAIRS = KINDS.index("qa")
"""Different questions may share a part of their answers."""


@dataclass(frozen=True)
class _Needles:
    """Documents to look for inside others, by their first hash: numbers sorted by (first hash, length)."""

    firsts: NDArray[np.uint32]
    lasts: NDArray[np.uint32]
    numbers: NDArray[np.uint32]
    lengths: NDArray[np.uint32]
    filter: NDArray[np.bool_]
    """Whether a needle begins with a hash of these upper bits."""
    shift: np.uint32
    """By how much a hash is shifted for that."""


class Containments:
    """Which documents are inside longer ones. All is decided again and again (`find_duplicates`), with other documents
    alive; the texts are searched once, for those that may be alive, which takes most of the time.
    """

    def __init__(self, corpus: Corpus, config: DuplicatesConfig, num_new: int) -> None:
        self._corpus, self._config, self._num_new = corpus, config, num_new
        self._searched = corpus.alive.copy()
        self._searched[exact(corpus, num_new).numbers] = False
        self._pairs: NDArray[np.uint32] | None = None

    def found(self) -> list[Duplicate]:
        """Documents inside others that are alive; a held-out document inside a training document is dropped itself,
        because the longer one has more to teach.
        """
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
        """The numbers of documents and of those that they are inside of [2, P]."""
        needles = _needles(self._corpus, self._searched, self._config, self._num_new)
        pairs: list[NDArray[np.uint32]] = []
        for first, _, flat in self._corpus.shingles.chunks(self._num_new if needles is not None else 0):
            assert needles is not None
            found = list(_search(first, flat, needles, self._corpus, self._searched))
            pairs.append(np.array(found, np.uint32).reshape(-1, 2))
        return np.concatenate([*pairs, np.empty((0, 2), np.uint32)]).T


def _needles(
    corpus: Corpus, searched: NDArray[np.bool_], config: DuplicatesConfig, num_new: int
) -> _Needles | None:  # fmt: skip
    """The documents to look for among those that are `searched`; none if there are none."""
    lengths = corpus.num_shingles.astype(np.uint32)
    has_text = searched & (lengths > 0)
    has_text[num_new:] = False
    wanted = has_text & (corpus.split == HELDOUT)
    if config.contained == "all":
        wanted |= has_text & (lengths > config.min_near_words - SHINGLE_WORDS) & (corpus.kind != _PAIRS)
    numbers = np.flatnonzero(wanted)
    if not len(numbers):
        return None
    firsts, lasts = corpus.shingles.ends(numbers)
    order = np.lexsort((lengths[numbers], firsts))
    shift = np.uint32(32 - min(_FILTER_BITS, len(numbers).bit_length() + 6))
    is_first = np.zeros(1 << (32 - int(shift)), np.bool_)
    is_first[firsts >> shift] = True
    numbers = numbers.astype(np.uint32)[order]
    return _Needles(firsts[order], lasts[order], numbers, lengths[numbers], is_first, shift)


def _search(
    first: int, flat: NDArray[np.uint32], needles: _Needles, corpus: Corpus, searched: NDArray[np.bool_]
) -> Iterator[tuple[int, int]]:
    """`(needle, document that contains it)` for those documents that are `searched`. flat: the hashes of some
    documents, of which `first` is the first.
    """
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
        room = int(store.offsets[outer + 1]) - start - int(place)
        fits = np.searchsorted(needles.lengths[low:high], min(room, store.length(outer) - 1), side="right")
        lengths = needles.lengths[low : low + int(fits)].astype(np.int64)
        # Thousands of documents may begin with one license: compare their ends before whole texts.
        ends = np.flatnonzero(flat[place + lengths - 1] == needles.lasts[low : low + int(fits)])
        for needle, length in zip(needles.numbers[low + ends], lengths[ends], strict=True):
            if _may_contain(corpus, outer, int(needle)) and np.array_equal(
                store.row(int(needle)), flat[place : place + length]
            ):
                yield int(needle), outer


def _may_contain(corpus: Corpus, outer: int, needle: int) -> bool:
    if corpus.split[needle] == HELDOUT:
        return corpus.split[outer] == TRAIN
    return bool(corpus.split[outer] == TRAIN and corpus.kind[outer] == corpus.kind[needle])
