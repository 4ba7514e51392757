"""Shared parts of the cost estimates of stages: the amount of text, and the cost of scoring and of moving it."""

from dataclasses import replace

from modelwright.data.sources.corpora import BUILTIN, without_corpora
from modelwright.data.sources.find_files import locate
from modelwright.data.sources.sources import SourceConfig
from modelwright.evaluate.multiple_choice import NUM_CANDIDATES
from modelwright.evaluate.scoring import EvaluateConfig
from modelwright.pipeline.estimate.cost import StageEstimate, data_stage, scoring_stage
from modelwright.pipeline.stage import Rates, RowSet, RunConfig
from modelwright.pipeline.stages.rows import CHAT_ROWS, TEXT_ROWS

BYTES_PER_TOKEN = 3.7
CHOICE_TOKENS = 110
"""Tokens of one candidate with its question and, counted again, without it."""
IMPORT_S = 5.0
"""Assumed seconds of a stage that copies the result of another run (`rows_from`); the network is unknown."""
SCORED_FRACTION = 0.05
"""Share of the built-in text that is held out."""


def text_bytes(data: SourceConfig, rows: RowSet) -> float:
    """Returns bytes of text for a set of rows. A user's files count in full, because their content is not known yet."""
    return _builtin_bytes(data, rows) + _own_bytes(data)


def moving_estimate(name: str, config: RunConfig, *, bytes_per_s: float) -> StageEstimate:
    """Estimates a stage that reads all text once, or, with `rows_from`, copies its result from another run.

    bytes_per_s: rate assumed on one core.
    """
    if config.rows_from:
        return fixed_estimate(name, seconds=IMPORT_S)
    builtin = sum(_builtin_bytes(config.data, rows) for rows in (TEXT_ROWS, CHAT_ROWS))
    return data_stage(name, num_bytes=builtin + _own_bytes(config.data), bytes_per_s=bytes_per_s)


def fixed_estimate(name: str, *, seconds: float, library_bytes: int = 0) -> StageEstimate:
    """Estimates a stage whose cost depends on no setting. library_bytes: memory of libraries that it loads, which stay
    in the process.
    """
    estimate = data_stage(name, num_bytes=0, bytes_per_s=1.0)
    return replace(estimate, seconds=seconds, peak_bytes=estimate.peak_bytes + library_bytes)


def scoring_estimate(
    name: str, config: RunConfig, evaluate: EvaluateConfig, rates: Rates, *, num_models: int, library_bytes: int
) -> StageEstimate:
    """Estimates a stage that scores the held-out text, answers and questions with some models."""
    builtin = sum(_builtin_bytes(config.data, rows) for rows in (TEXT_ROWS, CHAT_ROWS))
    heldout = SCORED_FRACTION * builtin + config.data.validation_fraction * _own_bytes(config.data)
    # The answers are one more domain, with the same limit.
    most = evaluate.max_bytes_per_domain * (len(evaluate.domains) + 1)
    num_bytes = min(most, heldout) if most else heldout
    text_tokens = num_bytes / BYTES_PER_TOKEN
    choice_tokens = NUM_CANDIDATES * CHOICE_TOKENS * evaluate.multiple_choice.num_questions
    # an upper bound, as if all texts were longer than the context
    context_tokens = text_tokens * evaluate.context_overlap / (1.0 - evaluate.context_overlap)
    estimate = scoring_stage(
        name,
        config.model,
        num_tokens=num_models * (text_tokens + choice_tokens),
        num_context_tokens=num_models * context_tokens,
        batch_tokens=evaluate.batch_tokens,
        flops_per_s=rates.flops_per_s["fp32"],
    )
    return replace(estimate, peak_bytes=estimate.peak_bytes + library_bytes)


def _builtin_bytes(data: SourceConfig, rows: RowSet) -> float:
    return rows.stdlib_bytes * data.stdlib_fraction * (BUILTIN in data.sources)


def _own_bytes(data: SourceConfig) -> float:
    # Sizes alone: the files may be on a store, and an estimate must not download them
    named = without_corpora(data.sources)
    return sum(file.filesystem.info(file.path).get("size") or 0 for file in locate(named, lambda reason, where: None))
