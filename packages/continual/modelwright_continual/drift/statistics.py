"""Weighted two-sample statistics: Kolmogorov-Smirnov, total variation, the population stability index, and the
adjustment of p-values for several features. With equal weights the first equals `scipy.stats.ks_2samp`.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearson3, skew

Floats = NDArray[np.float64]

PSI_BINS = 10
PSI_LEAST_SHARE = 1e-4
"""Lower bound for shares of bins, because PSI is infinite if one side has an empty bin (the usual remedy)."""
_FEW = 10
"""Number of exceedances from which the share of resamples is used as p-value; with fewer, a fitted distribution's tail
is used."""


def ks_distance(first: Floats, first_weights: Floats, second: Floats, second_weights: Floats) -> float:
    """Returns the largest distance between two weighted empirical distribution functions; the weights of
    each sum to 1.
    """
    grid = np.concatenate([first, second])
    return float(np.abs(cdf_at(grid, first, first_weights) - cdf_at(grid, second, second_weights)).max())


def cdf_at(points: Floats, values: Floats, weights: Floats) -> Floats:
    """Evaluates the weighted empirical distribution function of `values` at `points`, from the right."""
    order = np.argsort(values, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(weights[order])])
    return sums[np.searchsorted(values[order], points, side="right")]


def total_variation(first: Floats, second: Floats) -> float:
    """Returns half the sum of absolute differences between two vectors of shares: the largest difference in the
    probability of any set of categories, as KS is that of any half-line.
    """
    return float(np.abs(first - second).sum() / 2)


def psi(reference: Floats, current: Floats) -> float:
    """Returns the population stability index of two vectors of shares: sum of (c - r) ln(c / r)."""
    r, c = (np.maximum(shares, PSI_LEAST_SHARE) for shares in (reference, current))
    return float(np.sum((c - r) * np.log(c / r)))


def decile_edges(values: Floats, weights: Floats) -> Floats:
    """Returns the inner edges of `PSI_BINS` bins with equal weights; fewer if a value has more than one
    bin's weight.
    """
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    # The factor below 1 keeps rounding of the cumulative sums from moving an edge to the next value.
    places = np.searchsorted(sums, np.arange(1, PSI_BINS) / PSI_BINS * (1 - 1e-12))
    return np.unique(values[order][np.minimum(places, len(values) - 1)])


def bin_shares(values: Floats, weights: Floats, edges: Floats) -> Floats:
    """Returns the weight of values in each bin; a value equal to an edge is in the bin below it."""
    bins = np.searchsorted(edges, values, side="left")
    return np.bincount(bins, weights, minlength=len(edges) + 1).astype(np.float64)


def adjusted_p_values(p_values: Floats) -> Floats:
    """Returns p-values [..., m] adjusted for m tests with any dependence (Benjamini & Yekutieli, Ann. Statist. 29,
    2001). They may exceed 1, so that a threshold can be calibrated on them.
    """
    m = p_values.shape[-1]
    order = np.argsort(p_values, axis=-1)
    harmonic = np.sum(1 / np.arange(1, m + 1))
    scaled = np.take_along_axis(p_values, order, -1) * m * harmonic / np.arange(1, m + 1)
    monotone = np.minimum.accumulate(scaled[..., ::-1], axis=-1)[..., ::-1]
    adjusted = np.empty_like(monotone)
    np.put_along_axis(adjusted, order, monotone, -1)
    return adjusted


def adjusted_where_moved(p_values: Floats, effects: Floats, min_effect: float) -> Floats:
    """Returns `adjusted_p_values` of the features whose effect is at least `min_effect`. Those of the others are
    infinite, so that they never alarm. p_values, effects [..., m].
    """
    return adjusted_p_values(np.where(effects < min_effect, np.inf, p_values))


def resampling_p_value(observed: float, null: Floats) -> float:
    """Returns the share of resampled statistics that are at least as large (Phipson & Smyth 2010). If fewer than ten
    are, the result is the tail of a Pearson III distribution with their mean, deviation and skewness; without any, that
    tail is used only if it is smaller than the share.
    """
    exceeding = int((null >= observed).sum())
    share = (1 + exceeding) / (1 + len(null))
    deviation = float(null.std())
    if exceeding >= _FEW or deviation == 0:
        return share
    tail = float(pearson3.sf(observed, float(skew(null)), loc=float(null.mean()), scale=deviation))
    return min(share, max(tail, 1e-300)) if exceeding == 0 else max(tail, 1e-300)
