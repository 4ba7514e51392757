"""Deduplication of a whole corpus, from the fingerprints of its documents.

In this order: training documents whose text, answer or summary is that of a held-out document; exact duplicates, of
which the first stays; documents whose whole text is inside another one; near-duplicates, of which the best stays.
Only documents of one kind are duplicates of each other, but a training document must not give away a held-out one of
any kind. A held-out document wins over its near-duplicates in training; one that is inside a training text is dropped
itself, because the longer text has more to teach. It then costs no other training document: if some were dropped for
it, all is decided again without it.

Memory: less than 100 bytes a document, most of them for near-duplicates (`data/band_groups.py`); the 5-grams and
the band hashes of all documents stay on disk.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from modelwright.data.containment import Containments
from modelwright.data.duplicate_corpus import (
    HELDOUT,
    NO_NUMBER,
    TRAIN,
    Corpus,
    Duplicate,
    DuplicatesConfig,
    exact,
    no_numbers,
)
from modelwright.data.near_duplicates import NearDuplicates, Similarities
from modelwright.data.workers import ShardEngine


def find_duplicates(
    corpus: Corpus, config: DuplicatesConfig, engine: ShardEngine, *, num_indexed: int = 0
) -> list[Duplicate]:
    """Find all duplicates and mark them in `corpus.alive`.

    engine: where the documents of each MinHash band are grouped.
    num_indexed: the last so many documents come from the index of earlier runs; they are never dropped, and only
    compared as exact and near-duplicates.
    """
    num_new = len(corpus) - num_indexed
    before = corpus.alive.copy()
    gives_away = corpus.alive & (corpus.split == HELDOUT)
    containments, similarities = Containments(corpus, config, num_new), Similarities(corpus, config.min_jaccard)
    while True:
        given_away = _given_away(corpus, gives_away)
        near = NearDuplicates(corpus, config, num_new, similarities, engine)
        result = [given_away, *_find(given_away, corpus, config, num_new, containments, near)]
        del near
        lost = given_away.instead[~corpus.alive[given_away.instead]]
        if not len(lost):
            break
        gives_away[lost] = False  # a held-out document that is dropped itself costs no training document
        corpus.alive[:] = before
    # what comes back with them may have changed which held-out documents stay
    leaks = _given_away(corpus, corpus.alive & (corpus.split == HELDOUT))
    corpus.alive[leaks.numbers] = False
    return _with_survivors([found for found in (*result, leaks) if len(found.numbers)], len(corpus))


def _find(
    given_away: Duplicate, corpus: Corpus, config: DuplicatesConfig, num_new: int, containments: Containments,
    near: NearDuplicates,
) -> list[Duplicate]:  # fmt: skip
    """All duplicates but those that give away a held-out document, marked in `corpus.alive` as these are."""
    corpus.alive[given_away.numbers] = False
    equal = exact(corpus, num_new)
    corpus.alive[equal.numbers] = False
    before = corpus.alive.copy()
    inside: list[Duplicate] = []
    if config.contained != "off":
        inside = containments.found()
        for found in inside:
            corpus.alive[found.numbers] = False
    if config.near:
        near.add_all(before)
        inside = [*_still_inside(inside, corpus, near), near.found()]
    for found in inside:
        corpus.alive[found.numbers] = False
    return [equal, *inside]


def _still_inside(inside: list[Duplicate], corpus: Corpus, near: NearDuplicates) -> list[Duplicate]:
    """Those documents that are inside one that was kept after all. Where the longer document was dropped as a
    near-duplicate, the one kept instead may lack the part; then the shorter document is compared with the kept ones
    itself.
    """
    numbers = np.concatenate([np.empty(0, np.int64), *(found.numbers for found in inside)])
    if not len(numbers):
        return inside
    near.expect(numbers)
    store, outer_of, kept = corpus.shingles, no_numbers(len(corpus)), no_numbers(len(corpus))
    for found in inside:
        outer_of[found.numbers] = found.instead
    lengths = store.offsets[numbers + 1] - store.offsets[numbers]
    for number in map(int, numbers[np.lexsort((numbers, -lengths))]):
        outer = int(outer_of[number])
        outer = near.kept_instead(int(kept[outer]) if kept[outer] != NO_NUMBER else outer)
        if corpus.alive[outer] and _contains(store.row(outer), store.row(number)):
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


def _contains(outer: NDArray[np.uint32], inner: NDArray[np.uint32]) -> bool:
    starts = np.flatnonzero(outer[: max(0, len(outer) - len(inner) + 1)] == inner[0])
    return any(np.array_equal(outer[start : start + len(inner)], inner) for start in starts)


def _with_survivors(found: list[Duplicate], num_documents: int) -> list[Duplicate]:
    """The same, where a document that was kept instead of another one and dropped later is replaced by its own."""
    instead_of = no_numbers(num_documents)
    for duplicate in found:
        instead_of[duplicate.numbers] = duplicate.instead
    result: list[Duplicate] = []
    for duplicate in found:
        instead = duplicate.instead.copy()
        while (is_dropped := instead_of[instead] != NO_NUMBER).any():
            instead[is_dropped] = instead_of[instead[is_dropped]]
        result.append(replace(duplicate, instead=instead))
    return result


def _given_away(corpus: Corpus, by: NDArray[np.bool_]) -> Duplicate:
    """Training documents with a text, answer or summary of a held-out one; by [N]: the held-out ones that count."""
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
