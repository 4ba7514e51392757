"""Bits per byte of held-out documents: the number of bits that the model needs for one byte of unseen text.

The figure does not depend on the tokenizer (bytes are the text's own), so models with different vocabularies and file
compressors can
be compared in one table. A document is scored as the start token followed by its text: every token of the text is
predicted exactly once; the start token is given and the end token is not counted, because its cost belongs to no byte.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelwright.core.progress import Progress
from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.config import EvaluateConfig
from modelwright.evaluate.scoring import Scored, sequence_nats
from modelwright.model.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class DocumentScore:
    """Cost of one document: `nats` for `num_tokens` tokens, `num_bytes` UTF-8 bytes of text."""

    id: str
    kind: str
    num_tokens: int
    num_bytes: int
    nats: float


def start_id(tokenizer: Tokenizer) -> int:
    """Id of the token before a text: the begin token, or, without one, the end token of the previous text."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id


def select_documents(
    documents: Iterable[Document], *, kinds: Sequence[str], max_bytes_per_kind: int, seed: int
) -> list[Document]:
    """Selects non-empty documents of `kinds`, of each kind a sample of at most `max_bytes_per_kind` bytes (0: all).
    Documents are drawn at random and skipped once they no longer fit, so a tight cap favors short ones; at least one of
    a kind is taken. The sample depends on `seed` and the documents' ids and texts alone, not on their order. The result
    is in the order of kinds, then of ids.
    """
    by_kind: dict[str, list[Document]] = {kind: [] for kind in kinds}
    for document in documents:
        if document.kind in by_kind and document.text:
            by_kind[document.kind].append(document)
    chosen: list[Document] = []
    for group in by_kind.values():
        taken, size = [], 0
        # In the order of a hash, not of a random generator: adding a document leaves the draw of the others unchanged.
        for document in sorted(group, key=lambda d: _draw(seed, d)):
            num_bytes = len(document.text.encode("utf-8"))
            if not taken or not max_bytes_per_kind or size + num_bytes <= max_bytes_per_kind:
                taken.append(document)
                size += num_bytes
        chosen += sorted(taken, key=lambda d: (d.id, d.text))
    return chosen


def score_documents(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluateConfig, *, progress: Progress
) -> list[DocumentScore]:
    """Scores the model's cost of each document, each token given as much context as the model takes."""
    encoded = [tokenizer.encode(document.text) for document in documents]
    nats = sequence_nats(
        model,
        [Scored([start_id(tokenizer), *ids], 1) for ids in encoded],
        context_overlap=config.context_overlap,
        max_context=config.max_context,
        batch_tokens=config.batch_tokens,
        progress=progress,
        name="bits per byte",
    )
    return document_scores(documents, encoded, nats)


def document_scores(
    documents: Sequence[Document], encoded: Sequence[Sequence[int]], nats: Iterable[float]
) -> list[DocumentScore]:
    """Combines documents with their token ids and costs in nats."""
    return [
        DocumentScore(
            id=document.id,
            kind=document.kind,
            num_tokens=len(ids),
            num_bytes=len(document.text.encode("utf-8")),
            nats=float(cost),
        )
        for document, ids, cost in zip(documents, encoded, nats, strict=True)
    ]


def summarize_scores(scores: Sequence[DocumentScore], *, resamples: int, seed: int) -> dict[str, dict[str, Any]]:
    """Per kind: documents, tokens, bytes, nats, nats per token, bits per byte and its 95% bootstrap interval."""
    summary: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(score.kind for score in scores):
        own = [score for score in scores if score.kind == kind]
        nats = np.array([score.nats for score in own])
        sizes = np.array([score.num_bytes for score in own], dtype=np.float64)
        num_tokens = sum(score.num_tokens for score in own)
        # A seed for each kind: its interval does not depend on the kinds that are scored with it.
        kind_seed = derive_seed(seed, "bootstrap", kind)
        low, high = bootstrap_ratio(nats / math.log(2), sizes, resamples=resamples, seed=kind_seed)
        summary[kind] = {
            "documents": len(own),
            "tokens": num_tokens,
            "bytes": int(sizes.sum()),
            "nats": float(nats.sum()),
            "nats_per_token": float(nats.sum()) / max(1, num_tokens),
            "bits_per_byte": float(nats.sum() / math.log(2) / sizes.sum()),
            "bits_per_byte_low": low,
            "bits_per_byte_high": high,
        }
    return summary


def bootstrap_ratio(
    numerators: np.ndarray, denominators: np.ndarray, *, resamples: int, seed: int
) -> tuple[float, float]:
    """Returns the 95% percentile interval of sum(numerators) / sum(denominators) over documents drawn with replacement.
    Efron & Tibshirani 1993, chapter 13. The ratio is of sums, so long documents weigh as they do in the figure.
    """
    low, high = np.quantile(resampled_ratios(numerators, denominators, resamples=resamples, seed=seed), [0.025, 0.975])
    return float(low), float(high)


def resampled_ratios(numerators: np.ndarray, denominators: np.ndarray, *, resamples: int, seed: int) -> np.ndarray:
    """Returns sum(numerators) / sum(denominators) over documents drawn with replacement, once for each resample."""
    rng = np.random.default_rng(seed)
    count = len(numerators)
    ratios = np.empty(resamples)
    for i in range(resamples):
        # Numerators and denominators of a document are drawn together, as the ratio needs both.
        drawn = rng.integers(0, count, count)
        ratios[i] = numerators[drawn].sum() / denominators[drawn].sum()
    return ratios


def _draw(seed: int, document: Document) -> bytes:
    text_hash = hashlib.sha256(document.text.encode("utf-8")).hexdigest()
    return hashlib.sha256(f"{seed}/{document.id}/{text_hash}".encode()).digest()
