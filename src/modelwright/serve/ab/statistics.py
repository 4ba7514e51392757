"""Statistics of A/B tests, as pure functions of counts and sums: e-processes and confidence sequences, which hold at
every moment, however often somebody looks and whenever they stop; and Welch's t-test of means and of proportions for a
number of observations that was fixed beforehand, whose p-values are those of GrowthBook's gbstats.

**Rare events** (a first error, a first slow answer, a first request). Each unit counts once for a kind of event. A
unit's arm is drawn by the hash with the probability `share` for B, independent of all that others do; without an effect
of the arm on the event, so is the arm of a unit that has just had one. That makes the likelihood ratios below exact,
whatever the traffic does: rates that change over the day, heavy users, an outage of both arms. If events are `ratio`
times as frequent in B, a unit with an event is in B with the probability ratio * share / (ratio * share + 1 - share).
The alternative is a continuous mixture: half Jeffreys' prior of this probability, half a Beta distribution around the
share (Lindon and Malek 2022, Anytime-valid inference for multinomial count data): an e-process, so by Ville's
inequality it exceeds 1 / alpha with probability alpha at most, ever. Because the prior is positive at every ratio, any
difference is found with enough units, and the intervals narrow without end; a finite grid of ratios finds no difference
that is closer to 1 than to its nearest point.

**A limit of an error rate**. Each request is an error with some probability given all before it; while that is at most
the limit, the same mixture over higher rates, in the place of a share, is an e-process.

**Means**. The asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (2024, Annals of
Statistics, Time-uniform central limit theory), for a difference as GrowthBook applies it.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincc, betaln, stdtr, stdtrit


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


PRIOR_SPREAD = 0.04
"""Standard deviation of the log odds ratio in the narrow prior, which finds a loss of 5% within 50,000 units."""
JEFFREYS = (0.5, 0.5)
"""Parameters of the wide prior; it finds a lost arm within 20 units."""

BURN_IN = 50
"""Units in each arm before the interval of a mean is shown: it is exact only in the limit."""

TUNED_FOR = 2000
"""Units at which the intervals of means are tightest."""

MOST_PROMISED = 5000
_BISECTIONS = 60


@dataclass(frozen=True)
class Epoch:
    """While B had one share of units: how many had the event, and how many of these were in B. May hold arrays."""

    share: float
    count: Any
    in_treatment: Any


Epochs = Sequence[Epoch]


def log_likelihood(epochs: Iterable[Epoch], ratio: float) -> Any:
    """The log-likelihood of the arms of units with an event, for a rate ratio of B to A. It has the shape of the
    counts.
    """
    odds = [(epoch, ratio * epoch.share / (1 - epoch.share)) for epoch in epochs]
    return sum((epoch.in_treatment * math.log(one) - epoch.count * math.log1p(one) for epoch, one in odds), 0.0)


def log_e_value(
    epochs: Iterable[Epoch], *, one_sided: bool = False, wide: tuple[float, float] = JEFFREYS
) -> NDArray[np.float64]:
    """The logarithm of the e-value against equal rates; one-sided, against a rate in B that is at most that in A.
    wide: the parameters of the wide Beta prior.

    Epochs of one share are added up, so that late requests from before a change of the share begin no new mixture.
    """
    totals: dict[float, tuple[Any, Any]] = {}
    for epoch in epochs:
        count, in_treatment = totals.get(epoch.share, (0, 0))
        totals[epoch.share] = count + epoch.count, in_treatment + epoch.in_treatment
    gains: Any = np.zeros(2)
    for share, (count, hits) in totals.items():
        a, b, log_norm = _priors(share, wide, one_sided)
        hits = np.asarray(hits, dtype=float)[..., None]
        misses = np.asarray(count, dtype=float)[..., None] - hits
        gains = gains + betaln(a + hits, b + misses) - log_norm - hits * math.log(share) - misses * math.log1p(-share)
        if one_sided:
            with np.errstate(divide="ignore"):  # far below the share nothing is above it, and the e-value is 0
                gains = gains + np.log(betaincc(a + hits, b + misses, share))
    return np.asarray(np.logaddexp(gains[..., 0], gains[..., 1])) - math.log(2)


@functools.lru_cache
def _priors(
    share: float, wide: tuple[float, float], one_sided: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """a, b and the logarithm of the normalization [2] of both Beta priors, or of their parts above the share."""
    # the log odds of Beta(m s, m (1 - s)) have the variance 1 / (m s (1 - s)) for large m
    a = np.array([wide[0], 1 / ((1 - share) * PRIOR_SPREAD**2)])
    b = np.array([wide[1], 1 / (share * PRIOR_SPREAD**2)])
    return a, b, betaln(a, b) + (np.log(betaincc(a, b, share)) if one_sided else 0.0)


def ratio_interval(epochs: Epochs, alpha: float) -> tuple[float, float]:
    """A confidence sequence for the ratio of the rates: those that the mixture does not refute."""
    floor = float(log_e_value(epochs) + log_likelihood(epochs, 1.0)) - math.log(1 / alpha)
    count = sum(int(epoch.count) for epoch in epochs)
    in_treatment = sum(int(epoch.in_treatment) for epoch in epochs)
    best = _best_ratio(epochs)
    low = _bound(epochs, floor, best, -1.0) if in_treatment else 0.0
    high = _bound(epochs, floor, best, 1.0) if in_treatment < count else math.inf
    return low, high


def _best_ratio(epochs: Epochs) -> float:
    """The logarithm of the ratio of the highest likelihood, by bisection of the likelihood's slope; within +-20."""
    low, high = -20.0, 20.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        step = 1e-6
        rises = log_likelihood(epochs, math.exp(middle + step)) > log_likelihood(epochs, math.exp(middle - step))
        low, high = (middle, high) if rises else (low, middle)
    return (low + high) / 2


