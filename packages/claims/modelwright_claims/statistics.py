"""Comparisons of few paired runs: the mean, its one-sided confidence bounds, and how surprising a difference is.

Every margin of a target is judged by these bounds (`judging.Judgment`), not by the mean.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy.stats import beta, t

from modelwright_claims.claim import Figure

CONFIDENCE = 0.95
"""Confidence of a one-sided bound."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The differences `method - baseline` of paired runs and the two-sided p-value of Student's paired t test."""

    mean: float
    std: float
    p_value: float
    count: int


def paired_t_test(method: Sequence[float], baseline: Sequence[float]) -> Paired:
    """Compare runs paired by seed. Needs two pairs at least; raises `ValueError` otherwise.

    Equal differences throughout give p = 0 when they are not zero and p = 1 when they are.
    """
    differences = [a - b for a, b in zip(method, baseline, strict=True)]
    if len(differences) < 2:
        raise ValueError(f"a paired test needs two pairs at least, got {len(differences)}")
    mean, std = statistics.fmean(differences), statistics.stdev(differences)
    if std == 0:
        p_value = 0.0 if mean else 1.0
    else:
        p_value = float(2 * t.sf(abs(mean) / (std / math.sqrt(len(differences))), len(differences) - 1))
    return Paired(mean=mean, std=std, p_value=p_value, count=len(differences))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The mean of repeats and its bounds."""

    mean: float
    spread: float
    """Standard deviation of the repeats; 0 for one."""
    count: int
    lower: float
    """One-sided lower confidence bound of the mean; minus infinity when there are too few repeats for one."""
    upper: float
    exact: bool = False
    """True for a deterministic count, whose bounds are the figure itself."""

    def figure(self, unit: str) -> Figure:
        """Return the figure with its bounds."""
        bounded = self.count > 1 and not self.exact and math.isfinite(self.lower) and math.isfinite(self.upper)
        lower, upper = (self.lower, self.upper) if bounded else (None, None)
        return Figure(
            value=self.mean, unit=unit, spread=self.spread, lower=lower, upper=upper, exact=self.exact or None
        )


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean of repeats with its one-sided bounds by Student's t.

    A repeat that is not finite (a run that diverged) leaves no bound.
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        return Estimate(mean=mean, spread=0.0, count=count, lower=-math.inf, upper=math.inf)
    std = statistics.stdev(values)
    margin = float(t.ppf(confidence, count - 1)) * std / math.sqrt(count)
    return Estimate(mean=mean, spread=std, count=count, lower=mean - margin, upper=mean + margin)


def exact(value: float) -> Estimate:
    """Return the estimate of a deterministic count, such as bytes or FLOPs: it needs no repeats."""
    return Estimate(mean=value, spread=0.0, count=1, lower=value, upper=value, exact=True)


Compare = Callable[[Sequence[float], Sequence[float]], Estimate]
"""The comparison of a method with its baseline, from paired repeats."""


def differences(method: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Estimate `method - baseline` from paired repeats."""
    return estimate([one - other for one, other in zip(method, baseline, strict=True)])


def ratios(method: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Estimate `method / baseline` from paired repeats."""
    return estimate([one / other for one, other in zip(method, baseline, strict=True)])


def percent_above(method: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Estimate by how many percent `method` is above `baseline`, from paired repeats."""
    return estimate([100 * (one / other - 1) for one, other in zip(method, baseline, strict=True)])


def percent_saved(method: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Estimate by how many percent `method` is below `baseline`, from paired repeats."""
    return estimate([100 * (1 - one / other) for one, other in zip(method, baseline, strict=True)])


def share(outcomes: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Estimate the percentage of outcomes that are 1, the others being 0: the observed one with exact one-sided bounds
    (Clopper and Pearson 1934).
    """
    count, hits = len(outcomes), int(sum(outcomes))
    lower = float(beta.ppf(1 - confidence, hits, count - hits + 1)) if hits else 0.0
    upper = float(beta.ppf(confidence, hits + 1, count - hits)) if hits < count else 1.0
    return Estimate(mean=100 * hits / count, spread=0.0, count=count, lower=100 * lower, upper=100 * upper)
