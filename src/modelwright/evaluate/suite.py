"""The whole evaluation of one model as plain JSON, and of two models against each other.

Works for FP32 and INT8 models alike. Expects held-out documents only; selecting them is up to the caller.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.core.artifacts import write_atomic
from modelwright.core.progress import Progress
from modelwright.core.records import read_records
from modelwright.core.seeds import derive_seed
from modelwright.data.document import Document
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.tokenizer.tokenizer import Tokenizer
from modelwright.evaluate import scoring
from modelwright.evaluate.baselines import bigram_table, compressor_table
from modelwright.evaluate.config import EvaluateConfig
from modelwright.evaluate.multiple_choice import answer_questions, build_questions, summarize_answers
from modelwright.evaluate.statistics import log10_sign_test
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
    wanted = [document for document in documents if document.kind == "qa" and not document.is_undesirable]
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
