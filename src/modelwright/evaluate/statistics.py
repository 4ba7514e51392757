"""Intervals and exact tests for proportions. Pure Python, in log space for small numbers.

Two models on the same records: differences with a paired bootstrap.

Records are drawn with replacement, each with the results of both models, so that the difficulty of a record for both
cancels out (Efron & Tibshirani 1993, chapters 13 and 15; for language models Koehn 2004). The p-value is that of the
percentile interval which just includes no difference: twice the share of the resamples on the smaller side of 0.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from modelwright.core.config import derive_seed
from modelwright.evaluate.scoring import RecordScores, Rows, perplexity, resampled_ratios

Z_95 = 1.959963984540054
"""97.5% quantile of the standard normal distribution."""


def wilson_interval(num_correct: int, num_trials: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927); 95% by default. No trials: (0, 1)."""
    if num_trials == 0:
        return 0.0, 1.0
    share, spread = num_correct / num_trials, z * z / num_trials
    center = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / num_trials + spread / (4 * num_trials)) / (1 + spread)
    return max(0.0, center - half), min(1.0, center + half)


def log10_binomial_tail(num_correct: int, num_trials: int, chance: float) -> float:
    """log10 of the exact one-sided p-value P(X >= num_correct), X ~ Binomial(num_trials, chance); 0 < chance < 1."""
    if num_correct <= 0:
        return 0.0
    terms: list[float] = []
    for k in range(num_correct, num_trials + 1):
        choices = math.lgamma(num_trials + 1) - math.lgamma(k + 1) - math.lgamma(num_trials - k + 1)
        terms.append(choices + k * math.log(chance) + (num_trials - k) * math.log1p(-chance))
    # The largest term is taken out of the sum, which could underflow otherwise.
    highest = max(terms)
    total = highest + math.log(math.fsum(math.exp(term - highest) for term in terms))
    return min(0.0, total) / math.log(10)


def log10_sign_test(num_better: int, num_worse: int) -> float:
    """log10 of the exact two-sided p-value that better and worse are equally likely (McNemar's exact test)."""
    # Two-sided: twice the tail of the larger count, at most 1.
    one_sided = log10_binomial_tail(max(num_better, num_worse), num_better + num_worse, 0.5)
    return min(0.0, one_sided + math.log10(2))


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measure of both models. low, high: 95% interval of `difference`, which is the second minus the first."""

    name: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    num_records: int
    lower_is_better: bool
    won: int
    """Records on which the second model is better."""
    lost: int
    """Records on which the first model is better."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_scores(first: RecordScores, second: RecordScores, *, resamples: int, seed: int) -> list[Measure]:
    """Compares all measures that the records allow. Answers are compared per token where both models cut them into
    equally many tokens, and always per byte. Raises `ValueError` if the two were not scored on the same records.
    """
    measures: list[Measure] = []
    answers = _paired(first.answers, second.answers)
    nats = [np.array([row["nats"] for row in rows]) for rows in answers]
    if answers[0] and all(a["num_tokens"] == b["num_tokens"] for a, b in zip(*answers, strict=True)):
        tokens = np.array([float(row["num_tokens"]) for row in answers[0]])
        measures.append(_ratio("nats per token of answers", nats, tokens, resamples=resamples, seed=seed))
    if answers[0]:
        sizes = np.array([float(row["num_bytes"]) for row in answers[0]])
        bits = [one / math.log(2) for one in nats]
        measures.append(_ratio("bits per byte of answers", bits, sizes, resamples=resamples, seed=seed))
    for name, rows in (
        ("multiple choice", _paired(first.choices, second.choices)),
        ("exact match of numbers", _paired(first.numbers, second.numbers)),
    ):
        if rows[0]:
            correct = [np.array([float(row["correct"]) for row in of_one]) for of_one in rows]
            ones = np.ones(len(rows[0]))
            measures.append(_ratio(name, correct, ones, resamples=resamples, seed=seed, lower_is_better=False))
    return measures


def perplexities(scores: RecordScores) -> float:
    """Perplexity of all answers; nan without any."""
    num_tokens = sum(row["num_tokens"] for row in scores.answers)
    return perplexity(sum(row["nats"] for row in scores.answers) / num_tokens) if num_tokens else math.nan


def _paired(first: Rows, second: Rows) -> tuple[Rows, Rows]:
    if [row["id"] for row in first] != [row["id"] for row in second]:
        raise ValueError("the two models were scored on different records")
    return first, second


def _ratio(
    name: str,
    values: Sequence[np.ndarray],
    weights: np.ndarray,
    *,
    resamples: int,
    seed: int,
    lower_is_better: bool = True,
) -> Measure:
    """Compares two ratios sum(values) / sum(weights)."""
    one, other = values
    drawn = resampled_ratios(other - one, weights, resamples=resamples, seed=derive_seed(seed, "paired", name))
    low, high = np.quantile(drawn, [0.025, 0.975])
    # One is added to both counts, or a finite number of resamples could prove a probability of 0.
    side = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    better = (other < one) if lower_is_better else (other > one)
    worse = (other > one) if lower_is_better else (other < one)
    total = float(weights.sum())
    return Measure(
        name=name,
        first=float(one.sum()) / total,
        second=float(other.sum()) / total,
        difference=float((other - one).sum()) / total,
        low=float(low),
        high=float(high),
        p_value=min(1.0, 2 * (side + 1) / (resamples + 1)),
        num_records=len(one),
        lower_is_better=lower_is_better,
        won=int(better.sum()),
        lost=int(worse.sum()),
    )
