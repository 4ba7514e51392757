"""Fingerprints of documents and the corpus that they describe, in which `deduplicate.py` finds duplicates.

Texts are compared without their titles, without case, punctuation and spacing; pairs by their answers. An answer of
one or two words ("yes", a label) belongs to many questions and is compared together with its question. Preferences are
equal by all that is learned of them: prompt, both answers, label.

MinHash signatures (Broder 1997) of 128 permutations in 16 bands of 8 rows (Leskovec, Rajaraman and Ullman, Mining of
Massive Datasets, section 3.4): documents of Jaccard similarity 0.85 share a band with probability 0.993, of 0.5 with
0.06. Candidates are verified with the exact Jaccard similarity of their 5-grams.

In memory are 15 bytes a document, and what documents have in common with others; texts are compared from files.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from modelwright.core.config import ConfigError, constant
from modelwright.data.clean.features import hash_words, split_words
from modelwright.data.clean.steps.step import DiskFile
from modelwright.data.document import Document, join_turns

NUM_PERMUTATIONS, NUM_BANDS = 128, 16
SHINGLE_WORDS = 5
MIN_ANSWER_WORDS = 3
"""Shorter answers do not mean anything without their question."""
_SEED = 1
_MULTIPLIER, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
NOTHING = -1
NO_NUMBER = 2**32 - 1
"""`NOTHING` in arrays of uint32."""
TRAIN, HELDOUT = 0, 1
"""Values of `Corpus.split`."""
_CACHED_BYTES = 32 * 2**20
# 5-grams that are read from disk at a time.
_READ_AT_ONCE = 2**19


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
    pairs_by: Literal["answer", "conversation", "answer_always"] = "answer"
    """Text by which question/answer pairs are compared: `answer`, so that one answer to many questions is learned once,
    or `conversation`, which keeps answers that many questions have in common, such as labels. By `answer` the run stops
    where more than a fifth of the pairs would go; `answer_always` drops them."""
    index: str = ""
    """Folder with the fingerprints of earlier runs' kept documents, whose near-duplicates are dropped, too."""
    min_near_words: int = constant(20)
    """Shorter documents are neither near-duplicates nor parts of longer ones: a single word makes a difference."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.min_jaccard <= 1:
            raise ConfigError(f"min_jaccard: must be from 0.5 to 1, got {self.min_jaccard}; 0.85 is usual")


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of N documents.

    own: digest of kind, split and text; whole: digest of all that is learned of a pair, else 0; keys: digests of text
    and summary, 0 for no summary; shingles: 5-gram hashes in the order of the text, those of document i from
    `offsets[i]` to `offsets[i + 1]`; bands: hashes of the signature's bands.
    """

    own: NDArray[np.uint64]
    whole: NDArray[np.uint64]
    keys: NDArray[np.uint64]
    shingles: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    bands: NDArray[np.uint64]


def fingerprints(documents: Sequence[Document], *, whole_pairs: bool = False, with_bands: bool = True) -> Fingerprints:
    """Computes the fingerprints of some documents: own [N], whole [N], keys [N, 2], shingles [S], offsets [N + 1],
    bands [N, 16].

    whole_pairs: compare pairs by the whole conversation, not by its answers. Documents of fewer than 5 words have an
    empty row of shingles and bands of 0. with_bands: False leaves all bands at 0, which only near-duplicates need.
    """
    bodies: list[str] = []
    for d in documents:
        # A caption fits many images, which are compared by their own step (`steps/images.py`).
        # Preferences with one answer and different rejected ones teach different things, however near they are.
        body = d.text if whole_pairs and d.kind == "qa" else d.body
        bodies.append("" if d.kind == "image" or d.is_judged else body)
    identities = [d.learned if whole_pairs and d.kind == "qa" else identity(d) for d in documents]
    rows = [shingles(body) for body in bodies]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    flat = np.concatenate(rows) if rows else np.empty(0, np.uint32)
    pairs = [(d, " ".join(same.split())) for d, same in zip(documents, identities, strict=True)]
    own = [_hash(f"{d.kind} {d.split} {same}".rstrip()) for d, same in pairs]
    keys = [(_hash(same), digest(d.meta["summary"]) if d.meta.get("summary") else 0) for d, same in pairs]
    return Fingerprints(
        own=np.array(own, dtype=np.uint64),
        whole=np.array([digest(d.learned) if d.kind == "qa" else 0 for d in documents], dtype=np.uint64),
        keys=np.array(keys, dtype=np.uint64).reshape(-1, 2),
        shingles=flat,
        offsets=offsets,
        bands=band_hashes(flat, offsets) if with_bands else np.zeros((len(documents), NUM_BANDS), np.uint64),
    )


