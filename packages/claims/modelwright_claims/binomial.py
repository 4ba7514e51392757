"""Shares of yes and no: the observed one with exact one-sided bounds (Clopper and Pearson 1934)."""

from collections.abc import Sequence

from scipy.stats import beta

from modelwright_claims.statistics import CONFIDENCE, Estimate


def share(outcomes: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Estimate the percentage of outcomes that are 1, the others being 0."""
    count, hits = len(outcomes), int(sum(outcomes))
    lower = float(beta.ppf(1 - confidence, hits, count - hits + 1)) if hits else 0.0
    upper = float(beta.ppf(confidence, hits + 1, count - hits)) if hits < count else 1.0
    return Estimate(mean=100 * hits / count, spread=0.0, count=count, lower=100 * lower, upper=100 * upper)
