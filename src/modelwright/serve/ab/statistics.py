"""Statistics of A/B tests, as pure functions of counts and sums: e-processes and confidence sequences, which are valid
at every moment, under any peeking and stopping rule; and Welch's t-test of means and of proportions for a fixed number
of observations, whose p-values are those of GrowthBook's gbstats.

**Rare events** (a first error, a first slow answer, a first request). Each unit counts once per kind of event. The hash
draws a unit's arm, B with probability `share`, independently of all other units; if the arm has no effect on the event,
the arm of a unit that has just had one is distributed in the same way. The likelihood ratios below are therefore exact
under any traffic: rates that change over the day, heavy users, an outage of both arms. If events are `ratio` times as
frequent in B, a unit with an event is in B with the probability ratio * share / (ratio * share + 1 - share). The
alternative is a continuous mixture: half Jeffreys' prior of this probability, half a Beta distribution around the share
(Lindon and Malek 2022, Anytime-valid inference for multinomial count data). This is an e-process, so by Ville's
inequality the probability that it ever exceeds 1 / alpha is at most alpha. Because the prior is positive at every
ratio, any difference is found with enough units, and the intervals narrow without end; a finite grid of ratios would
miss every difference that is closer to 1 than to its nearest point.

**A limit of an error rate**. Each request fails with some conditional probability given all requests before it; while
that is at most the limit, the same mixture over higher rates, with the limit as the share, is an e-process.

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
"""Units per arm below which the interval of a mean is not shown, because its coverage is asymptotic."""
TUNED_FOR = 2000
"""Number of units at which the intervals of means are tightest."""
MOST_PROMISED = 5000
# halves a range of 40 in the logarithm below the resolution of a float
_BISECTIONS = 60


@dataclass(frozen=True)
class Epoch:
    """A period with one share of B: the units with the event, and those of them in B. The counts may be arrays."""

    share: float
    count: Any
    in_treatment: Any


Epochs = Sequence[Epoch]


def log_likelihood(epochs: Iterable[Epoch], ratio: float) -> Any:
    """Returns the log-likelihood of the arms of units with an event, given the rate ratio of B to A."""
    odds = [(epoch, ratio * epoch.share / (1 - epoch.share)) for epoch in epochs]
    return sum((epoch.in_treatment * math.log(one) - epoch.count * math.log1p(one) for epoch, one in odds), 0.0)


def log_e_value(
    epochs: Iterable[Epoch], *, one_sided: bool = False, wide: tuple[float, float] = JEFFREYS
) -> NDArray[np.float64]:
    """Returns the logarithm of the e-value against equal rates; one-sided, against a rate in B of at most A's. wide:
    parameters of the wide Beta prior.
    """
    # epochs of one share are summed: a late request from before a change of the share must not begin a new mixture
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
    """Returns a, b and the log normalization [2] of both Beta priors, or of their parts above the share."""
    # the log odds of Beta(m s, m (1 - s)) have the variance 1 / (m s (1 - s)) for large m
    a = np.array([wide[0], 1 / ((1 - share) * PRIOR_SPREAD**2)])
    b = np.array([wide[1], 1 / (share * PRIOR_SPREAD**2)])
    return a, b, betaln(a, b) + (np.log(betaincc(a, b, share)) if one_sided else 0.0)


def ratio_interval(epochs: Epochs, alpha: float) -> tuple[float, float]:
    """Returns a confidence sequence for the ratio of the rates: the ratios that the mixture does not reject."""
    floor = float(log_e_value(epochs) + log_likelihood(epochs, 1.0)) - math.log(1 / alpha)
    count = sum(int(epoch.count) for epoch in epochs)
    in_treatment = sum(int(epoch.in_treatment) for epoch in epochs)
    # the logarithm of the likeliest ratio, by bisection of the sign of the likelihood's slope
    low, high, step = -20.0, 20.0, 1e-6
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        rises = log_likelihood(epochs, math.exp(middle + step)) > log_likelihood(epochs, math.exp(middle - step))
        low, high = (middle, high) if rises else (low, middle)
    best = (low + high) / 2
    return (
        _bound(epochs, floor, best, -1.0) if in_treatment else 0.0,
        _bound(epochs, floor, best, 1.0) if in_treatment < count else math.inf,
    )


def _bound(epochs: Epochs, floor: float, best: float, direction: float) -> float:
    """Returns the ratio at which the likelihood, which falls on both sides of the best ratio, reaches a floor."""
    near, far = best, best + direction * 40.0
    if log_likelihood(epochs, math.exp(far)) >= floor:
        return math.inf if direction > 0 else 0.0
    for _ in range(_BISECTIONS):
        middle = (near + far) / 2
        is_inside = log_likelihood(epochs, math.exp(middle)) >= floor
        near, far = (middle, far) if is_inside else (near, middle)
    return math.exp(far)


def log_e_rate(count: ArrayLike, errors: ArrayLike, limit: float) -> NDArray[np.float64]:
    """Returns the logarithm of the e-value against an error rate of at most `limit`."""
    # rates of a few times the limit are likelier than those near 1, which Jeffreys' prior favors
    return log_e_value([Epoch(limit, count, errors)], one_sided=True, wide=(0.25 / (1 - limit), 0.25 / limit))


@functools.lru_cache
def promised_requests(rate: float, limit: float, alpha: float, power: float = 0.99) -> int | None:
    """Returns the number of requests within which a version with this error rate is rejected with probability `power`,
    exactly, by dynamic programming over the number of errors. None for more than `MOST_PROMISED`.
    """
    threshold = math.log(1 / alpha)
    # alive[k]: probability of k errors so far without a rejection; from `boundary` errors on the e-value rejects
    alive = np.ones(1)
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
    """Returns a confidence sequence for B's mean minus A's, infinite until both arms have `BURN_IN` observations."""
    if min(control.count, treatment.count) < BURN_IN:
        return -math.inf, math.inf
    count = control.count + treatment.count
    variance = count * sum(arm.variance / arm.count for arm in (control, treatment))
    half = float(half_width(count, variance, alpha))
    difference = treatment.mean - control.mean
    return difference - half, difference + half


def half_width(count: ArrayLike, variance: ArrayLike, alpha: float) -> NDArray[np.float64]:
    """Returns half the width of the asymptotic confidence sequence of a mean of `count` observations."""
    counts = np.asarray(count, dtype=float)
    # the rho of Waudby-Smith et al. whose interval is about the narrowest at `TUNED_FOR` observations
    rho_squared = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha) + 1)) / TUNED_FOR
    scaled = counts * rho_squared + 1
    factor = 2 * scaled / (counts**2 * rho_squared) * np.log(np.sqrt(scaled) / alpha)
    return np.sqrt(np.asarray(variance) * factor)


@dataclass(frozen=True)
class FixedHorizonResult:
    """B minus A: the estimate, its interval, and the two-sided p-value of no difference."""

    difference: float
    low: float
    high: float
    p_value: float


def welch(control: Moments, treatment: Moments, *, level: float = 0.95) -> FixedHorizonResult | None:
    """Welch's t-test (Welch 1947). Returns None for fewer than two observations in an arm or without any variance."""
    if min(control.count, treatment.count) < 2:
        return None
    parts = (_Part(arm.mean, arm.variance / arm.count, arm.count) for arm in (control, treatment))
    return _t_test(*parts, level=level)


