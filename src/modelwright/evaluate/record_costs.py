"""Costs of single records in nats for a model: the answers of conversations, and the whole text of other documents."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from modelwright.core.progress import Progress
from modelwright.data.document import Document
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.answers import score_answers
from modelwright.evaluate.bits_per_byte import score_documents
from modelwright.evaluate.config import EvaluateConfig
from modelwright.model.decoder import Decoder

ANSWERS, TEXT = "answers", "text"


def record_costs(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluateConfig, *, progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    """Scores documents; returns plain rows with `id`, `num_tokens`, `num_bytes` and `nats` in their order, by key:
    `answers` of conversations, `text` of other documents; a key without documents is left out.
    """
    spoken = [document for document in documents if document.kind == "qa"]
    written = [document for document in documents if document.kind != "qa"]
    rows = {
        ANSWERS: score_answers(model, tokenizer, spoken, config, progress=progress) if spoken else [],
        TEXT: text_costs(model, tokenizer, written, config, progress=progress) if written else [],
    }
    return {name: found for name, found in rows.items() if found}


def text_costs(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluateConfig, *, progress: Progress
) -> list[dict[str, Any]]:
    """Scores the whole text of each document, a conversation's included."""
    return [asdict(score) for score in score_documents(model, tokenizer, documents, config, progress=progress)]
