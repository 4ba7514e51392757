"""Deduplication of a whole corpus, from the fingerprints of its documents.

In this order: training documents whose text, answer or summary is that of a held-out document; exact duplicates, of
which the first stays; documents whose whole text is inside another one; near-duplicates, of which the best stays.
Only documents of one kind are duplicates of each other, but a training document must not give away a held-out one of
any kind. A held-out document wins over its near-duplicates in training; one that is inside a training text is dropped
itself, because the longer text has more to teach. It then costs no other training document: if some were dropped for
it, all is decided again without it.

Near-duplicates: documents are taken from the best to the worst, and one is dropped if its Jaccard similarity with one
that was kept is at least the threshold. Candidates are documents that share a MinHash band (`steps/shingles.py`).

Memory: about 250 bytes a document; the 5-grams of all documents stay on disk.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError
from modelwright.data.document import KINDS
from modelwright.data.steps.shingles import NUM_BANDS, SHINGLE_WORDS, jaccard
from modelwright.data.workers import ShardEngine

NOTHING = -1
_MOST_CANDIDATES = 200
"""A document with more candidates is compared with those that have the most bands in common."""
_FILTER_BITS = 26
_MOST_CACHED = 20_000
_SEARCHED_AT_ONCE = 2**22
_TRAIN, _HELDOUT = 0, 1
_PAIRS = KINDS.index("qa")
"""Different questions may share a part of their answers."""


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


def find_duplicates(
    corpus: Corpus, store: ShingleStore, config: DuplicatesConfig, engine: ShardEngine, *, num_indexed: int = 0
) -> list[Duplicate]:
    """Find all duplicates and mark them in `corpus.alive`.

    num_indexed: the last so many documents come from the index of earlier runs; they are never dropped, and only
    compared as exact and near-duplicates.
    """
    num_new = len(corpus.own) - num_indexed
    before = corpus.alive.copy()
    gives_away = corpus.alive & (corpus.split == _HELDOUT)
    while True:
        given_away = _given_away(corpus, num_new, gives_away)
        result = [given_away, *_find(given_away, corpus, store, config, engine, num_new)]
        lost = given_away.instead[~corpus.alive[given_away.instead]]
        if not len(lost):
            break
        gives_away[lost] = False  # a held-out document that is dropped itself costs no training document
        corpus.alive[:] = before
    # what comes back with them may have changed which held-out documents stay
    leaks = _given_away(corpus, num_new, corpus.alive & (corpus.split == _HELDOUT))
    corpus.alive[leaks.numbers] = False
    return _with_survivors([found for found in (*result, leaks) if len(found.numbers)])


def _find(
    given_away: Duplicate, corpus: Corpus, store: ShingleStore, config: DuplicatesConfig, engine: ShardEngine,
    num_new: int,
) -> list[Duplicate]:  # fmt: skip
    """All duplicates but those that give away a held-out document, marked in `corpus.alive` as these are."""
    corpus.alive[given_away.numbers] = False
    exact = _exact(corpus, num_new)
    corpus.alive[exact.numbers] = False
    groups = _shared_bands(corpus, config, engine) if config.near else None
    inside: list[Duplicate] = []
    if config.contained != "off":
        inside = _contained(corpus, store, config, num_new)
        for found in inside:
            corpus.alive[found.numbers] = False
    if groups is not None:
        near = _Near(corpus, store, config, groups, num_new)
        near.add_all()
        inside = [*_still_inside(inside, corpus, store, near), near.found()]
    for found in inside:
        corpus.alive[found.numbers] = False
    return [exact, *inside]


def _still_inside(inside: list[Duplicate], corpus: Corpus, store: ShingleStore, near: "_Near") -> list[Duplicate]:
    """Those documents that are inside one that was kept after all. Where the longer document was dropped as a
    near-duplicate, the one kept instead may lack the part; then the shorter document is compared with the kept ones
    itself.
    """
    outer_of: dict[int, int] = {}
    for found in inside:
        outer_of |= zip(map(int, found.numbers), map(int, found.instead), strict=True)
    kept: dict[int, int] = {}
    for number in sorted(outer_of, key=lambda one: (-int(corpus.num_shingles[one]), one)):
        outer = outer_of[number]
        outer = near.kept_instead(kept.get(outer, outer))
        if corpus.alive[outer] and _contains(store.row(outer), store.row(number)):
            kept[number] = outer
        else:
            corpus.alive[number] = True
            near.add(number)
    result: list[Duplicate] = []
    for found in inside:
        numbers = np.array([number for number in found.numbers if int(number) in kept], np.int64)
        instead = np.array([kept[int(number)] for number in numbers], np.int64)
        result.append(Duplicate(numbers, found.reason, instead, np.ones(len(numbers), np.float32)))
    return result


def _contains(outer: NDArray[np.uint32], inner: NDArray[np.uint32]) -> bool:
    starts = np.flatnonzero(outer[: max(0, len(outer) - len(inner) + 1)] == inner[0])
    return any(np.array_equal(outer[start : start + len(inner)], inner) for start in starts)


def _with_survivors(found: list[Duplicate]) -> list[Duplicate]:
    """The same, where a document that was kept instead of another one and dropped later is replaced by its own."""
    instead_of: dict[int, int] = {}
    for duplicate in found:
        instead_of |= zip(map(int, duplicate.numbers), map(int, duplicate.instead), strict=True)

    def survivor(number: int) -> int:
        while number in instead_of:
            number = instead_of[number]
        return number

    return [replace(one, instead=np.array([survivor(int(n)) for n in one.instead], np.int64)) for one in found]


def _given_away(corpus: Corpus, num_new: int, by: NDArray[np.bool_]) -> Duplicate:
    """Training documents with a text, answer or summary of a held-out one; by [N]: the held-out ones that count."""
    split, alive, keys = corpus.split[:num_new], corpus.alive[:num_new], corpus.keys[:num_new]
    heldout = np.flatnonzero(alive & by[:num_new])
    known, owners = keys[heldout].ravel(), np.repeat(heldout, keys.shape[1])
    known, owners = known[known != 0], owners[known != 0]
    training = np.flatnonzero(alive & (split == _TRAIN))
    hits = np.isin(keys[training], known)
    numbers = training[hits.any(axis=1)]
    first = np.argmax(hits[hits.any(axis=1)], axis=1)
    order = np.argsort(known, kind="stable")
    values = keys[numbers, first] if len(numbers) else np.empty(0, np.uint64)
    instead = owners[order[np.searchsorted(known[order], values)]] if len(numbers) else np.empty(0, np.int64)
    return Duplicate(numbers, "in the held-out set", instead, np.ones(len(numbers), np.float32))


def _exact(corpus: Corpus, num_new: int) -> Duplicate:
    """All but the first of equal texts; those of the index come before all others."""
    alive = np.flatnonzero(corpus.alive)
    alive = np.concatenate([alive[alive >= num_new], alive[alive < num_new]])
    _, first, inverse = np.unique(corpus.own[alive], return_index=True, return_inverse=True)
    kept = alive[first][inverse]
    repeated = (kept != alive) & (alive < num_new)
    return Duplicate(alive[repeated], "duplicate", kept[repeated], np.ones(int(repeated.sum()), np.float32))


@dataclass(frozen=True)
class _Needles:
    """Documents to look for inside others, by their first hash: numbers sorted by (first hash, length)."""

    firsts: NDArray[np.uint32]
    lasts: NDArray[np.uint32]
    numbers: NDArray[np.int64]
    lengths: NDArray[np.int64]
    filter: NDArray[np.bool_]


def _contained(corpus: Corpus, store: ShingleStore, config: DuplicatesConfig, num_new: int) -> list[Duplicate]:
    """Documents inside longer ones; a held-out document inside a training document is dropped itself, because the
    longer one has more to teach.
    """
    has_text = corpus.alive & (corpus.num_shingles > 0)
    has_text[num_new:] = False
    is_long = has_text & (corpus.num_shingles > config.min_near_words - SHINGLE_WORDS) & (corpus.kind != _PAIRS)
    wanted = has_text & (corpus.split == _HELDOUT)
    if config.contained == "all":
        wanted |= is_long
    numbers = np.flatnonzero(wanted)
    if not len(numbers):
        return []
    firsts = np.array([store.row(int(number))[0] for number in numbers], np.uint32)
    lasts = np.array([store.row(int(number))[-1] for number in numbers], np.uint32)
    order = np.lexsort((corpus.num_shingles[numbers], firsts))
    is_first = np.zeros(1 << _FILTER_BITS, np.bool_)
    is_first[firsts >> np.uint32(32 - _FILTER_BITS)] = True
    needles = _Needles(firsts[order], lasts[order], numbers[order], corpus.num_shingles[numbers[order]], is_first)
    inside: dict[int, int] = {}
    first = 0
    while first < num_new:
        last = int(np.searchsorted(store.offsets, store.offsets[first] + _SEARCHED_AT_ONCE, side="right")) - 1
        last = min(num_new, max(last, first + 1))
        for needle, outer in _search(first, last, needles, corpus, store):
            inside[needle] = min(outer, inside.get(needle, outer))
        first = last
    kept = [(needle, outer) for needle, outer in sorted(inside.items())]
    result: list[Duplicate] = []
    for reason, split in (("inside a training text", _HELDOUT), ("inside another text", _TRAIN)):
        pairs = [(needle, outer) for needle, outer in kept if corpus.split[needle] == split]
        numbers = np.array([needle for needle, _ in pairs], np.int64)
        instead = np.array([outer for _, outer in pairs], np.int64)
        result.append(Duplicate(numbers, reason, instead, np.ones(len(pairs), np.float32)))
    return result


def _search(first: int, last: int, needles: _Needles, corpus: Corpus, store: ShingleStore) -> list[tuple[int, int]]:
    """`(needle, document that contains it)` for the documents from `first` to below `last`."""
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
        if not corpus.alive[outer]:
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
    if corpus.split[needle] == _HELDOUT:
        return corpus.split[outer] == _TRAIN
    return bool(corpus.split[outer] == _TRAIN and corpus.kind[outer] == corpus.kind[needle])


class _Near:
    """Near-duplicates: documents are added from the best to the worst, and dropped if they are similar to one that was
    kept before. groups: see `_shared_bands`.
    """

    def __init__(
        self, corpus: Corpus, store: ShingleStore, config: DuplicatesConfig, groups: NDArray[np.int32], num_new: int
    ) -> None:
        self._corpus, self._store, self._groups, self._num_new = corpus, store, groups, num_new
        self._min_jaccard = config.min_jaccard
        self._kept_in: dict[int, list[int]] = {}
        self._dropped: dict[int, tuple[int, float]] = {}

    def add_all(self) -> None:
        """Add all documents that are alive."""
        corpus = self._corpus
        members = np.flatnonzero(corpus.alive & (self._groups != NOTHING).any(axis=1))
        indexed = members >= self._num_new
        heldout = corpus.split[members] == _HELDOUT
        length = corpus.num_shingles[members]
        for number in members[np.lexsort((members, -length, -corpus.quality[members], ~heldout, ~indexed))]:
            self.add(int(number))

    def add(self, number: int) -> None:
        """Keep a document, or mark it as dropped in the corpus."""
        bands = [int(group) for group in self._groups[number] if group != NOTHING]
        match = self._most_similar(number, bands) if number < self._num_new else None
        if match is not None:
            self._dropped[number] = match
            self._corpus.alive[number] = False
            return
        for band in bands:
            self._kept_in.setdefault(band, []).append(number)

    def kept_instead(self, number: int) -> int:
        """The document that was kept instead of one that was dropped; any other itself."""
        return self._dropped[number][0] if number in self._dropped else number

    def found(self) -> Duplicate:
        numbers = sorted(self._dropped)
        instead = np.array([self._dropped[number][0] for number in numbers], np.int64)
        similarity = np.array([self._dropped[number][1] for number in numbers], np.float32)
        return Duplicate(np.array(numbers, np.int64), "near-duplicate", instead, similarity)

    def _most_similar(self, number: int, bands: list[int]) -> tuple[int, float] | None:
        """The first kept candidate that is similar enough, in the order of shared bands."""
        shared: dict[int, int] = {}
        for band in bands:
            for candidate in self._kept_in.get(band, ()):
                shared[candidate] = shared.get(candidate, 0) + 1
        for candidate in sorted(shared, key=lambda one: (-shared[one], one))[:_MOST_CANDIDATES]:
            if self._corpus.kind[candidate] != self._corpus.kind[number]:
                continue
            own, other = self._store.unique(number), self._store.unique(candidate)
            if min(len(own), len(other)) < self._min_jaccard * max(len(own), len(other)):
                continue
            similarity = jaccard(own, other)
            if similarity >= self._min_jaccard:
                return candidate, similarity
        return None


def _shared_bands(corpus: Corpus, config: DuplicatesConfig, engine: ShardEngine) -> NDArray[np.int32]:
    """For each document and band the number of the group of documents with that band hash [N, 16], `NOTHING` for a
    document that is alone in it. Numbers of different bands differ.
    """
    enough = corpus.alive & (corpus.num_shingles > config.min_near_words - SHINGLE_WORDS)
    groups = np.full(corpus.bands.shape, NOTHING, np.int32)
    members = np.flatnonzero(enough)
    num_groups = 0
    columns = [np.ascontiguousarray(corpus.bands[members, band]) for band in range(NUM_BANDS)]
    for band, (rows, numbers) in sorted(engine.map(_group_band, list(enumerate(columns))), key=lambda one: one[0]):
        groups[members[rows], band] = numbers + num_groups
        num_groups += int(numbers.max(initial=-1)) + 1
    return groups


def _group_band(item: tuple[int, NDArray[np.uint64]]) -> tuple[int, tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """Rows that share their hash with another row, and the number of each one's group."""
    band, column = item
    order = np.argsort(column, kind="stable")
    values = column[order]
    same = values[1:] == values[:-1]
    shared, starts = np.zeros(len(values), np.bool_), np.ones(len(values), np.bool_)
    shared[:-1] |= same
    shared[1:] |= same
    starts[1:] = ~same
    numbers = np.cumsum(starts & shared) - 1
    return band, (order[shared], numbers[shared].astype(np.int32))
