"""Fingerprints of a document: digests of its text, its word 5-grams as hashes, and MinHash band hashes.

Texts are compared without their titles, without case, punctuation and spacing; pairs by their answers. An answer of
one or two words ("yes", a label) belongs to many questions and is compared together with its question.

MinHash signatures (Broder 1997) of 128 permutations in 16 bands of 8 rows (Leskovec, Rajaraman and Ullman, Mining of
Massive Datasets, section 3.4): documents of Jaccard similarity 0.85 share a band with probability 0.993, of 0.5 with
0.06. Candidates are verified with the exact Jaccard similarity of their 5-grams.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

from modelwright.data.clean.words import hash_words, split_words
from modelwright.data.document import Document, join_turns

NUM_PERMUTATIONS, NUM_BANDS = 128, 16
SHINGLE_WORDS = 5
MIN_ANSWER_WORDS = 3
"""Shorter answers do not mean anything without their question."""
_SEED = 1
_MULTIPLIER, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of N documents.

    own: digest of kind, split and text; keys: digests of text and summary, 0 for no summary; shingles: 5-gram hashes in
    the order of the text, those of document i from `offsets[i]` to `offsets[i + 1]`; bands: hashes of the signature's
    bands.
    """

    own: NDArray[np.uint64]
    keys: NDArray[np.uint64]
    shingles: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    bands: NDArray[np.uint64]


def fingerprints(documents: Sequence[Document], *, whole_pairs: bool = False) -> Fingerprints:
    """Computes the fingerprints of some documents: own [N], keys [N, 2], shingles [S], offsets [N + 1], bands [N, 16].

    whole_pairs: compare pairs by the whole conversation, not by its answers. Documents of fewer than 5 words have an
    empty row of shingles and bands of 0.
    """
    bodies: list[str] = []
    for d in documents:
        # A caption fits many images, which are compared by their own step (`steps/images.py`).
        body = d.text if whole_pairs and d.kind == "qa" else d.body
        bodies.append("" if d.kind == "image" else body)
    identities = [d.text if whole_pairs and d.kind == "qa" else identity(d) for d in documents]
    rows = [shingles(body) for body in bodies]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    flat = np.concatenate(rows) if rows else np.empty(0, np.uint32)
    pairs = [(d, " ".join(same.split())) for d, same in zip(documents, identities, strict=True)]
    own = [_hash(f"{d.kind} {d.split} {same}".rstrip()) for d, same in pairs]
    keys = [(_hash(same), digest(d.meta["summary"]) if d.meta.get("summary") else 0) for d, same in pairs]
    return Fingerprints(
        own=np.array(own, dtype=np.uint64),
        keys=np.array(keys, dtype=np.uint64).reshape(-1, 2),
        shingles=flat,
        offsets=offsets,
        bands=band_hashes(flat, offsets),
    )


def identity(document: Document) -> str:
    """Returns the text by which documents are equal."""
    if document.kind == "image":
        return document.identity
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
