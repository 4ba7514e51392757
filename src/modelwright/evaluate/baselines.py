"""Baselines for a model's bits per byte: bigram, gzip, xz, on the very same documents.

The bigram learns from the model's own training tokens and is scored on the same tokens as the model; the compressors
see no training text, but in their concatenated reading all held-out text before.

The bigram baseline predicts the next token from the previous one alone.

Interpolated Kneser-Ney of order two (Kneser & Ney 1995; Chen & Goodman 1999, section 2.7):

    p(w | v) = max(c(v w) - d, 0) / c(v) + d n(v) / c(v) * q(w)

c counts pairs, n(v) is the number of different tokens seen after v, and the unigram q(w), to which it backs off, is
proportional to the number of different tokens seen before w (plus one half, so that nothing is impossible). The
discount d sets the interpolation and is chosen on a slice of the training tokens that the trial counts leave out. All
in vectorised NumPy.

Bits per byte of general-purpose compressors: the cost of text without a language model.

Two readings, both reported. `per_document`: each document alone, as the model sees it, container included: short
documents drown in headers. `concatenated`: all documents of a kind in one stream, so that each can refer to all
before it: more context than the model gets, and the stronger baseline.
"""

import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from modelwright.core.progress import Progress
from modelwright.data.document import Document
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.config import EvaluateConfig
from modelwright.evaluate.scoring import document_scores, start_id, summarize_scores

Compressor = Callable[[bytes], int]
"""Size in bytes after compression."""


def gzip_size(data: bytes) -> int:
    """`gzip -9`: DEFLATE at level 9 with gzip's 18 bytes of header and checksum (RFC 1952)."""
    stream = zlib.compressobj(9, zlib.DEFLATED, 31, 9)
    return len(stream.compress(data)) + len(stream.flush())


def xz_size(data: bytes) -> int:
    """`xz -9e`. The dictionary is cut to the data's size: the same output for far less memory and time."""
    # The next power of two that holds the data, within the limits of -9e (64 MiB) and of LZMA (4 KiB).
    dictionary = min(1 << 26, max(1 << 12, 1 << (len(data) - 1).bit_length())) if data else 1 << 12
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": dictionary}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters))


COMPRESSORS: Mapping[str, Compressor] = {"gzip": gzip_size, "xz": xz_size}


