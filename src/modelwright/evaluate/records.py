"""Scores of single records for one model: reference answers, choices by likelihood, generated numbers, and costs in
nats of answers and texts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from modelwright.core.config import DataError
from modelwright.core.progress import Progress
from modelwright.data.document import Document
from modelwright.data.rows.examples import template_variables
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.config import EvaluateConfig
from modelwright.evaluate.scoring import Scored, answer_text, score_answers, score_documents, sequence_nats
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.decoder import Decoder
from modelwright.reward.numeric_match import MARKER, equal, final_number

Rows = list[dict[str, Any]]
"""Plain results, one for each record, with its `id`."""


@dataclass(frozen=True, kw_only=True)
class RecordScores:
    """Scores of some records for one model; the lists of two models on the same records have the same ids."""

    answers: Rows
    """`num_tokens`, `num_bytes` and `nats` of the reference answers."""
    choices: Rows
    """`choice`, `right` and `correct` of records with choices."""
    numbers: Rows
    """`answer`, as generated, and `correct` of records whose reference answer ends with a number, as in GSM8K."""


def score_records(
    model: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    config: EvaluateConfig,
    *,
    max_new_tokens: int,
    progress: Progress,
) -> RecordScores:
    """Score question/answer documents. Raises `DataError` with the id of a record that the chat template refuses."""
    return RecordScores(
        answers=score_answers(model, tokenizer, documents, config, progress=progress),
        choices=score_choices(model, tokenizer, documents, config, progress=progress),
        numbers=generate_numbers(model, tokenizer, documents, max_new_tokens=max_new_tokens, progress=progress),
    )


def score_choices(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluateConfig, *, progress: Progress
) -> Rows:
    """Chooses the likeliest choice per byte of each record with choices, as the assistant's answer
    (see `multiple_choice`).
    """
    asked = [document for document in documents if document.meta.get("choices")]
    sequences: list[Scored] = []
    for document in asked:
        prompt = _prompt(tokenizer, document)
        sequences += [Scored([*prompt, *tokenizer.encode(text)], len(prompt)) for text in document.meta["choices"]]
    nats = sequence_nats(
        model,
        sequences,
        context_overlap=config.context_overlap,
        max_context=config.max_context,
        batch_tokens=config.batch_tokens,
        progress=progress,
        name="choices",
    )
    rows, at = [], 0
    for document in asked:
        sizes = np.array([len(text.encode("utf-8")) for text in document.meta["choices"]])
        choice = int((nats[at : at + len(sizes)] / sizes).argmin())
        at += len(sizes)
        right = int(document.meta["right"])
        rows.append({"id": document.id, "choice": choice, "right": right, "correct": choice == right})
    return rows


def generate_numbers(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], *, max_new_tokens: int, progress: Progress
) -> Rows:
    """Generates greedy answers to the records whose reference answer has a number after `####`, and compares theirs. An
    answer's number is that in its last box, after its last `####`, or its last one. Prompts that leave no room for an
    answer in the model's context count as wrong.
    """
    answers = [(document, answer_text(document)) for document in documents]
    asked = [(d, number) for d, text in answers if MARKER in text and (number := final_number(text, "marker"))]
    prompts = [_prompt(tokenizer, document) for document, _ in asked]
    room = [model.config.max_seq_len - len(prompt) for prompt in prompts]
    params = [
        SamplingParams(temperature=0.0, max_tokens=min(max_new_tokens, most), stop_ids=tokenizer.stop_ids)
        for most in room
        if most > 0
    ]
    progress.begin("exact match", len(params), "answers")
    fitting = [prompt for prompt, most in zip(prompts, room, strict=True) if most > 0]
    completions = iter(generate(model, fitting, params, on_step=progress.advance) if fitting else ())
    progress.end()
    rows = []
    for (document, reference), most in zip(asked, room, strict=True):
        text = tokenizer.decode(next(completions).token_ids) if most > 0 else ""
        number = final_number(text, "any")
        correct = number is not None and equal(number, reference, 0.0)
        rows.append({"id": document.id, "answer": text, "correct": correct})
    return rows


def _prompt(tokenizer: Tokenizer, document: Document) -> list[int]:
    """Encodes the conversation before the last answer. Raises `DataError` with the record's id."""
    last = max(place for place, turn in enumerate(document.messages) if turn["role"] == "assistant")
    try:
        return tokenizer.chat.encode_prompt(
            document.messages[:last], tools=document.tools, variables=template_variables(document)
        )
    except DataError as error:
        raise DataError(f"{document.id}: {error}") from None


ANSWERS, TEXT = "answers", "text"


def record_costs(
    model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluateConfig, *, progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    """Scores documents; returns plain rows with `id`, `num_tokens`, `num_bytes` and `nats` in their order, by key:
    `answers` of conversations, `text` of other documents; a key without documents is left out.
    """
    spoken = [document for document in documents if document.kind == "qa" and document.has_answer]
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
