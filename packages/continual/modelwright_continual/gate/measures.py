"""Comparison of two models on a benchmark: differences between their scores of the same records, with one-sided bounds.

Bounds of costs are those of a paired bootstrap, widened by the ratio of Student's t to the normal distribution, because
percentiles of few records are too narrow (Hesterberg 2015, What teachers should know about the bootstrap, section 4).
Bounds of accuracies are score bounds for paired proportions (Tango, Statistics in Medicine 17, 1998), because the
interval of a bootstrap has zero width if no answer has changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm, t

from modelwright.core.config import derive_seed
from modelwright.evaluate.scoring import resampled_ratios

LEAST_TAIL = 20
"""Minimum number of resamples beyond a bound; with fewer, the bound itself would be noise."""
_ABOVE = 1e-9
"""Offset above the estimate at which the search for a score bound begins; without changed answers the estimate itself
is a root."""
Rule = Literal["not worse", "better", "not clearly worse"]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class GateMeasure:
    """A measure on a task. Differences are the candidate's figure minus the champion's: for costs relative to the
    champion's, for accuracies absolute, as a difference of error rates; positive is worse. low, high: one-sided bounds,
    each at the level of the use.
    """

    task: str
    name: str
    rule: Rule
    champion: float
    candidate: float
    difference: float
    low: float
    high: float
    margin: float
    num_records: int

    @property
    def passed(self) -> bool:
        """True if the measure passes its rule. `not worse`: the upper bound is within the margin; `better`: it is below
        zero; `not clearly worse`: the lower bound is not above zero.
        """
        match self.rule:
            case "not worse":
                return self.high <= self.margin
            case "better":
                return self.high < 0.0
            case "not clearly worse":
                return self.low <= 0.0

    def describe(self) -> str:
        verdict = "passed" if self.passed else "REFUSED"
        limit = f", margin {self.margin:+.2%}" if self.rule == "not worse" else ""
        return (
            f"{self.task:<4} {self.name:<24} {self.champion:.4f} -> {self.candidate:.4f} ({self.difference:+.2%}, "
            f"bounds {self.low:+.2%} to {self.high:+.2%}{limit}; {self.num_records:,} records): {self.rule}: {verdict}"
        )


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """Settings of a comparison of two models. level: of each one-sided bound."""

    level: float
    margin: float
    resamples: int
    seed: int

    @property
    def num_resamples(self) -> int:
        return max(self.resamples, int(np.ceil(LEAST_TAIL / self.level)))

    def costs(self, task: str, name: str, rule: Rule, champion: Rows, candidate: Rows) -> GateMeasure:
        """Compares nats, which are shown as bits per byte. Raises `ValueError` for scores of different records."""
        _require_same(champion, candidate)
        before, after = (np.array([float(row["nats"]) for row in rows]) for rows in (champion, candidate))
        num_bits = np.log(2) * sum(int(row["num_bytes"]) for row in champion)
        difference = float((after - before).sum() / before.sum())
        seed = derive_seed(self.seed, "gate", task, name)
        drawn = resampled_ratios(after - before, before, resamples=self.num_resamples, seed=seed)
        bounds = np.quantile(drawn, [self.level, 1.0 - self.level])
        low, high = -np.inf, np.inf  # of a single record, whose differences have no spread
        if len(before) > 1:
            low, high = (difference + widening(len(before), self.level) * (bounds - difference)).tolist()
        return GateMeasure(
            task=task,
            name=name,
            rule=rule,
            champion=float(before.sum() / num_bits),
            candidate=float(after.sum() / num_bits),
            difference=difference,
            low=low,
            high=high,
            margin=self.margin,
            num_records=len(before),
        )

    def accuracy(self, task: str, name: str, rule: Rule, champion: Rows, candidate: Rows) -> GateMeasure:
        """Compares accuracies, as a difference of error rates (positive: the candidate is worse, as for costs). Raises
        `ValueError` for scores of different records.
        """
        _require_same(champion, candidate)
        before, after = (np.array([bool(row["correct"]) for row in rows]) for rows in (champion, candidate))
        lost, won = int((before & ~after).sum()), int((after & ~before).sum())
        return GateMeasure(
            task=task,
            name=name,
            rule=rule,
            champion=float(before.mean()),
            candidate=float(after.mean()),
            difference=(lost - won) / len(before),
            low=-upper_difference(won, lost, len(before), self.level),
            high=upper_difference(lost, won, len(before), self.level),
            margin=self.margin,
            num_records=len(before),
        )


def widening(num_records: int, level: float) -> float:
    """Returns the factor by which a percentile of that many records is too close to the estimate."""
    quantile = float(t.ppf(1.0 - level, num_records - 1) / norm.ppf(1.0 - level))
    # The second factor corrects the bootstrap's variance, which divides by n instead of n - 1.
    return quantile * float(np.sqrt(num_records / (num_records - 1)))


def upper_difference(lost: int, won: int, total: int, level: float) -> float:
    """Returns the upper bound at `level` of the difference d between the probabilities of a lost and of a won answer:
    the d at which Tango's score statistic is the normal quantile.
    """
    quantile = float(norm.ppf(1.0 - level))

    def excess(d: float) -> float:
        linear = (2 * total - lost + won) * d - lost - won
        root = np.sqrt(max(0.0, linear**2 + 8 * total * won * d * (1 - d)))
        # Maximum likelihood estimate of the probability of a won answer under the constraint d (Tango 1998).
        won_given_d = (root - linear) / (4 * total)
        variance = total * (2 * won_given_d + d * (1 - d))
        return float(lost - won - total * d + quantile * np.sqrt(max(0.0, variance)))

    # The search below would begin above 1.
    if lost == total:
        return 1.0
    return float(brentq(excess, (lost - won) / total + _ABOVE, 1.0))  # pyright: ignore[reportArgumentType]


def _require_same(first: Rows, second: Rows) -> None:
    if [row["id"] for row in first] != [row["id"] for row in second]:
        raise ValueError("the two models were scored on different records")
