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

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from modelwright.data.containment import Containments
from modelwright.data.duplicate_corpus import (
    HELDOUT,
    NOTHING,
    TRAIN,
    Corpus,
    Duplicate,
    DuplicatesConfig,
    ShingleStore,
    exact,
)
from modelwright.data.steps.shingles import NUM_BANDS, SHINGLE_WORDS, jaccard
from modelwright.data.workers import ShardEngine

_MOST_CANDIDATES = 200
"""A document with more candidates is compared with those that have the most bands in common."""
_MOST_PER_BAND = 200
"""Kept documents that are candidates through one band. Pages of one template share bands without being near-duplicates,
and comparing each with all others would take quadratic time; two that are near-duplicates also share bands that come
from their own text."""
_MOST_REMEMBERED = 1_000_000


def find_duplicates(
    corpus: Corpus, store: ShingleStore, config: DuplicatesConfig, engine: ShardEngine, *, num_indexed: int = 0
) -> list[Duplicate]:
    """Find all duplicates and mark them in `corpus.alive`.

    num_indexed: the last so many documents come from the index of earlier runs; they are never dropped, and only
    compared as exact and near-duplicates.
    """
    num_new = len(corpus.own) - num_indexed
    before = corpus.alive.copy()
    gives_away = corpus.alive & (corpus.split == HELDOUT)
    containments, similarities = Containments(corpus, store, config, num_new), dict[tuple[int, int], float]()
    while True:
        given_away = _given_away(corpus, num_new, gives_away)
        near = _Near(corpus, store, config, num_new, similarities)
        result = [given_away, *_find(given_away, corpus, config, engine, containments, near)]
        lost = given_away.instead[~corpus.alive[given_away.instead]]
        if not len(lost):
            break
        gives_away[lost] = False  # a held-out document that is dropped itself costs no training document
        corpus.alive[:] = before
    # what comes back with them may have changed which held-out documents stay
    leaks = _given_away(corpus, num_new, corpus.alive & (corpus.split == HELDOUT))
    corpus.alive[leaks.numbers] = False
    return _with_survivors([found for found in (*result, leaks) if len(found.numbers)])


def _find(
    given_away: Duplicate, corpus: Corpus, config: DuplicatesConfig, engine: ShardEngine,
    containments: Containments, near: "_Near",
) -> list[Duplicate]:  # fmt: skip
    """All duplicates but those that give away a held-out document, marked in `corpus.alive` as these are."""
    corpus.alive[given_away.numbers] = False
    equal = exact(corpus, near.num_new)
    corpus.alive[equal.numbers] = False
    groups = _shared_bands(corpus, config, engine) if config.near else None
    inside: list[Duplicate] = []
    if config.contained != "off":
        inside = containments.found()
        for found in inside:
            corpus.alive[found.numbers] = False
    if groups is not None:
        near.add_all(groups)
        inside = [*_still_inside(inside, corpus, near.store, near), near.found()]
    for found in inside:
        corpus.alive[found.numbers] = False
    return [equal, *inside]


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
    training = np.flatnonzero(alive & (split == TRAIN))
    hits = np.isin(keys[training], known)
    numbers = training[hits.any(axis=1)]
    first = np.argmax(hits[hits.any(axis=1)], axis=1)
    order = np.argsort(known, kind="stable")
    values = keys[numbers, first] if len(numbers) else np.empty(0, np.uint64)
    instead = owners[order[np.searchsorted(known[order], values)]] if len(numbers) else np.empty(0, np.int64)
    return Duplicate(numbers, "in the held-out set", instead, np.ones(len(numbers), np.float32))


class _Near:
    """Near-duplicates: documents are added from the best to the worst, and dropped if they are similar to one that was
    kept before. similarities: of pairs that were compared before, kept up to date.
    """

    def __init__(
        self, corpus: Corpus, store: ShingleStore, config: DuplicatesConfig, num_new: int,
        similarities: dict[tuple[int, int], float],
    ) -> None:  # fmt: skip
        self.store, self.num_new = store, num_new
        self._corpus, self._similarities, self._min_jaccard = corpus, similarities, config.min_jaccard
        self._groups = np.empty((0, NUM_BANDS), np.int32)
        self._kept_in: dict[int, list[int]] = {}
        self._dropped: dict[int, tuple[int, float]] = {}

    def add_all(self, groups: NDArray[np.int32]) -> None:
        """Add all documents that are alive. groups: see `_shared_bands`."""
        corpus, self._groups = self._corpus, groups
        members = np.flatnonzero(corpus.alive & (self._groups != NOTHING).any(axis=1))
        indexed = members >= self.num_new
        heldout = corpus.split[members] == HELDOUT
        length = corpus.num_shingles[members]
        for number in members[np.lexsort((members, -length, -corpus.quality[members], ~heldout, ~indexed))]:
            self.add(int(number))

    def add(self, number: int) -> None:
        """Keep a document, or mark it as dropped in the corpus."""
        bands = [int(group) for group in self._groups[number] if group != NOTHING]
        match = self._most_similar(number, bands) if number < self.num_new else None
        if match is not None:
            self._dropped[number] = match
            self._corpus.alive[number] = False
            return
        for band in bands:
            kept = self._kept_in.setdefault(band, [])
            if len(kept) < _MOST_PER_BAND:
                kept.append(number)

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
            similarity = self._similarity(number, candidate)
            if similarity >= self._min_jaccard:
                return candidate, similarity
        return None

    def _similarity(self, number: int, candidate: int) -> float:
        """The Jaccard similarity of two documents, 0 where their lengths alone make it smaller than needed."""
        if (number, candidate) in self._similarities:
            return self._similarities[number, candidate]
        own, other = self.store.unique(number), self.store.unique(candidate)
        is_possible = min(len(own), len(other)) >= self._min_jaccard * max(len(own), len(other))
        similarity = jaccard(own, other) if is_possible else 0.0
        if len(self._similarities) < _MOST_REMEMBERED:
            self._similarities[number, candidate] = similarity
        return similarity


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
