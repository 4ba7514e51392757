"""A job on interruptible instances, simulated from interruption to interruption: periods of presence and absence, and
what the job saves and loses in them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from modelwright.core.errors import ConfigError
from modelwright_plan.intervals import CheckpointCosts

MOST_PERIODS = 200_000
"""A job that needs more periods of presence never ends: with one in an hour they are 23 years."""


@dataclass(frozen=True)
class Presence:
    """Instances are there for `up_s` seconds, then missing for `down_s`. Of the former, the job knows for the last
    `notice_s` seconds that they end: it saves what it has and stops.
    """

    up_s: float
    down_s: float
    notice_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SpotOutcome:
    """Where the time of a job went, in seconds."""

    wall_s: float
    spot_s: float
    """Time on the instances: work, stalls, lost work and recoveries."""
    lost_s: float = 0.0
    """Work since the last checkpoint, and recoveries, that an interruption ended."""
    num_interruptions: int = 0


def num_checkpoints(work_s: float, interval_s: float) -> int:
    """Checkpoints of so much work; one is at its end."""
    return math.ceil(work_s / interval_s - 1e-9)


def simulate(work_s: float, *, interval_s: float, costs: CheckpointCosts, periods: Iterable[Presence]) -> SpotOutcome:
    """Run the job on spot instances until it is done. The first start takes no recovery.

    An interruption that is announced early enough for a checkpoint loses nothing but the time of its notice. Raises
    `ConfigError` if no period of presence is ever long enough for a recovery and a checkpoint.
    """
    left_s, wall_s, spot_s, lost_s = work_s, 0.0, 0.0, 0.0
    starts_new = True
    for number, period in enumerate(islice(periods, MOST_PERIODS)):
        recovery_s = 0.0 if starts_new else costs.recovery_s
        useful_s = period.up_s - period.notice_s - recovery_s
        needed_s = left_s + num_checkpoints(left_s, interval_s) * costs.stall_s
        if useful_s >= needed_s:
            busy_s = recovery_s + needed_s
            return SpotOutcome(wall_s=wall_s + busy_s, spot_s=spot_s + busy_s, lost_s=lost_s, num_interruptions=number)
        saved_s, gone_s = _saved(useful_s, left_s, interval_s, costs, period.notice_s)
        left_s -= saved_s
        lost_s += gone_s if useful_s >= 0 else period.up_s - period.notice_s
        wall_s += period.up_s + period.down_s
        spot_s += period.up_s
        starts_new = starts_new and period.up_s == 0
    raise ConfigError(f"interval: {interval_s:.0f} s of work between checkpoints never end; choose a shorter one")


def _saved(
    useful_s: float, left_s: float, interval_s: float, costs: CheckpointCosts, notice_s: float
) -> tuple[float, float]:
    """Seconds of work that a presence with `useful_s` seconds for work and checkpoints saves, and those of work and of
    an unfinished checkpoint that are lost at its end.
    """
    segment_s = interval_s + costs.stall_s
    num_whole = max(0, math.floor(useful_s / segment_s))
    saved_s, rest_s = num_whole * interval_s, useful_s - num_whole * segment_s
    if rest_s > 0 and notice_s >= costs.stall_s:
        return min(left_s, saved_s + min(rest_s, interval_s)), 0.0
    return saved_s, rest_s
