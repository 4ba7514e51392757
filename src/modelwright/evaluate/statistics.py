"""Intervals and exact tests for proportions. Pure Python, in log space for small numbers."""

import math

Z_95 = 1.959963984540054
"""The standard normal's 97.5% quantile."""


def wilson_interval(num_correct: int, num_trials: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927); 95% by default. No trials: (0, 1)."""
    if num_trials == 0:
        return 0.0, 1.0
    share, spread = num_correct / num_trials, z * z / num_trials
    center = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / num_trials + spread / (4 * num_trials)) / (1 + spread)
    return max(0.0, center - half), min(1.0, center + half)


def log10_binomial_tail(num_correct: int, num_trials: int, chance: float) -> float:
    """log10 of the exact one-sided p-value P(X >= num_correct), X ~ Binomial(num_trials, chance); 0 < chance < 1."""
    if num_correct <= 0:
        return 0.0
    terms = [_log_binomial(k, num_trials, chance) for k in range(num_correct, num_trials + 1)]
    highest = max(terms)
    total = highest + math.log(math.fsum(math.exp(term - highest) for term in terms))
    return min(0.0, total) / math.log(10)


def log10_sign_test(num_better: int, num_worse: int) -> float:
    """log10 of the exact two-sided p-value that better and worse are equally likely (McNemar's exact test)."""
    one_sided = log10_binomial_tail(max(num_better, num_worse), num_better + num_worse, 0.5)
    return min(0.0, one_sided + math.log10(2))


def _log_binomial(k: int, n: int, p: float) -> float:
    choices = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return choices + k * math.log(p) + (n - k) * math.log1p(-p)