def _bound(epochs: Epochs, floor: float, best: float, direction: float) -> float:
    """Where the likelihood, which falls to both sides of the best ratio, falls below a floor."""
    near, far = best, best + direction * 40.0
    if log_likelihood(epochs, math.exp(far)) >= floor:
        return math.inf if direction > 0 else 0.0
    for _ in range(_BISECTIONS):
        middle = (near + far) / 2
        is_inside = log_likelihood(epochs, math.exp(middle)) >= floor
        near, far = (middle, far) if is_inside else (near, middle)
    return math.exp(far)


def log_e_rate(count: ArrayLike, errors: ArrayLike, limit: float) -> NDArray[np.float64]:
    """The logarithm of the e-value against an error rate of at most `limit`."""
    # rates of a few times the limit are likelier than those near 1, which Jeffreys' prior favors
    return log_e_value([Epoch(limit, count, errors)], one_sided=True, wide=(0.25 / (1 - limit), 0.25 / limit))


@functools.lru_cache
def promised_requests(rate: float, limit: float, alpha: float, power: float = 0.99) -> int | None:
    """Within how many requests to it a version with this error rate exceeds the limit's e-value with the probability
    `power`: exact, by dynamic programming over the number of errors. None if that takes more than `MOST_PROMISED`.
    """
    threshold = math.log(1 / alpha)
    alive = np.zeros(1)
    alive[0] = 1.0
    boundary = 1
    for count in range(1, MOST_PROMISED + 1):
        after = np.zeros(len(alive) + 1)
        after[:-1] += alive * (1 - rate)
        after[1:] += alive * rate
        while boundary <= count and log_e_rate(count, boundary, limit) < threshold:
            boundary += 1
        alive = after[:boundary]
        if 1 - alive.sum() >= power:
            return count
    return None


def difference_interval(control: Moments, treatment: Moments, alpha: float) -> tuple[float, float]:
    """A confidence sequence for the mean of B minus that of A; infinite until both arms have `BURN_IN` observations."""
    if min(control.count, treatment.count) < BURN_IN:
        return -math.inf, math.inf
    count = control.count + treatment.count
    variance = count * sum(arm.variance / arm.count for arm in (control, treatment))
    half = float(half_width(count, variance, alpha))
    difference = treatment.mean - control.mean
    return difference - half, difference + half


def half_width(count: ArrayLike, variance: ArrayLike, alpha: float) -> NDArray[np.float64]:
    """Half the width of the asymptotic confidence sequence of a mean of `count` observations with this variance."""
    counts = np.asarray(count, dtype=float)
    rho_squared = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha) + 1)) / TUNED_FOR
    scaled = counts * rho_squared + 1
    factor = 2 * scaled / (counts**2 * rho_squared) * np.log(np.sqrt(scaled) / alpha)
    return np.sqrt(np.asarray(variance) * factor)


@dataclass(frozen=True)
class FixedHorizonResult:
    """B minus A: the estimate, its 95% interval, and the two-sided p-value of no difference."""

    difference: float
    low: float
    high: float
    p_value: float


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