def identity(document: Document) -> str:
    """Returns the text by which documents are equal."""
    if document.kind == "image":
        return document.identity
    if document.kind == "qa" and document.is_judged:
        return document.learned
    is_short = document.kind == "qa" and len(document.body.split()) < MIN_ANSWER_WORDS
    return join_turns([*document.messages, *document.rejected]) if is_short else document.body


def digest(text: str) -> int:
    """Returns 64 bits of BLAKE2b of the text's words, without regard to spacing; never 0.

    Among 100 million texts the chance of any two different ones with one digest is 0.0003.
    """
    return _hash(" ".join(text.split()))


def _hash(text: str) -> int:
    encoded = text.encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") or 1


def shingles(text: str) -> NDArray[np.uint32]:
    """Hashes of a text's word 5-grams, in order [max(0, words - 4)]."""
    values = hash_words(split_words(text))
    if len(values) < SHINGLE_WORDS:
        return np.empty(0, np.uint32)
    count = len(values) - SHINGLE_WORDS + 1
    mixed = values[:count].copy()
    for i in range(1, SHINGLE_WORDS):
        mixed *= _MULTIPLIER
        mixed += values[i : i + count]
    # A polynomial hash leaves its low bits weak; the mix makes the upper 32 depend on all of them.
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX
    return (mixed >> np.uint64(32)).astype(np.uint32)


