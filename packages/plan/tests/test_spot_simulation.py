"""The simulated course of a job on interruptible instances, against Daly's model and a simulation by the second."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from modelwright_plan.claims.interrupted_run import Presence, simulate
from modelwright_plan.intervals import CheckpointCosts, daly_interval_s, expected_wall_s

HOUR = 3600.0


def interruptions(mtbf_s: float, seed: int) -> Iterator[Presence]:
    """Interruptions at a constant rate, without absences."""
    draw = random.Random(seed)
    while True:
        yield Presence(draw.expovariate(1 / mtbf_s), 0.0)


@pytest.mark.parametrize("mtbf_s", [HOUR, 8 * HOUR])
@pytest.mark.parametrize(("stall_s", "recovery_s"), [(10.0, 60.0), (120.0, 900.0)])
@pytest.mark.parametrize("times", [0.4, 1.0, 3.0])
def test_simulation_equals_dalys_expectation(mtbf_s: float, stall_s: float, recovery_s: float, times: float) -> None:
    costs = CheckpointCosts(stall_s=stall_s, recovery_s=recovery_s)
    interval_s = times * daly_interval_s(stall_s, mtbf_s)
    share = expected_wall_s(interval_s, interval_s, costs, mtbf_s) / interval_s
    work_s = interval_s * round(40_000 * mtbf_s / share / interval_s)  # about 40,000 interruptions
    periods = interruptions(mtbf_s, seed=1)
    outcome = simulate(work_s, interval_s=interval_s, costs=costs, periods=periods)
    assert outcome.wall_s == pytest.approx(expected_wall_s(work_s, interval_s, costs, mtbf_s), rel=0.02)
    assert outcome.num_interruptions == pytest.approx(outcome.wall_s / mtbf_s, rel=0.02)


def naive(work_s: int, interval_s: int, costs: CheckpointCosts, periods: Iterable[Presence]) -> tuple[int, int, int]:
    """The same, second by second: wall, spot and lost seconds."""
    saved = wall = spot = lost = 0
    recovery_left, has_begun = 0, False
    for period in periods:
        unsaved = stalled = recovered = 0
        recovery_left = int(costs.recovery_s) if has_begun else 0
        if saved == work_s and period.up_s - period.notice_s >= recovery_left:  # in a notice
            return wall + recovery_left, spot + recovery_left, lost
        for second in range(int(period.up_s)):
            wall, spot, has_begun = wall + 1, spot + 1, True
            if second >= period.up_s - period.notice_s:  # it saves, if there is time for that, and waits for the end
                if not recovery_left and period.notice_s >= costs.stall_s:
                    saved, unsaved, stalled = saved + unsaved, 0, 0
                continue
            if recovery_left:
                recovery_left, recovered = recovery_left - 1, recovered + 1
                continue
            if unsaved < min(interval_s, work_s - saved):
                unsaved += 1
            else:
                stalled += 1
            if stalled == costs.stall_s:
                saved, unsaved, stalled = saved + unsaved, 0, 0
            if saved == work_s:
                return wall, spot, lost
        lost += unsaved + stalled + (recovered if recovery_left else 0)
        wall += int(period.down_s)
    raise AssertionError("the periods ended")


@pytest.mark.parametrize("notices", [(0,), (0, 2, 6)])
def test_simulation_equals_a_naive_one(notices: tuple[int, ...]) -> None:
    draw = random.Random(3)
    for _ in range(150):
        costs = CheckpointCosts(stall_s=draw.randint(1, 4), recovery_s=draw.randint(0, 9))
        interval_s, work_s = draw.randint(1, 30), draw.randint(1, 200)
        mean = draw.choice((40, 90))
        drawn = [Presence(draw.choice((0, 1, draw.randint(0, mean))), draw.randint(0, 9)) for _ in range(300)]
        drawn = [replace(one, notice_s=min(int(one.up_s), draw.choice(notices))) for one in drawn]
        periods = [*drawn, Presence(10_000, 0)]
        outcome = simulate(work_s, interval_s=interval_s, costs=costs, periods=periods)
        wall_s, spot_s, lost_s = naive(work_s, interval_s, costs, periods)
        assert (outcome.wall_s, outcome.spot_s) == (wall_s, spot_s)
        assert outcome.lost_s == lost_s
