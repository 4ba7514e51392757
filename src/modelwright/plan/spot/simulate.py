"""A job on interruptible instances, simulated from interruption to interruption.

`simulate` stays on spot instances to the end; `simulate_with_deadline` changes to on-demand instances when the time
that is left demands it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from modelwright.core.errors import ConfigError
from modelwright.plan.spot.availability import Presence
from modelwright.plan.spot.intervals import CheckpointCosts

MOST_PERIODS = 200_000
"""A job that needs more periods of presence never ends: with one in an hour they are 23 years."""


@dataclass(frozen=True, kw_only=True)
class SpotOutcome:
    """Where the time of a job went, in seconds. Spot time is work, stalls, lost work and recoveries there."""

    wall_s: float
    spot_s: float
    """Time on spot instances, which is paid for."""
    on_demand_s: float = 0.0
    lost_s: float = 0.0
    """Work since the last checkpoint, and recoveries, that an interruption ended."""
    num_interruptions: int = 0

    def cost(self, *, spot_usd: float, on_demand_usd: float) -> float:
        """US dollars at prices of an hour of all instances together."""
        return (self.spot_s * spot_usd + self.on_demand_s * on_demand_usd) / 3600


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


def simulate_with_deadline(
    work_s: float, *, deadline_s: float, interval_s: float, costs: CheckpointCosts, periods: Iterable[Presence]
) -> SpotOutcome:
    """Run the job on spot instances as long as on-demand instances could still finish it in time. Notices of
    interruptions are not made use of.

    Slack is the time until the deadline beyond what on-demand instances need from the last checkpoint on: a start, the
    work, its checkpoints. Waiting, recoveries and lost work use it up; saved work does not. A segment is begun only if
    the slack covers it, so that an interruption at its very end still leaves enough. On-demand instances are taken to
    be there at once and never interrupted. Raises `ConfigError` for a deadline that even they cannot meet.
    """
    state = _Deadline(work_s, deadline_s, interval_s, costs)
    if state.slack_s < 0:
        raise ConfigError(
            f"deadline: {deadline_s / 3600:.2f} h is too short, even on demand; the least is "
            f"{(deadline_s - state.slack_s) / 3600:.2f} h"
        )
    for period in islice(periods, MOST_PERIODS):
        state.use(period.up_s)
        if state.is_over:
            break
        state.wait(period.down_s)
        if state.is_over:
            break
    return state.outcome()


class _Deadline:
    """The state of `simulate_with_deadline`."""

    def __init__(self, work_s: float, deadline_s: float, interval_s: float, costs: CheckpointCosts) -> None:
        self.left_s, self.deadline_s, self.interval_s, self.costs = work_s, deadline_s, interval_s, costs
        self.now_s = self.spot_s = self.lost_s = 0.0
        self.num_interruptions = 0
        self.goes_on_demand = False

    @property
    def on_demand_s(self) -> float:
        """Time that on-demand instances need from the last checkpoint on."""
        if self.left_s <= 0:
            return 0.0
        stalls_s = num_checkpoints(self.left_s, self.interval_s) * self.costs.stall_s
        return self.costs.recovery_s + self.left_s + stalls_s

    @property
    def slack_s(self) -> float:
        return self.deadline_s - self.now_s - self.on_demand_s

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0 or self.goes_on_demand

    def use(self, up_s: float) -> None:
        """Work on spot instances that are there for so long."""
        costs = self.costs
        if up_s <= 0:
            return
        if self.slack_s <= costs.recovery_s + 2 * costs.stall_s:  # too little for anything worth a start
            self.goes_on_demand = True
            return
        if up_s < costs.recovery_s:
            self._spend(up_s, lost_s=up_s, interrupted=True)
            return
        self._spend(costs.recovery_s)
        rest_s = up_s - costs.recovery_s
        while self.left_s > 0:
            segment_s = min(self.interval_s, self.left_s, self.slack_s - costs.stall_s)
            if segment_s <= costs.stall_s and segment_s < self.left_s:
                self.goes_on_demand = True
                return
            whole = 1
            if segment_s == self.interval_s:  # saved work leaves the slack as it is: many segments in one go
                whole = max(1, int(min(rest_s / (segment_s + costs.stall_s), self.left_s / segment_s)))
            taken_s = whole * (segment_s + costs.stall_s)
            if taken_s > rest_s:
                self._spend(rest_s, lost_s=rest_s, interrupted=True)
                return
            self._spend(taken_s)
            self.left_s = max(0.0, self.left_s - whole * segment_s)
            rest_s -= taken_s

    def wait(self, down_s: float) -> None:
        """Wait until spot instances are there again, or until waiting is over."""
        worth_s = self.slack_s - self.costs.recovery_s - 2 * self.costs.stall_s
        if down_s >= worth_s:
            self.now_s += max(0.0, worth_s)
            self.goes_on_demand = True
            return
        self.now_s += down_s

    def outcome(self) -> SpotOutcome:
        on_demand_s = self.on_demand_s
        return SpotOutcome(
            wall_s=self.now_s + on_demand_s,
            spot_s=self.spot_s,
            on_demand_s=on_demand_s,
            lost_s=self.lost_s,
            num_interruptions=self.num_interruptions,
        )

    def _spend(self, seconds: float, *, lost_s: float = 0.0, interrupted: bool = False) -> None:
        self.now_s += seconds
        self.spot_s += seconds
        self.lost_s += lost_s
        self.num_interruptions += interrupted


def interval_grid(center_s: float, *, work_s: float, num: int = 25, span: float = 8.0) -> list[float]:
    """Intervals from `center_s` / span to `center_s` x span, in equal ratios, none above the whole work."""
    steps = (span ** (2 * number / (num - 1) - 1) for number in range(num))
    return sorted({min(work_s, center_s * step) for step in steps})
