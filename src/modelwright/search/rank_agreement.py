"""How well the losses that candidates have with shared weights rank them as training each alone does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import kendalltau

NORMAL_QUANTILE = 1.96
FEWEST = 4
"""Candidates from which an interval is given; below, any order is possible."""


@dataclass(frozen=True, kw_only=True)
class RankAgreement:
    """Kendall's tau-b between shared and stand-alone losses, with a 95% interval: all tau that are at most 1.96
    standard errors from the estimate, by the largest variance that an estimate can have, 2 (1 - tau^2) / n (Daniels and
    Kendall 1947). Unlike the interval of a bootstrap it has a width where all pairs agree.

    1: the same order, -1: the opposite, 0: unrelated; None where there are fewer than two candidates, or no differences
    between them.
    """

    num_candidates: int
    tau: float | None
    low: float
    high: float


def rank_agreement(shared: Sequence[float], alone: Sequence[float]) -> RankAgreement:
    """The agreement of two lists of losses of the same candidates."""
    a, b = np.asarray(shared, dtype=np.float64), np.asarray(alone, dtype=np.float64)
    tau = _tau(a, b)
    if tau is None or len(a) < FEWEST:
        return RankAgreement(num_candidates=len(a), tau=tau, low=-1.0, high=1.0)
    variance = 2.0 * NORMAL_QUANTILE**2 / len(a)  # in units of 1 - tau^2
    half_width = math.sqrt(variance * (1.0 + variance - tau**2))
    low, high = (tau - half_width) / (1.0 + variance), (tau + half_width) / (1.0 + variance)
    return RankAgreement(num_candidates=len(a), tau=tau, low=low, high=min(1.0, high))


def _tau(a: np.ndarray, b: np.ndarray) -> float | None:
    """None if one of them is constant, which has no order."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    result: Any = kendalltau(a, b)
    return float(result.statistic)
