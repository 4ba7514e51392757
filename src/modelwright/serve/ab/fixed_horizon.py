"""Welch's t-test of means and of proportions, for a number of observations that was fixed beforehand; the p-values are
those of GrowthBook's gbstats. `sequential` has the intervals that hold however often one looks.
"""

import math
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit


@dataclass(frozen=True)
class FixedHorizonResult:
    """B minus A: the estimate, its 95% interval, and the two-sided p-value of no difference."""

    difference: float
    low: float
    high: float
    p_value: float


@dataclass
class Moments:
    """Number, sum and sum of squares of observations."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def variance(self) -> float:
        """Unbiased; NaN for fewer than two observations."""
        if self.count < 2:
            return math.nan
        return max(0.0, self.squares - self.total * self.total / self.count) / (self.count - 1)


def welch(control: Moments, treatment: Moments, *, level: float = 0.95) -> FixedHorizonResult | None:
    """Welch's t-test (Welch 1947); None without two observations in each arm or without any variance."""
    if min(control.count, treatment.count) < 2:
        return None
    parts = (_Part(arm.mean, arm.variance, arm.count) for arm in (control, treatment))
    return _t_test(*parts, level=level)


def two_proportions(
    control: tuple[int, int], treatment: tuple[int, int], *, level: float = 0.95
) -> FixedHorizonResult | None:
    """Welch's t-test of the shares of observations with an event, with the variance p (1 - p) in each arm. An arm is
    (events, observations). None without two observations in each arm, or if in both of them all or none are events.
    """
    if min(control[1], treatment[1]) < 2:
        return None
    parts = (_Part(k / n, k / n * (1 - k / n), n) for k, n in (control, treatment))
    return _t_test(*parts, level=level)


@dataclass(frozen=True)
class _Part:
    """An arm: the mean and variance of its observations, and their number."""

    mean: float
    variance: float
    count: int

    @property
    def squared_error(self) -> float:
        """The squared standard error of the mean."""
        return self.variance / self.count


def _t_test(control: _Part, treatment: _Part, *, level: float) -> FixedHorizonResult | None:
    """Compare two means; the degrees of freedom are Satterthwaite's. None without any variance."""
    variance = control.squared_error + treatment.squared_error
    if not variance > 0:
        return None
    degrees = variance**2 / sum(arm.squared_error**2 / (arm.count - 1) for arm in (control, treatment))
    difference, error = treatment.mean - control.mean, math.sqrt(variance)
    half = float(stdtrit(degrees, (1 + level) / 2)) * error
    p_value = 2 * float(stdtr(degrees, -abs(difference) / error))
    return FixedHorizonResult(difference, difference - half, difference + half, p_value)
