"""Tests for a number of observations that was fixed beforehand, for those who wait for it: Welch's t-test and the
two-proportion z-test. Who looks earlier and stops at what pleases reads `sequential` instead.
"""

import math
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit


@dataclass(frozen=True)
class Comparison:
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


def welch(control: Moments, treatment: Moments, *, level: float = 0.95) -> Comparison | None:
    """Welch's t-test with Satterthwaite's degrees of freedom (Welch 1947); None without two observations in each arm or
    without any variance.
    """
    if control.count < 2 or treatment.count < 2:
        return None
    parts = [arm.variance / arm.count for arm in (control, treatment)]
    variance = sum(parts)
    if not variance > 0:
        return None
    counts = (control.count, treatment.count)
    degrees = variance**2 / sum(part**2 / (n - 1) for part, n in zip(parts, counts, strict=True))
    difference, error = treatment.mean - control.mean, math.sqrt(variance)
    half = float(stdtrit(degrees, (1 + level) / 2)) * error
    p_value = 2 * float(stdtr(degrees, -abs(difference) / error))
    return Comparison(difference, difference - half, difference + half, p_value)


def two_proportions(control: tuple[int, int], treatment: tuple[int, int]) -> Comparison | None:
    """The z-test of two proportions, with the pooled variance for the p-value and each arm's own for the interval. An
    arm is (events, observations). None without observations in both arms, or if all of them or none are events.
    """
    (k_a, n_a), (k_b, n_b) = control, treatment
    if not n_a or not n_b or not 0 < k_a + k_b < n_a + n_b:
        return None
    p_a, p_b, pooled = k_a / n_a, k_b / n_b, (k_a + k_b) / (n_a + n_b)
    error = math.sqrt(pooled * (1 - pooled) * (1 / n_a + 1 / n_b))
    half = _Z_95 * math.sqrt(p_a * (1 - p_a) / n_a + p_b * (1 - p_b) / n_b)
    p_value = math.erfc(abs(p_b - p_a) / error / math.sqrt(2))
    return Comparison(p_b - p_a, p_b - p_a - half, p_b - p_a + half, p_value)


_Z_95 = 1.959963984540054
