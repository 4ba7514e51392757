"""Optimal checkpoint intervals when interruptions are a Poisson process, and the expected time of a job.

Notation of Daly (2006): delta is the stall of a checkpoint, R the recovery, M the mean time between interruptions, tau
the time of work between checkpoints.
"""

import math
from dataclasses import dataclass

from modelwright.core.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointCosts:
    """Costs of checkpoints and interruptions, in seconds."""

    stall_s: float
    """Seconds for which a checkpoint stalls the work."""
    recovery_s: float
    """Seconds from an interruption until work resumes from the last checkpoint, on an available instance."""

    def __post_init__(self) -> None:
        if not 0 < self.stall_s < math.inf:
            raise ConfigError(f"stall: must be above 0 seconds, got {self.stall_s}")
        if not 0 <= self.recovery_s < math.inf:
            raise ConfigError(f"recovery: must not be negative, got {self.recovery_s}")


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Computes Young's first-order optimum (CACM 1974): sqrt(2 delta M)."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Computes Daly's higher-order optimum (FGCS 2006, equation 37); infinite without interruptions."""
    if math.isinf(mtbf_s):
        return math.inf
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return young_interval_s(stall_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def expected_wall_s(work_s: float, interval_s: float, costs: CheckpointCosts, mtbf_s: float) -> float:
    """Computes the expected seconds of a job of `work_s` seconds of work (Daly's complete model, equation 20).

    A checkpoint is saved every `interval_s` seconds of work and at the end. An interruption loses the work after the
    last checkpoint; a recovery can be interrupted, too, and then starts over. A new instance is available at once.
    """
    num_whole = math.floor(work_s / interval_s)
    rest_s = work_s - num_whole * interval_s
    wall_s = num_whole * _segment_s(interval_s, costs, mtbf_s)
    return wall_s + (_segment_s(rest_s, costs, mtbf_s) if rest_s > 0 else 0.0)


def _segment_s(work_s: float, costs: CheckpointCosts, mtbf_s: float) -> float:
    """Computes the expected seconds until a segment of work and its checkpoint are done."""
    if math.isinf(mtbf_s):
        return work_s + costs.stall_s
    try:
        return mtbf_s * math.exp(costs.recovery_s / mtbf_s) * math.expm1((work_s + costs.stall_s) / mtbf_s)
    except OverflowError:
        return math.inf