def two_proportions(
    control: tuple[int, int], treatment: tuple[int, int], *, level: float = 0.95
) -> FixedHorizonResult | None:
    """Welch's t-test of the shares of observations with an event, with the variance p (1 - p) in each arm. An arm is
    (events, observations). Returns None for fewer than two observations in an arm or without any variance.
    """
    if min(control[1], treatment[1]) < 2:
        return None
    parts = (_Part(k / n, k / n * (1 - k / n) / n, n) for k, n in (control, treatment))
    return _t_test(*parts, level=level)


@dataclass(frozen=True)
class _Part:
    """An arm: the mean of its observations, its squared standard error, and their number."""

    mean: float
    squared_error: float
    count: int


def _t_test(control: _Part, treatment: _Part, *, level: float) -> FixedHorizonResult | None:
    """Compares two means, with Satterthwaite's degrees of freedom. Returns None without any variance."""
    variance = control.squared_error + treatment.squared_error
    if not variance > 0:
        return None
    degrees = variance**2 / sum(arm.squared_error**2 / (arm.count - 1) for arm in (control, treatment))
    difference, error = treatment.mean - control.mean, math.sqrt(variance)
    half = float(stdtrit(degrees, (1 + level) / 2)) * error
    p_value = 2 * float(stdtr(degrees, -abs(difference) / error))
    return FixedHorizonResult(difference, difference - half, difference + half, p_value)
