"""The classifier two-sample test: can a classifier tell the requests of a window from those of the reference?

A logistic regression is trained on one half of the sessions and gives logits to the other half, and vice versa. The
statistic is the difference between the mean logits of the two samples (Cheng & Cloninger, IEEE Trans. Inf. Theory 68,
2022) in standard errors; it detects a rare topic, which hardly changes classification accuracy (Lopez-Paz & Oquab, ICLR
2017). The statistics of the two halves depend on each other, so the classifiers are retrained for each permutation of
the labels over sessions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright_continual.drift.sessions import Units
from modelwright_continual.drift.statistics import Floats, ks_distance, resampling_p_value

PERMUTATIONS = 199
RIDGE = 0.2
"""Penalty on squared weights, in multiples of a quarter of the records, which is the curvature of the loss along a
direction of unit variance when both samples are alike."""
_MOST_ITERATIONS = 100
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class SeparationTest:
    """Result of the test. statistic: difference of mean logits in standard errors; permuted: the statistic of each
    permutation; effect: KS distance between the logits of the two samples, a lower bound of the probability mass that
    has moved; logits [N]: of each record, by the classifier that was not trained on it, higher if it looks like the
    window.
    """

    statistic: float
    p_value: float
    effect: float
    logits: Floats
    permuted: Floats


def separation_test(
    embeddings: NDArray[np.float32], units: Units, is_window: NDArray[np.bool_], rng: np.random.Generator
) -> SeparationTest:
    """Tests whether window and reference differ. embeddings [N, D], of about unit variance; is_window [U]."""
    folds = _folds(is_window, rng)
    labels = _permuted(is_window, folds, rng)
    weights = units.weights[units.of_record] / units.sizes[units.of_record]
    design = np.concatenate([embeddings, np.ones((len(embeddings), 1), np.float32)], axis=1).astype(np.float32)
    logits = np.empty(len(embeddings))
    differences, variances = np.zeros(labels.shape[1]), np.zeros(labels.shape[1])
    for fold in (0, 1):
        held_out = folds[units.of_record] == fold
        fitted = fit_logistic(design[~held_out], labels[units.of_record[~held_out]], weights[~held_out])
        scores = design[held_out] @ fitted
        logits[held_out] = scores[:, 0]
        mine = np.flatnonzero(folds == fold)
        means = _means_of_units(scores, units.of_record[held_out], units.sizes)
        difference, variance = _difference(means[mine], labels[mine], units.weights[mine])
        differences, variances = differences + difference, variances + variance
    statistics = differences / np.sqrt(np.maximum(variances, 1e-30))
    inside = is_window[units.of_record]
    effect = ks_distance(
        logits[inside],
        weights[inside] / weights[inside].sum(),
        logits[~inside],
        weights[~inside] / weights[~inside].sum(),
    )
    p_value = resampling_p_value(statistics[0], statistics[1:])
    return SeparationTest(float(statistics[0]), p_value, effect, logits, statistics[1:])


def fit_logistic(design: NDArray[np.float32], labels: Floats, weights: Floats) -> NDArray[np.float32]:
    """Returns the weights [D, P] of P ridge-penalized logistic regressions on the same records, each with different
    labels.

    design [N, D]: the last column is the intercept, which is not penalized; labels [N, P]: 0 or 1; weights [N].
    Newton's method with the bound of Böhning & Lindsay (Ann. Inst. Statist. Math. 40, 1988) in place of the Hessian: it
    is the same for all P and in all iterations, so 200 fits cost little more than one.
    """
    penalty = np.full(design.shape[1], RIDGE * weights.sum() / 4)
    penalty[-1] = 0.0
    weighted = (design * weights[:, None]).astype(np.float32)
    # The small ridge on every column, the intercept included, keeps the bound invertible.
    bound = weighted.T.astype(np.float64) @ design / 4 + np.diag(penalty + 1e-9 * weights.sum())
    inverse = np.linalg.inv(bound).astype(np.float32)
    penalty = penalty.astype(np.float32)
    target = labels.astype(np.float32)
    fitted = np.zeros((design.shape[1], labels.shape[1]), np.float32)
    for _ in range(_MOST_ITERATIONS):
        # Clipped so that exp cannot overflow in FP32.
        probabilities = 1 / (1 + np.exp(-np.clip(design @ fitted, -30, 30)))
        step = inverse @ (weighted.T @ (target - probabilities) - penalty[:, None] * fitted)
        fitted += step
        if float(np.abs(step).max()) < _TOLERANCE * max(1.0, float(np.abs(fitted).max())):
            break
    return fitted


def _means_of_units(scores: NDArray[np.float32], of_record: NDArray[np.int64], sizes: NDArray[np.int64]) -> Floats:
    """Returns the mean scores [U, P] of each unit's records [N, P]; 0 for units without a record here."""
    from scipy.sparse import csr_array

    shares = 1 / sizes[of_record]
    average: Any = csr_array((shares, (of_record, np.arange(len(scores)))), shape=(len(sizes), len(scores)))
    return average @ scores


def _folds(is_window: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
    """Assigns each unit to fold 0 or 1, half of each sample to each."""
    folds = np.empty(len(is_window), dtype=np.int64)
    for side in (False, True):
        members = rng.permutation(np.flatnonzero(is_window == side))
        folds[members] = np.arange(len(members)) % 2
    return folds


def _permuted(is_window: NDArray[np.bool_], folds: NDArray[np.int64], rng: np.random.Generator) -> Floats:
    """Returns labels [U, 1 + PERMUTATIONS]: the true ones, then permutations within each fold."""
    labels = np.repeat(is_window[:, None].astype(np.float64), 1 + PERMUTATIONS, axis=1)
    for fold in (0, 1):
        members = np.flatnonzero(folds == fold)
        labels[members, 1:] = rng.permuted(labels[members, 1:], axis=0)
    return labels


def _difference(means: Floats, labels: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Returns the difference of the weighted means of both samples, and its variance if they are alike, for each column
    of labels [U, P]. The variance is that of all units together, since a group that exists in the window only would
    otherwise raise it.
    """
    shares = weights[:, None] / weights.sum()
    center = (shares * means).sum(axis=0)
    spread = (shares * (means - center) ** 2).sum(axis=0)
    difference, variance = np.zeros(labels.shape[1]), np.zeros(labels.shape[1])
    for sign, side in ((1, labels), (-1, 1 - labels)):
        shares = side * weights[:, None]
        shares /= shares.sum(axis=0)
        difference += sign * (shares * means).sum(axis=0)
        variance += (shares**2).sum(axis=0) * spread
    return difference, variance
