"""Statistics that hold at every moment, however often somebody looks and whenever they stop: e-processes and confidence
sequences. Pure functions of counts and sums.

**Rare events** (a first error, a first slow answer, a first request). Each unit counts once for a kind of event. A
unit's arm is drawn by the hash with the probability `share` for B, independent of all that others do; without an effect
of the arm on the event, so is the arm of a unit that has just had one. That makes the product of likelihood ratios
below exact, whatever the traffic does: rates that change over the day, heavy users, an outage of both arms. The
alternatives are rate ratios: if events are `ratio` times as frequent in B, a unit with an event is in B with the
probability ratio * share / (ratio * share + 1 - share). A mixture over a grid of them is an e-process, so by Ville's
inequality it exceeds 1 / alpha with probability alpha at most, ever (Ramdas et al. 2023, Game-theoretic statistics and
safe anytime-valid inference; Lindon and Malek 2022 for the check of the ratio of units).

**A limit of an error rate**. Each request is an error with some probability given all before it; while that is at most
the limit, a likelihood ratio against higher rates is an e-process.

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
from scipy.special import logsumexp

from modelwright.serve.ab.fixed_horizon import Moments

WORSE_RATIOS = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 25.0, 50.0, 100.0)
"""Rate ratios that a guard bets on."""

ALL_RATIOS = tuple(float(ratio) for ratio in np.geomspace(0.01, 100.0, 33))
"""For intervals and for the check of the ratio of units, which may err to either side."""

LIMIT_FACTORS = (1.5, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0, 60.0, 100.0)
"""Multiples of a limit that its guard bets on, where they are below `MOST_RATE`."""
MOST_RATE = 0.95

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


def log_likelihood(epochs: Iterable[Epoch], ratio: ArrayLike) -> NDArray[np.float64]:
    """The log-likelihood of the arms of units with an event, for rate ratios of B to A. It has the shape of the counts
    followed by that of ratio.
    """
    ratios = np.asarray(ratio, dtype=float)
    total: Any = np.zeros(ratios.shape)
    for epoch in epochs:
        odds = ratios * epoch.share / (1 - epoch.share)
        counts, in_treatment = (np.asarray(one, dtype=float) for one in (epoch.count, epoch.in_treatment))
        if ratios.ndim:
            counts, in_treatment = counts[..., None], in_treatment[..., None]
        total = total + in_treatment * np.log(odds) - counts * np.log1p(odds)
    return total


def log_e_value(epochs: Epochs, ratios: Sequence[float]) -> NDArray[np.float64]:
    """The logarithm of the e-value against equal rates; with ratios above 1 alone, against a rate in B that is at most
    that in A.
    """
    gains = log_likelihood(epochs, np.asarray(ratios)) - log_likelihood(epochs, np.ones(len(ratios)))
    return np.asarray(logsumexp(gains, axis=-1)) - math.log(len(ratios))


def ratio_interval(epochs: Epochs, alpha: float) -> tuple[float, float]:
    """A confidence sequence for the ratio of the rates: those that the mixture does not refute."""
    mixture = float(log_e_value(epochs, ALL_RATIOS) + log_likelihood(epochs, 1.0))
    floor = mixture - math.log(1 / alpha)
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
    factors = [factor for factor in LIMIT_FACTORS if factor * limit < MOST_RATE]
    rates = np.asarray([factor * limit for factor in factors] or [(1 + limit) / 2])
    counts, wrong = (np.asarray(one, dtype=float)[..., None] for one in (count, errors))
    gains = wrong * np.log(rates / limit) + (counts - wrong) * np.log((1 - rates) / (1 - limit))
    return np.asarray(logsumexp(gains, axis=-1)) - math.log(len(rates))


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