def compressed_bits(texts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns bits per byte of one kind's documents: `{"gzip" | "xz": {"per_document": ..., "concatenated": ...}}`. The
    concatenation joins the texts with single newlines; bits are divided by the texts' own bytes in both readings.
    """
    encoded = [text.encode("utf-8") for text in texts]
    total = sum(map(len, encoded))
    joined = b"\n".join(encoded)
    return {
        name: {"per_document": 8 * sum(map(size, encoded)) / total, "concatenated": 8 * size(joined) / total}
        for name, size in COMPRESSORS.items()
    }


Pairs = tuple[np.ndarray, np.ndarray]
"""Previous tokens and next tokens, int64 [N] each."""

DISCOUNTS = tuple(np.round(np.arange(0.30, 0.96, 0.05), 2))
FITTING_SHARE = 20
"""The discount is chosen on one pair in this many, in runs of `FITTING_RUN` pairs."""
FITTING_RUN = 1024
_UNSEEN = 0.5
"""Count of predecessors that every token gets, so that no token is impossible."""


@dataclass(frozen=True)
class Bigram:
    """A trained bigram: sorted pair keys `v * vocab_size + w` with counts, and the tables derived from them."""

    vocab_size: int
    discount: float
    num_pairs: int
    keys: np.ndarray
    counts: np.ndarray
    context_counts_V: np.ndarray
    followers_V: np.ndarray
    unigram_V: np.ndarray

    def log_probs(self, previous_N: np.ndarray, next_N: np.ndarray) -> np.ndarray:
        """Natural log-probabilities (float64) [N]; finite for every pair of ids below `vocab_size`."""
        return np.log(self.probabilities(previous_N, next_N, self.discount))

    def probabilities(self, previous_N: np.ndarray, next_N: np.ndarray, discount: float) -> np.ndarray:
        """Probabilities (float64) [N] under any discount."""
        pair_counts = np.zeros(len(next_N), dtype=np.int64)
        if len(self.keys):
            requested = previous_N.astype(np.int64) * self.vocab_size + next_N
            place = np.minimum(np.searchsorted(self.keys, requested), len(self.keys) - 1)
            pair_counts = np.where(self.keys[place] == requested, self.counts[place], 0)
        seen = self.context_counts_V[previous_N]
        total = np.maximum(seen, 1)
        direct = np.maximum(pair_counts - discount, 0.0) / total
        # After a token that was never seen the unigram alone predicts.
        backoff = np.where(seen > 0, discount * self.followers_V[previous_N] / total, 1.0)
        return direct + backoff * self.unigram_V[next_N]


def train_bigram(pairs: Iterable[Pairs], *, vocab_size: int) -> Bigram:
    """Count the training pairs and choose the discount. Raises `ValueError` without any pair."""
    # One number for a pair: at millions of pairs every further array weighs as much as a small model.
    parts = [previous.astype(np.int64) * vocab_size + following for previous, following in pairs]
    pairs_N = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    del parts
    if not len(pairs_N):
        raise ValueError("the bigram baseline needs at least one pair of training tokens; are the train rows empty?")
    # Runs instead of single pairs, so that the fitting pairs are not the neighbors of counted ones.
    fitting = (np.arange(len(pairs_N), dtype=np.int32) // FITTING_RUN) % FITTING_SHARE == FITTING_SHARE - 1
    if not fitting.any():
        fitting[len(fitting) * (FITTING_SHARE - 1) // FITTING_SHARE :] = True
    trial = _count(pairs_N[~fitting], vocab_size)
    fitting_pairs = divmod(pairs_N[fitting], vocab_size)
    likelihoods = [np.log(trial.probabilities(*fitting_pairs, discount)).sum() for discount in DISCOUNTS]
    return replace(_count(pairs_N, vocab_size), discount=float(DISCOUNTS[int(np.argmax(likelihoods))]))


def training_pairs(batches: Iterable[TokenBatch], *, max_tokens: int) -> Iterator[Pairs]:
    """Yields the predictions that the model is trained on, up to `max_tokens` of them (0: all): same pairs, same
    boundaries.
    """
    left = max_tokens or np.iinfo(np.int64).max
    for batch in batches:
        labels = batch.labels_BT.numpy()
        counted = labels != IGNORED
        previous, following = batch.input_ids_BT.numpy()[counted][:left], labels[counted][:left]
        yield previous, following
        left -= len(previous)
        if left <= 0:
            return


def document_nats(bigram: Bigram, encoded: Sequence[Sequence[int]], *, start_id: int) -> np.ndarray:
    """Negative log-likelihood in nats of each document's tokens, the first one after the start token."""
    nats = np.zeros(len(encoded))
    for i, ids in enumerate(encoded):
        whole = np.array([start_id, *ids], dtype=np.int64)
        nats[i] = -bigram.log_probs(whole[:-1], whole[1:]).sum()
    return nats


def _count(pairs_N: np.ndarray, vocab_size: int) -> Bigram:
    """Counts the pairs, each as `v * vocab_size + w`; sorts them in place."""
    pairs_N.sort()
    starts = np.flatnonzero(np.diff(pairs_N, prepend=-1))
    keys, counts = pairs_N[starts], np.diff(starts, append=len(pairs_N))
    predecessors_V = np.bincount(keys % vocab_size, minlength=vocab_size) + _UNSEEN
    return Bigram(
        vocab_size=vocab_size,
        discount=DISCOUNTS[-1],
        num_pairs=len(pairs_N),
        keys=keys,
        counts=counts,
        context_counts_V=np.bincount(keys // vocab_size, weights=counts, minlength=vocab_size).astype(np.int64),
        followers_V=np.bincount(keys // vocab_size, minlength=vocab_size),
        unigram_V=predecessors_V / predecessors_V.sum(),
    )


def compressor_table(documents: Sequence[Document]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the result of `compressed_bits` for each kind."""
    kinds = dict.fromkeys(document.kind for document in documents)
    return {kind: compressed_bits([d.text for d in documents if d.kind == kind]) for kind in kinds}


def bigram_table(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    config: EvaluateConfig,
    *,
    train_rows: Iterable[TokenBatch],
    vocab_size: int,
    progress: Progress,
) -> dict[str, Any]:
    """Returns the bigram's discount, its number of training pairs and per kind the result of `summarize_scores`."""
    progress.begin("bigram baseline", 0, "tokens")
    bigram = train_bigram(training_pairs(train_rows, max_tokens=config.bigram_tokens), vocab_size=vocab_size)
    encoded = [tokenizer.encode(document.text) for document in documents]
    nats = document_nats(bigram, encoded, start_id=start_id(tokenizer))
    scores = document_scores(documents, encoded, nats)
    progress.end()
    return {
        "discount": bigram.discount,
        "train_pairs": bigram.num_pairs,
        "kinds": summarize_scores(scores, resamples=config.bootstrap_resamples, seed=config.seed),
    }
