"""Paired comparisons of few runs: the difference, its spread and how surprising it is. Standard library only."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The differences `method - baseline` of paired runs and the two-sided p-value of Student's paired t test."""

    mean: float
    std: float
    p_value: float
    count: int


def paired_t_test(method: Sequence[float], baseline: Sequence[float]) -> Paired:
    """Compare runs paired by seed. Needs two pairs at least; raises `ValueError` otherwise.

    Equal differences throughout give p = 0 when they are not zero and p = 1 when they are.
    """
    differences = [a - b for a, b in zip(method, baseline, strict=True)]
    if len(differences) < 2:
        raise ValueError(f"a paired test needs two pairs at least, got {len(differences)}")
    mean, std = statistics.fmean(differences), statistics.stdev(differences)
    if std == 0:
        p_value = 0.0 if mean else 1.0
    else:
        p_value = two_sided_t(mean / (std / math.sqrt(len(differences))), len(differences) - 1)
    return Paired(mean=mean, std=std, p_value=p_value, count=len(differences))


def two_sided_t(t: float, degrees: int) -> float:
    """P(|T| >= |t|) for Student's t with a whole number of degrees of freedom.

    The finite sums of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    theta = math.atan(abs(t) / math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    if degrees % 2:
        term, total = cosine, 0.0
        for k in range(1, (degrees - 1) // 2 + 1):
            total += term
            term *= cosine**2 * 2 * k / (2 * k + 1)
        inside = 2 / math.pi * (theta + sine * total)
    else:
        term, total = 1.0, 0.0
        for k in range(1, degrees // 2 + 1):
            total += term
            term *= cosine**2 * (2 * k - 1) / (2 * k)
        inside = sine * total
    return max(0.0, 1.0 - inside)


def spread(values: Sequence[float]) -> float:
    """Standard deviation of the sample; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
