"""Measures how well a reward model's confidence in the order of two answers agrees with its accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_BINS = 10


@dataclass(frozen=True, kw_only=True)
class ConfidenceBin:
    """The pairs whose confidence is from `low` to `high`."""

    low: float
    high: float
    count: int
    confidence: float
    """Mean confidence."""
    accuracy: float
    """Share of pairs in the right order."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Accuracy and calibration on held-out pairs."""

    num_pairs: int
    accuracy: float
    """Share of pairs whose chosen answer has the higher reward."""
    expected_error: float
    """Expected calibration error: |confidence - accuracy|, averaged over the bins by their numbers of pairs (Naeini et
    al. 2015)."""
    brier_score: float
    """Mean squared difference of 1 and the predicted probability that the chosen answer is better (Brier 1950)."""
    log_loss: float
    """Mean negative logarithm of that probability, nats."""
    bins: Sequence[ConfidenceBin]
    """Bins with at least one pair, from low to high confidence."""


def calibration(differences_P: np.ndarray) -> Calibration:
    """Judge the differences of rewards, chosen minus rejected, [P]; the probability that the chosen answer is better is
    the logistic function of its difference. The confidence of a pair is the probability of the predicted order, from
    0.5 to 1. Raises `ValueError` without pairs.
    """
    if not len(differences_P):
        raise ValueError("at least one pair is needed to judge a reward model")
    differences_P = differences_P.astype(np.float64)
    log_loss_P = np.logaddexp(0.0, -differences_P)
    # The logistic function of |difference|, in a form that cannot overflow.
    confidence_P = np.exp(-np.logaddexp(0.0, -np.abs(differences_P)))
    is_right_P = (1 + np.sign(differences_P)) / 2  # a tie is half right, as its confidence of 0.5 says
    # A confidence of exactly 1 belongs to the last bin.
    places_P = np.minimum(((confidence_P - 0.5) * 2 * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    bins = [
        ConfidenceBin(
            low=0.5 + place / (2 * NUM_BINS),
            high=0.5 + (place + 1) / (2 * NUM_BINS),
            count=int((places_P == place).sum()),
            confidence=float(confidence_P[places_P == place].mean()),
            accuracy=float(is_right_P[places_P == place].mean()),
        )
        for place in np.unique(places_P).tolist()
    ]
    errors = sum(one.count * abs(one.confidence - one.accuracy) for one in bins)
    return Calibration(
        num_pairs=len(differences_P),
        accuracy=float(is_right_P.mean()),
        expected_error=errors / len(differences_P),
        brier_score=float(np.square(1 - np.exp(-log_loss_P)).mean()),
        log_loss=float(log_loss_P.mean()),
        bins=bins,
    )
