"""Multiple choice by likelihood: the model picks the candidate that it finds most likely after the question.

The question is put as a user's turn in the chat format of fine-tuning; each candidate is scored as the assistant's
answer. Longer answers are less likely, so the log-likelihood is divided by a length (Brown et al. 2020, section 2.4):

- `byte` (default): by UTF-8 bytes. The length of a text is its own; it is the unit of the bits-per-byte table, and
  models with different tokenizers can be compared.
- `token`: by tokens. An artifact of the tokenizer: a rare word cut into many pieces gains, as its last pieces are
  nearly free.
- `pmi`: the question's help, per byte: the log-likelihood less that of the same candidate after a question
  that names nothing (Holtzman et al. 2021). Cancels the candidate's unconditional likelihood.

The config fixes before the run which one ranks. The model's choice without the question is reported as well: the
candidate that it finds most likely per byte after a question that names nothing.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelwright.core.progress import Progress
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate.config import EvaluateConfig
from modelwright.evaluate.questions import CHANCE, NUM_CANDIDATES, Question, word_parts, words_of
from modelwright.evaluate.scoring import Scored, sequence_nats
from modelwright.evaluate.statistics import log10_binomial_tail, wilson_interval
from modelwright.model.decoder import Decoder

NEUTRAL_QUESTION, NEUTRAL_LEAD = "What does it do?", "`it`:"
"""Replacements for the question, and for the words that candidates begin with, to score the likelihood without a
question."""

WITHOUT_QUESTION = "without_question"
"""Key, among the choices of a record, of the model's choice without the question."""


def answer_questions(
    model: Decoder, tokenizer: Tokenizer, questions: Sequence[Question], config: EvaluateConfig, *, progress: Progress
) -> list[dict[str, Any]]:
    """Scores questions; returns one plain record for each: the question itself, each candidate's nats, tokens, bytes
    and scores, `correct`. `scores` holds the candidates' values by score name (higher is better), `choices` the index
    chosen by each, `choice` and `correct` those of the configured score. `WITHOUT_QUESTION` is among the scores.
    """
    rule = config.multiple_choice.score
    encoded = [
        tokenizer.encode(f" {text}" if question.lead else text)  # a candidate follows the lead after a blank
        for question in questions
        for text in question.candidates
    ]
    shape = (len(questions), NUM_CANDIDATES)
    num_tokens = np.array([len(ids) for ids in encoded]).reshape(shape)
    num_bytes = np.array([len(t.encode("utf-8")) for q in questions for t in q.candidates]).reshape(shape)
    prompts = [(question.question, question.lead) for question in questions]
    neutral_prompts = [(NEUTRAL_QUESTION, NEUTRAL_LEAD if question.lead else "") for question in questions]
    nats = _candidate_nats(model, tokenizer, encoded, prompts, config, progress)
    # The same candidates after a question that names nothing: their likelihood without the question.
    neutral = _candidate_nats(model, tokenizer, encoded, neutral_prompts, config, progress)
    scores = {
        "byte": -nats / num_bytes,
        "token": -nats / np.maximum(1, num_tokens),
        "pmi": (neutral - nats) / num_bytes,
        WITHOUT_QUESTION: -neutral / num_bytes,
    }
    records: list[dict[str, Any]] = []
    for i, question in enumerate(questions):
        choices = {name: int(values[i].argmax()) for name, values in scores.items()}
        records.append(
            {
                **dataclasses.asdict(question),
                "candidates": list(question.candidates),
                "distractor_ids": list(question.distractor_ids),
                "nats": nats[i].tolist(),
                "tokens": num_tokens[i].tolist(),
                "bytes": num_bytes[i].tolist(),
                "scores": {name: values[i].tolist() for name, values in scores.items()},
                "choices": choices,
                "choice": choices[rule],
                "correct": choices[rule] == question.answer,
            }
        )
    return records


def summarize_answers(records: Sequence[Mapping[str, Any]], *, score: str) -> dict[str, Any]:
    """Accuracy with its 95% Wilson interval, the exact one-sided p-value against chance, and the accuracy of cues
    alone. `by_score`: accuracy under each score, `without_question` among them. `cues`: accuracy of choosing the
    longest, the shortest, or the candidate that shares most words, or parts of words, with the question; ties share the
    credit.
    """
    total = len(records)
    correct = sum(bool(record["correct"]) for record in records)
    low, high = wilson_interval(correct, total)
    log10_p = log10_binomial_tail(correct, total, CHANCE)
    names = records[0]["choices"] if records else []
    credits = {"longest": 0.0, "shortest": 0.0, "shared_words": 0.0, "shared_parts_of_words": 0.0}
    for record in records:
        asked = words_of(record["question"])
        texts = [words_of(text) for text in record["candidates"]]
        shared = [len(set(asked) & set(words)) for words in texts]
        shared_parts = [len(word_parts(asked) & word_parts(words)) for words in texts]
        credits["longest"] += _credit(record["bytes"], record["answer"])
        credits["shortest"] += _credit([-size for size in record["bytes"]], record["answer"])
        credits["shared_words"] += _credit(shared, record["answer"])
        credits["shared_parts_of_words"] += _credit(shared_parts, record["answer"])
    return {
        "questions": total,
        "correct": correct,
        "accuracy": correct / max(1, total),
        "accuracy_low": low,
        "accuracy_high": high,
        "chance": CHANCE,
        "p_value": 10.0**log10_p,
        "log10_p_value": log10_p,
        "score": score,
        "by_score": {name: sum(r["choices"][name] == r["answer"] for r in records) / total for name in names},
        "cues": {name: credit / max(1, total) for name, credit in credits.items()},
        "tiers": dict(Counter(record["tier"] for record in records)),
    }


def best_rival(summary: Mapping[str, Any]) -> tuple[str, float]:
    """Name and accuracy of the strongest rival in a result of `summarize_answers`: chance, a cue, or the model without
    the question.
    """
    rivals = {"chance": summary["chance"]}
    rivals |= {name.replace("_", " "): accuracy for name, accuracy in summary["cues"].items()}
    if WITHOUT_QUESTION in summary["by_score"]:
        rivals["the model without the question"] = summary["by_score"][WITHOUT_QUESTION]
    return max(rivals.items(), key=lambda rival: rival[1])


def _candidate_nats(
    model: Decoder,
    tokenizer: Tokenizer,
    encoded: Sequence[Sequence[int]],
    prompts: Sequence[tuple[str, str]],
    config: EvaluateConfig,
    progress: Progress,
) -> np.ndarray:
    """Scores all candidates after their prompts, each a question and the lead of its answer; nats [questions,
    candidates].
    """
    sequences = []
    for i, (question, lead) in enumerate(prompts):
        prompt = [*tokenizer.encode_prompt([{"role": "user", "content": question}]), *tokenizer.encode(lead)]
        for ids in encoded[i * NUM_CANDIDATES : (i + 1) * NUM_CANDIDATES]:
            sequences.append(Scored([*prompt, *ids], len(prompt)))
    nats = sequence_nats(
        model,
        sequences,
        context_overlap=config.context_overlap,
        max_context=config.max_context,
        batch_tokens=config.batch_tokens,
        progress=progress,
        name="multiple choice",
    )
    return nats.reshape(len(prompts), NUM_CANDIDATES)


def _credit(values: Sequence[float], answer: int) -> float:
    best = max(values)
    return (values[answer] == best) / sum(value == best for value in values)
