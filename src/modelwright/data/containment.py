"""Documents whose whole text is inside a longer one, found by the hashes of their word 5-grams."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelwright.data.document import KINDS
from modelwright.data.duplicate_corpus import HELDOUT, TRAIN, Corpus, Duplicate, DuplicatesConfig, ShingleStore, exact
from modelwright.data.steps.shingles import SHINGLE_WORDS

_FILTER_BITS = 26
_SEARCHED_AT_ONCE = 2**22
_PAIRS = KINDS.index("qa")
"""Different questions may share a part of their answers."""


@dataclass(frozen=True)
class _Needles:
    """Documents to look for inside others, by their first hash: numbers sorted by (first hash, length)."""

    firsts: NDArray[np.uint32]
    lasts: NDArray[np.uint32]
    numbers: NDArray[np.int64]
    lengths: NDArray[np.int64]
    filter: NDArray[np.bool_]


class Containments:
    """Which documents are inside longer ones. All is decided again and again (`find_duplicates`), with other documents
    alive; the texts are searched once, for those that may be alive, which takes most of the time.
    """

    def __init__(self, corpus: Corpus, store: ShingleStore, config: DuplicatesConfig, num_new: int) -> None:
        self._corpus, self._store, self._config, self._num_new = corpus, store, config, num_new
        self._searched = corpus.alive.copy()
        self._searched[exact(corpus, num_new).numbers] = False
        self._pairs: NDArray[np.int64] | None = None

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
        inside: dict[int, int] = {}
        for needle, outer in zip(needles.tolist(), outers.tolist(), strict=True):
            inside[needle] = min(outer, inside.get(needle, outer))
        kept = sorted(inside.items())
        result: list[Duplicate] = []
        for reason, split in (("inside a training text", HELDOUT), ("inside another text", TRAIN)):
            pairs = [(needle, outer) for needle, outer in kept if self._corpus.split[needle] == split]
            numbers = np.array([needle for needle, _ in pairs], np.int64)
            instead = np.array([outer for _, outer in pairs], np.int64)
            result.append(Duplicate(numbers, reason, instead, np.ones(len(pairs), np.float32)))
        return result

    def _search(self) -> NDArray[np.int64]:
        """The numbers of documents and of those that they are inside of [2, P]."""
        corpus, store, num_new = self._corpus, self._store, self._num_new
        needles = _needles(corpus, self._searched, store, self._config, num_new)
        pairs: list[tuple[int, int]] = []
        first = 0
        while needles is not None and first < num_new:
            last = int(np.searchsorted(store.offsets, store.offsets[first] + _SEARCHED_AT_ONCE, side="right")) - 1
            last = min(num_new, max(last, first + 1))
            pairs += _search(first, last, needles, corpus, self._searched, store)
            first = last
        return np.array(pairs, np.int64).reshape(-1, 2).T


def _needles(
    corpus: Corpus, searched: NDArray[np.bool_], store: ShingleStore, config: DuplicatesConfig, num_new: int
) -> _Needles | None:
    """The documents to look for among those that are `searched`; none if there are none."""
    has_text = searched & (corpus.num_shingles > 0)
    has_text[num_new:] = False
    is_long = has_text & (corpus.num_shingles > config.min_near_words - SHINGLE_WORDS) & (corpus.kind != _PAIRS)
    wanted = has_text & (corpus.split == HELDOUT)
    if config.contained == "all":
        wanted |= is_long
    numbers = np.flatnonzero(wanted)
    if not len(numbers):
        return None
    firsts = np.array([store.row(int(number))[0] for number in numbers], np.uint32)
    lasts = np.array([store.row(int(number))[-1] for number in numbers], np.uint32)
    order = np.lexsort((corpus.num_shingles[numbers], firsts))
    is_first = np.zeros(1 << _FILTER_BITS, np.bool_)
    is_first[firsts >> np.uint32(32 - _FILTER_BITS)] = True
    return _Needles(firsts[order], lasts[order], numbers[order], corpus.num_shingles[numbers[order]], is_first)


def _search(
    first: int, last: int, needles: _Needles, corpus: Corpus, searched: NDArray[np.bool_], store: ShingleStore
) -> list[tuple[int, int]]:
    """`(needle, document that contains it)` for those documents from `first` to below `last` that are `searched`."""
    offsets = store.offsets[first : last + 1] - store.offsets[first]
    flat = np.asarray(store.flat[store.offsets[first] : store.offsets[last]])
    places = np.flatnonzero(needles.filter[flat >> np.uint32(32 - _FILTER_BITS)])
    lows = np.searchsorted(needles.firsts, flat[places], side="left")
    highs = np.searchsorted(needles.firsts, flat[places], side="right")
    result: list[tuple[int, int]] = []
    hits = np.flatnonzero(highs > lows)
    owners = np.searchsorted(offsets, places[hits], side="right") - 1
    for place, low, high, owner in zip(places[hits], lows[hits], highs[hits], owners, strict=True):
        outer = first + int(owner)
        if not searched[outer]:
            continue
        room = int(offsets[owner + 1]) - int(place)
        own_length = int(corpus.num_shingles[outer])
        fits = int(np.searchsorted(needles.lengths[low:high], min(room, own_length - 1), side="right"))
        lengths = needles.lengths[low : low + fits]
        # Thousands of documents may begin with one license: compare their ends before whole texts.
        ends = np.flatnonzero(flat[place + lengths - 1] == needles.lasts[low : low + fits])
        for needle, length in zip(needles.numbers[low + ends], lengths[ends], strict=True):
            if _may_contain(corpus, outer, int(needle)) and np.array_equal(
                store.row(int(needle)), flat[place : place + length]
            ):
                result.append((int(needle), outer))
    return result


def _may_contain(corpus: Corpus, outer: int, needle: int) -> bool:
    if corpus.split[needle] == HELDOUT:
        return corpus.split[outer] == TRAIN
    return bool(corpus.split[outer] == TRAIN and corpus.kind[outer] == corpus.kind[needle])