def band_hashes(flat: NDArray[np.uint32], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hashes of the MinHash signatures' bands [N, 16]; 0 for documents without shingles."""
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

    num_documents = len(offsets) - 1
    bands = np.zeros((num_documents, NUM_BANDS), np.uint64)
    rows = np.flatnonzero(np.diff(offsets))
    if not len(rows):
        return bands
    starts = np.concatenate([offsets[rows], offsets[-1:]]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat.astype(np.uint64), starts, NUM_PERMUTATIONS, _SEED)
    signatures = np.array(matrix.to_rows(), dtype=np.uint64).reshape(len(rows), NUM_BANDS, -1)
    mixed = np.zeros(signatures.shape[:2], np.uint64)
    for row in range(signatures.shape[2]):
        mixed = mixed * _MULTIPLIER + signatures[:, :, row]
    mixed ^= mixed >> np.uint64(29)
    bands[rows] = (mixed * _MIX) | np.uint64(1)  # odd, because 0 stands for a document without shingles
    return bands


def jaccard(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> float:
    """Jaccard similarity of two sets of hashes, each sorted and without repetition."""
    if not len(first) or not len(second):
        return 0.0
    both = len(np.intersect1d(first, second, assume_unique=True))
    return both / (len(first) + len(second) - both)


class ShingleStore:
    """The 5-gram hashes of all documents, one after another in a file."""

    def __init__(self, path: Path, offsets: NDArray[np.int64]) -> None:
        """path: the hashes, uint32; offsets [N + 1]: index of the first hash of each document."""
        self.offsets = offsets
        self._file = DiskFile(path)
        self._sets: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()
        self._cached_bytes = 0

    def row(self, document: int) -> NDArray[np.uint32]:
        """The hashes of one document, in the order of its text."""
        return self._file.read(np.uint32, int(self.offsets[document]), int(self.offsets[document + 1]))

    def unique(self, document: int) -> NDArray[np.uint32]:
        """The different hashes of one document, sorted; the most recently used ones stay in memory."""
        if document in self._sets:
            self._sets.move_to_end(document)
            return self._sets[document]
        hashes = self._sets[document] = np.unique(self.row(document))
        self._cached_bytes += hashes.nbytes
        while self._cached_bytes > _CACHED_BYTES and len(self._sets) > 1:
            self._cached_bytes -= self._sets.popitem(last=False)[1].nbytes
        return hashes

    def chunks(self, num_documents: int) -> Iterator[tuple[int, int, NDArray[np.uint32]]]:
        """Yields `(first, last, hashes)` of many of the first `num_documents` at a time, `first` to below `last`."""
        first = 0
        while first < num_documents:
            last = int(np.searchsorted(self.offsets, self.offsets[first] + _READ_AT_ONCE, side="right")) - 1
            last = min(num_documents, max(last, first + 1))
            yield first, last, self._file.read(np.uint32, int(self.offsets[first]), int(self.offsets[last]))
            first = last

    def ends(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """The first and the last hash of each of some documents, which are in ascending order and not empty."""
        firsts, lasts = np.empty(len(documents), np.uint32), np.empty(len(documents), np.uint32)
        for first, last, flat in self.chunks(int(documents[-1]) + 1 if len(documents) else 0):
            own = slice(*np.searchsorted(documents, [first, last]))
            firsts[own] = flat[self.offsets[documents[own]] - self.offsets[first]]
            lasts[own] = flat[self.offsets[documents[own] + 1] - self.offsets[first] - 1]
        return firsts, lasts


@dataclass(frozen=True)
class BandFiles:
    """Hashes of all documents, a uint64 file a band: 16 of MinHash (0 without 5-grams), or parts of image hashes."""

    folder: Path

    def path(self, band: int) -> Path:
        return self.folder / f"band{band:02d}.bin"

    def column(self, band: int) -> NDArray[np.uint64]:
        """Reads a band of all documents."""
        return np.fromfile(self.path(band), np.uint64)

    def rows(self, first: int, last: int) -> NDArray[np.uint64]:
        """Reads all bands of MinHash of the documents from `first` to below `last` [last - first, 16]."""
        columns = [
            np.fromfile(self.path(band), np.uint64, count=last - first, offset=8 * first) for band in range(NUM_BANDS)
        ]
        return np.stack(columns, axis=1)


@dataclass(frozen=True)
class InCommon:
    """Documents that have a value in common with another one. numbers [P]: ascending; values [P, ...]: of each."""

    numbers: NDArray[np.int64]
    values: NDArray[np.uint64]

    @classmethod
    def of(cls, values: NDArray[np.uint64]) -> "InCommon":
        """Selects the documents whose value [N] is also that of another one."""
        order = np.argsort(values, kind="stable")
        same = values[order[1:]] == values[order[:-1]]
        repeated = np.zeros(len(values), np.bool_)
        repeated[order[1:][same]] = True
        repeated[order[:-1][same]] = True
        numbers = np.flatnonzero(repeated)
        return cls(numbers, values[numbers])


@dataclass(kw_only=True)
class Corpus:
    """The data of N documents for deduplication. kind: int8; split: int8, 1 held out, 0 any other; quality: float32,
    higher is better; alive: not dropped yet; equal: by the digest of kind, split and text; shared: held-out documents,
    and training documents with a digest of theirs, by the digests of text and summary [P, 2].
    """

    kind: NDArray[np.int8]
    split: NDArray[np.int8]
    quality: NDArray[np.float32]
    alive: NDArray[np.bool_]
    equal: InCommon
    shared: InCommon
    shingles: ShingleStore
    bands: BandFiles

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def num_shingles(self) -> NDArray[np.int64]:
        """Number of 5-grams of each document [N]; computed anew by every call."""
        return np.diff(self.shingles.offsets)


@dataclass(frozen=True)
class Duplicate:
    """Documents that are dropped for one reason: their numbers, the reason, the number of the document kept instead of
    each (`NOTHING` if unknown) and the similarity to it.
    """

    numbers: NDArray[np.int64]
    reason: str
    instead: NDArray[np.int64]
    similarity: NDArray[np.float32]


def no_numbers(length: int) -> NDArray[np.uint32]:
    """Makes an array for a document's number for each of `length` documents, filled with `NO_NUMBER`."""
    return np.full(length, NO_NUMBER, np.uint32)


def exact(corpus: Corpus, num_new: int) -> Duplicate:
    """Finds all but the first of equal texts; those of the index come before all others."""
    is_alive = corpus.alive[corpus.equal.numbers]
    numbers, values = corpus.equal.numbers[is_alive], corpus.equal.values[is_alive]
    num_own = int(np.searchsorted(numbers, num_new))
    # Rolled, so that the index's documents come first; the stable sort then keeps them as the first of equal ones.
    order = np.argsort(np.roll(values, -num_own), kind="stable")
    order += num_own
    order[order >= len(numbers)] -= len(numbers)
    numbers, values = numbers[order], values[order]
    del order  # the arrays of a large corpus fill memory; each is freed as soon as possible
    firsts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])[: len(values)])
    del values
    kept = np.repeat(numbers[firsts], np.diff(firsts, append=len(numbers)))
    repeated = (kept != numbers) & (numbers < num_new)
    numbers, kept = numbers[repeated], kept[repeated]
    order = np.argsort(numbers)
    return Duplicate(numbers[order], "duplicate", kept[order], np.ones(len(numbers), np.float32))
