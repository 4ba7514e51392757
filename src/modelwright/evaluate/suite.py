"""The whole evaluation of one model as plain JSON, with baselines of its bits per byte on the very same documents, and
of two models against each other.

Works for FP32 and INT8 models alike. Expects held-out documents only; selecting them is up to the caller. The bigram
learns from the model's own training tokens and is scored on the same tokens as the model; the compressors see no
training text, but in their concatenated reading all held-out text before.
"""

import json
import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import derive_seed
from modelwright.core.progress import Progress
from modelwright.core.records import read_records
from modelwright.data.document import Document
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate import scoring
from modelwright.evaluate.multiple_choice import answer_questions, build_questions, summarize_answers
from modelwright.evaluate.scoring import EvaluateConfig, log10_sign_test
from modelwright.model.decoder import Decoder

ANSWERS_FILE = "answers.jsonl"
DOCUMENTS_FILE = "documents.jsonl"
QUESTIONS_FILE = "questions.jsonl"


def evaluate_model(
    model: Decoder,
    tokenizer: Tokenizer,
    documents: Iterable[Document],
    config: EvaluateConfig,
    *,
    train_rows: Iterable[TokenBatch],
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Evaluate a model: bits per byte per kind, baselines on the same documents, perplexity of answers, multiple
    choice. `train_rows`: the training batches that the bigram learns from; an empty iterable leaves the baselines out
    (a second model on the same documents needs them no second time). Results of single documents, conversations and
    questions are written to `folder` as `documents.jsonl`, `answers.jsonl` and `questions.jsonl`. Returns
    `{"bits_per_byte": {kind: ...}, "baselines": {} or {"bigram": ..., "compressors": {kind: ...}}, "answers": ...,
    "multiple_choice": ..., "lossless": whether every scored text survives encoding and decoding}`; the inner shapes are
    those of `summarize_scores`, `bigram_table`, `compressor_table`, `summarize_answer_scores` and `summarize_answers`.
    """
    documents = list(documents)
    has_text = any(document.kind in config.domains for document in documents)
    # Runs on conversations alone get bits per byte of these.
    kinds = config.domains if has_text or not config.domains else ("qa",)
    size = config.max_bytes_per_domain
    chosen = scoring.select_documents(documents, kinds=kinds, max_bytes_per_kind=size, seed=config.seed)
    scores = scoring.score_documents(model, tokenizer, chosen, config, progress=progress)
    write_lines(folder / DOCUMENTS_FILE, [asdict(score) for score in scores])
    # Answers that a preference marks as undesirable are not meant to become likely.
    wanted = [one for one in documents if one.kind == "qa" and one.has_answer and not one.is_undesirable]
    conversations = scoring.select_documents(wanted, kinds=("qa",), max_bytes_per_kind=size, seed=config.seed)
    spoken = scoring.score_answers(model, tokenizer, conversations, config, progress=progress)
    write_lines(folder / ANSWERS_FILE, spoken)
    questions = build_questions(documents, config.multiple_choice)
    answers = answer_questions(model, tokenizer, questions, config, progress=progress)
    write_lines(folder / QUESTIONS_FILE, answers)
    baselines: dict[str, Any] = {}
    first = next(rows := iter(train_rows), None)
    if first is not None and chosen:
        whole, vocab_size = chain([first], rows), model.config.vocab_size
        bigram = bigram_table(tokenizer, chosen, config, train_rows=whole, vocab_size=vocab_size, progress=progress)
        baselines = {"bigram": bigram, "compressors": compressor_table(chosen)}
    return {
        "bits_per_byte": scoring.summarize_scores(scores, resamples=config.bootstrap_resamples, seed=config.seed),
        "baselines": baselines,
        "answers": scoring.summarize_answer_scores(spoken, resamples=config.bootstrap_resamples, seed=config.seed),
        "multiple_choice": summarize_answers(answers, score=config.multiple_choice.score),
        "lossless": is_lossless(tokenizer, [document.text for document in chosen]),
    }


def compare_evaluations(folder: Path, reference: Path, config: EvaluateConfig) -> dict[str, Any]:
    """Paired differences between the model evaluated into `folder` and the one evaluated into `reference`.
    `{"bits_per_byte": {kind: {"difference", "low", "high"}}, "answers": {} or the same, "multiple_choice": {"won",
    "lost", "log10_p_value"}}`: bits per byte of documents and of answers with a 95% bootstrap interval over documents
    (negative: better), questions that only the one or only the other gets right with the two-sided sign test. Raises
    `ValueError` if the two were not evaluated on the same documents and questions.
    """
    now, before = (read_records(path / DOCUMENTS_FILE) for path in (folder, reference))
    _require_same(now, before, folder, reference)
    tables = {}
    for kind in dict.fromkeys(record["kind"] for record in now):
        pairs = [(a, b) for a, b in zip(now, before, strict=True) if a["kind"] == kind]
        tables[kind] = _bits_difference(pairs, config, kind)
    answers: dict[str, float] = {}
    if (reference / ANSWERS_FILE).exists():  # a reference may have been evaluated before answers were
        now, before = (read_records(path / ANSWERS_FILE) for path in (folder, reference))
        _require_same(now, before, folder, reference)
        if now:
            answers = _bits_difference(list(zip(now, before, strict=True)), config, "answers")
    now, before = (read_records(path / QUESTIONS_FILE) for path in (folder, reference))
    _require_same(now, before, folder, reference)
    won = sum(a["correct"] and not b["correct"] for a, b in zip(now, before, strict=True))
    lost = sum(b["correct"] and not a["correct"] for a, b in zip(now, before, strict=True))
    test = {"won": won, "lost": lost, "log10_p_value": log10_sign_test(won, lost)}
    return {"bits_per_byte": tables, "answers": answers, "multiple_choice": test}


def _bits_difference(pairs: Sequence[tuple[dict, dict]], config: EvaluateConfig, name: str) -> dict[str, float]:
    bits = np.array([a["nats"] - b["nats"] for a, b in pairs]) / math.log(2)
    sizes = np.array([float(a["num_bytes"]) for a, _ in pairs])
    seed = derive_seed(config.seed, "compare", name)
    low, high = scoring.bootstrap_ratio(bits, sizes, resamples=config.bootstrap_resamples, seed=seed)
    return {"difference": float(bits.sum() / sizes.sum()), "low": low, "high": high}


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records as JSON lines, atomically."""
    write_atomic(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


LOSSY = (
    "the tokenizer does not keep the text (decoding its ids gives another one), so bits per byte are too low to be "
    "compared with other models or with the baselines"
)
"""Consequence if `is_lossless` is false."""


def is_lossless(tokenizer: Tokenizer, texts: Sequence[str]) -> bool:
    """True if decoding restores every text; if not, bits per byte flatter the model."""
    return all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)


def _require_same(now: list[dict], before: list[dict], folder: Path, reference: Path) -> None:
    if [record["id"] for record in now] != [record["id"] for record in before]:
        raise ValueError(f"{folder} and {reference}: were not evaluated on the same documents; run both again")


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
    """Returns bits per byte of one kind's documents: `{"gzip" | "xz": {"per_document": ..., "concatenated": ...}}`.
    `per_document`: each document alone, as the model sees it, container included: short documents drown in headers.
    `concatenated`: all in one stream, joined with single newlines, so that each can refer to all before it: more
    context than the model gets, and the stronger baseline. Bits are divided by the texts' own bytes in both readings.
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
    """Predicts the next token from the previous one: interpolated Kneser-Ney of order two (Kneser & Ney 1995; Chen &
    Goodman 1999, section 2.7):

        p(w | v) = max(c(v w) - d, 0) / c(v) + d n(v) / c(v) * q(w)

    c counts pairs, n(v) is the number of different tokens seen after v, and the unigram q(w), to which it backs off,
    is proportional to the number of different tokens seen before w (plus one half, so that nothing is impossible). The
    discount d sets the interpolation. keys: sorted, `v * vocab_size + w` of each pair.
    """

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
    nats = document_nats(bigram, encoded, start_id=scoring.start_id(tokenizer))
    scores = scoring.document_scores(documents, encoded, nats)
    progress.end()
    return {
        "discount": bigram.discount,
        "train_pairs": bigram.num_pairs,
        "kinds": scoring.summarize_scores(scores, resamples=config.bootstrap_resamples, seed=config.seed),
    }
