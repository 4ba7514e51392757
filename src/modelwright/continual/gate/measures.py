"""Two models on a benchmark: relative differences with one-sided bounds of a paired bootstrap over records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from modelwright.core.seeds import derive_seed
from modelwright.evaluate.bits_per_byte import resampled_ratios

LEAST_TAIL = 20
"""Resamples beyond a bound, or the bound itself would be noise."""
Rule = Literal["not worse", "better", "not clearly worse"]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class GateMeasure:
    """One measure of one task. Differences are the candidate's figure minus the champion's: of costs relative to the
    champion's, of accuracies absolute; positive is worse. low, high: one-sided bounds, each at the level of the use.
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
        """`not worse`: the upper bound lies within the margin; `better`: it is below zero; `not clearly worse`: the
        lower bound is not above zero.
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
    """How two models are compared. level: of each one-sided bound."""

    level: float
    margin: float
    resamples: int
    seed: int

    @property
    def num_resamples(self) -> int:
        return max(self.resamples, int(np.ceil(LEAST_TAIL / self.level)))

    def costs(self, task: str, name: str, rule: Rule, champion: Rows, candidate: Rows) -> GateMeasure:
        """Of nats, shown as bits per byte. Raises `ValueError` for scores of different records."""
        _require_same(champion, candidate)
        before, after = (np.array([float(row["nats"]) for row in rows]) for rows in (champion, candidate))
        num_bits = np.log(2) * sum(int(row["num_bytes"]) for row in champion)
        shown = (float(before.sum() / num_bits), float(after.sum() / num_bits))
        return self._measure(task, name, rule, after - before, before, shown)

    def accuracy(self, task: str, name: str, rule: Rule, champion: Rows, candidate: Rows) -> GateMeasure:
        """Of right answers; the difference is in wrong ones, so that positive is worse, as with costs."""
        _require_same(champion, candidate)
        before, after = (np.array([float(row["correct"]) for row in rows]) for rows in (champion, candidate))
        shown = (float(before.mean()), float(after.mean()))
        return self._measure(task, name, rule, before - after, np.ones(len(before)), shown)

    def _measure(
        self,
        task: str,
        name: str,
        rule: Rule,
        differences: NDArray[np.float64],
        weights: NDArray[np.float64],
        shown: tuple[float, float],
    ) -> GateMeasure:
        seed = derive_seed(self.seed, "gate", task, name)
        drawn = resampled_ratios(differences, weights, resamples=self.num_resamples, seed=seed)
        low, high = np.quantile(drawn, [self.level, 1.0 - self.level])
        return GateMeasure(
            task=task,
            name=name,
            rule=rule,
            champion=shown[0],
            candidate=shown[1],
            difference=float(differences.sum() / weights.sum()),
            low=float(low),
            high=float(high),
            margin=self.margin,
            num_records=len(differences),
        )


def _require_same(first: Rows, second: Rows) -> None:
    if [row["id"] for row in first] != [row["id"] for row in second]:
        raise ValueError("the two models were scored on different records")
