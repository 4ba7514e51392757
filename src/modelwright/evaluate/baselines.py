"""Baselines for a model's bits per byte: bigram, gzip, xz, on the very same documents.

What is compared with what: the bigram learns from the model's own training tokens and is scored on the same tokens; the
compressors see no training text, but in their concatenated reading all held-out text before.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from modelwright.core.progress import Progress
from modelwright.data.document import Document
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.bigram import document_nats, train_bigram, training_pairs
from modelwright.evaluate.bits_per_byte import document_scores, start_id, summarize_scores
from modelwright.evaluate.compressors import compressed_bits
from modelwright.evaluate.config import EvaluateConfig


def compressor_table(documents: Sequence[Document]) -> dict[str, dict[str, dict[str, float]]]:
    """Per kind the result of `compressed_bits`."""
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
    """The bigram's discount, its number of training pairs and per kind the result of `summarize_scores`."""
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
