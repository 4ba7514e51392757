"""Scores a model's likelihood of the reference answers of held-out conversations: perplexity per token, bits per byte.

An answer is what fine-tuning learns of a conversation with the model's own chat template: everything that the assistant
says, each answer with the token that ends it. Bytes are those of the record's own text, so that models with different
tokenizers can be compared by them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelwright.core.errors import DataError
from modelwright.core.progress import Progress
from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document, join_turns
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.bits_per_byte import bootstrap_ratio
from modelwright.evaluate.config import EvaluateConfig
from modelwright.evaluate.scoring import Scored, sequence_nats
from modelwright.model.decoder import Decoder


def score_answers(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluateConfig, *, progress: Progress
) -> list[dict[str, Any]]:
    """Scores conversations; returns one plain record for each: `id`, `num_tokens` and `nats` of its answers,
    `num_bytes` of their text. Raises `DataError` with the conversation's id if the chat template refuses it.
    """
    texts: list[list[Scored]] = []
    for document in documents:
        try:
            chats = tokenizer.encode_training_chats(document.messages, tools=document.tools)
        except DataError as error:
            raise DataError(f"{document.id}: {error}") from None
        # A chat ends with its last learned token: what follows would only cost time.
        texts.append(
            [
                Scored(ids[:end].tolist(), max(1, int(learned[0])), mask[:end])
                for ids, mask in chats
                if len(learned := np.flatnonzero(mask)) and (end := int(learned[-1]) + 1) > 1
            ]
        )
    owners = [number for number, scored in enumerate(texts) for _ in scored]
    nats = sequence_nats(
        model,
        [scored for of_one in texts for scored in of_one],
        context_overlap=config.context_overlap,
        max_context=config.max_context,
        batch_tokens=config.batch_tokens,
        progress=progress,
        name="answers",
    )
    totals = np.bincount(owners, weights=nats, minlength=len(documents))
    return [
        {
            "id": document.id,
            "num_tokens": sum(int(scored.mask.sum()) for scored in of_one if scored.mask is not None),
            "num_bytes": len(answer_text(document).encode("utf-8")),
            "nats": float(total),
        }
        for document, of_one, total in zip(documents, texts, totals, strict=True)
    ]


def answer_text(document: Document) -> str:
    """Text of the assistant's turns in a conversation; of a preference pair, the chosen answer alone."""
    return join_turns([turn for turn in document.messages if turn["role"] == "assistant"])


def summarize_answer_scores(records: Sequence[Mapping[str, Any]], *, resamples: int, seed: int) -> dict[str, Any]:
    """Conversations, tokens, nats per token, perplexity and bits per byte with their 95% bootstrap intervals; {}
    without conversations.
    """
    if not records:
        return {}
    nats, tokens, sizes = (np.array([float(r[name]) for r in records]) for name in ("nats", "num_tokens", "num_bytes"))
    seed = derive_seed(seed, "bootstrap", "answers")
    low, high = bootstrap_ratio(nats, tokens, resamples=resamples, seed=seed)
    bits_low, bits_high = bootstrap_ratio(nats / math.log(2), sizes, resamples=resamples, seed=seed)
    per_token = float(nats.sum() / tokens.sum())
    return {
        "conversations": len(records),
        "tokens": int(tokens.sum()),
        "bytes": int(sizes.sum()),
        "nats_per_token": per_token,
        "perplexity": perplexity(per_token),
        "perplexity_low": perplexity(low),
        "perplexity_high": perplexity(high),
        "bits_per_byte": float(nats.sum() / math.log(2) / sizes.sum()),
        "bits_per_byte_low": bits_low,
        "bits_per_byte_high": bits_high,
    }


def perplexity(nats_per_token: float) -> float:
    """exp of the loss in nats; the largest float for a loss beyond it."""
    return math.exp(min(nats_per_token, 700.0))
