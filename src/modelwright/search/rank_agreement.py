"""How well the losses that candidates have with shared weights rank them as training each alone does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import kendalltau

NUM_RESAMPLES = 500
FEWEST = 4
"""Candidates from which an interval is given; below, any order is possible."""


@dataclass(frozen=True, kw_only=True)
class RankAgreement:
    """Kendall's tau-b between shared and stand-alone losses, with the 95% percentile interval of a bootstrap over
    candidates. 1: the same order, -1: the opposite, 0: unrelated; None where there are fewer than two candidates, or no
    differences between them.
    """

    num_candidates: int
    tau: float | None
    low: float
    high: float


def rank_agreement(shared: Sequence[float], alone: Sequence[float], seed: int) -> RankAgreement:
    """Of losses of the same candidates, in the same order."""
    a, b = np.asarray(shared, dtype=np.float64), np.asarray(alone, dtype=np.float64)
    tau = _tau(a, b)
    if tau is None or len(a) < FEWEST:
        return RankAgreement(num_candidates=len(a), tau=tau, low=-1.0, high=1.0)
    draws = np.random.default_rng(seed).integers(len(a), size=(NUM_RESAMPLES, len(a)))
    taus = [value for draw in draws if (value := _tau(a[draw], b[draw])) is not None]
    low, high = np.percentile(taus, (2.5, 97.5)).tolist()
    return RankAgreement(num_candidates=len(a), tau=tau, low=low, high=high)


def _tau(a: np.ndarray, b: np.ndarray) -> float | None:
    """None if one of them is constant, which has no order."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    result: Any = kendalltau(a, b)
    return float(result.statistic)
