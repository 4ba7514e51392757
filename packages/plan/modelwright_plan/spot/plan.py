"""The plan of a job on spot instances, by Young's and Daly's formulas: how often to save a checkpoint, how long the job
then takes, and what it costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelwright.core.errors import ConfigError
from modelwright.pipeline.estimate.cost import duration
from modelwright_plan.cost.sensitivity import Swing, tornado, tornado_lines
from modelwright_plan.spot.intervals import CheckpointCosts, daly_interval_s, expected_wall_s, young_interval_s
from modelwright_plan.spot.measured import MeasuredRate

MOST_TIMES_THE_WORK = 100.0
"""A job that is expected to take longer than this many times its work is refused: it would hardly ever end, and no
interval helps."""


@dataclass(frozen=True, kw_only=True)
class SpotJob:
    """A job, how often its instances are interrupted, and what they cost an hour, all together."""

    work_s: float
    stall_s: float
    """Seconds that work stands still for a checkpoint."""
    recovery_s: float | None
    """Seconds from an interruption until work goes on; None if unknown, so that time and cost are lower bounds."""
    mtbf_s: float
    """Mean seconds between interruptions."""
    spot_usd: float
    on_demand_usd: float

    def __post_init__(self) -> None:
        if not 0 < self.work_s < math.inf:
            raise ConfigError(f"--work-hours: must be above 0, got {self.work_s / 3600}")

    def wall_s(self, interval_s: float) -> float:
        """Expected seconds until the job is done."""
        costs = CheckpointCosts(stall_s=self.stall_s, recovery_s=self.recovery_s or 0.0)
        return expected_wall_s(self.work_s, interval_s, costs, self.mtbf_s)

    def usd(self, interval_s: float) -> float:
        """Expected cost; instances are taken to be there again at once, and are paid for as long as the job takes."""
        return self.wall_s(interval_s) * self.spot_usd / 3600


@dataclass(frozen=True, kw_only=True)
class SpotPlan:
    """The interval between checkpoints and what comes of it."""

    job: SpotJob
    young_s: float
    interval_s: float
    """Seconds of work between checkpoints: Daly's optimum, or the whole work where that is shorter."""
    wall_s: float
    usd: float
    on_demand_usd: float
    """Cost on instances that are never interrupted, with one checkpoint at the end."""
    measured: MeasuredRate | None
    """Where the rate of interruptions comes from, if it was measured."""


def plan_spot(job: SpotJob, measured: MeasuredRate | None = None) -> SpotPlan:
    """Choose the interval. Raises `ConfigError` for a job that is interrupted too often to end."""
    interval_s = min(job.work_s, daly_interval_s(job.stall_s, job.mtbf_s))
    wall_s = job.wall_s(interval_s)
    if wall_s > MOST_TIMES_THE_WORK * job.work_s:
        raise ConfigError(
            f"--interruptions-per-hour: one in {duration(job.mtbf_s)} leaves hardly any time for work between "
            "recoveries; the job would take more than a hundred times its work"
        )
    return SpotPlan(
        job=job,
        young_s=young_interval_s(job.stall_s, job.mtbf_s),
        interval_s=interval_s,
        wall_s=wall_s,
        usd=job.usd(interval_s),
        on_demand_usd=(job.work_s + job.stall_s) * job.on_demand_usd / 3600,
        measured=measured,
    )


def spot_tornado(plan: SpotPlan, *, factor: float) -> list[Swing]:
    """Expected cost if one assumption is `factor` times as small or as large, at the chosen interval: it is set before
    the truth is known.
    """
    job = plan.job
    changes = {
        "hours of work": lambda value: replace(job, work_s=value * 3600),
        "stall of a checkpoint, s": lambda value: replace(job, stall_s=value),
        "recovery, s": lambda value: replace(job, recovery_s=value),
        "hours between interruptions": lambda value: replace(job, mtbf_s=value * 3600),
        "spot price, $/h": lambda value: replace(job, spot_usd=value),
    }
    values = (job.work_s / 3600, job.stall_s, job.recovery_s, job.mtbf_s / 3600, job.spot_usd)
    ranges = {name: (value / factor, value * factor) for name, value in zip(changes, values, strict=True) if value}
    return tornado(ranges, lambda name, value: changes[name](value).usd(plan.interval_s))


def spot_text(plan: SpotPlan, swings: Sequence[Swing]) -> str:
    """The interval, the expected time and cost, and the tornado."""
    job = plan.job
    if job.recovery_s is None:
        recovery, least = "what a recovery takes is unknown (--recovery-s)", "at least "
    else:
        recovery, least = f"a recovery takes {job.recovery_s:g} s", ""
    lines = [
        f"work             {duration(job.work_s)}; a checkpoint stalls it {job.stall_s:g} s, {recovery}",
        f"interruptions    one in {duration(job.mtbf_s)} on average",
        *([f"                 {plan.measured.text}"] if plan.measured else []),
        f"save every       {duration(plan.interval_s)} of work (Daly; by Young's first order {duration(plan.young_s)})",
        f"expected time    {least}{duration(plan.wall_s)} by Daly's model, in which instances are there again at once",
        f"cost             {least}${plan.usd:,.2f} on average; on demand from the start: ${plan.on_demand_usd:,.2f}",
        "",
        "What the cost depends on most:",
    ]
    return "\n".join([*lines, *tornado_lines(swings, plan.usd, top=len(swings))])


def spot_data(plan: SpotPlan, swings: Sequence[Swing]) -> dict[str, Any]:
    """The same as plain data: seconds and dollars."""
    rate = plan.measured
    measured = {**vars(rate), "per_hour": rate.per_hour, "interval_per_hour": rate.interval} if rate else None
    return {
        "young_interval_s": plan.young_s,
        "interval_s": plan.interval_s,
        "recovery_is_known": plan.job.recovery_s is not None,
        "expected_wall_s": plan.wall_s,
        "usd": plan.usd,
        "on_demand_usd": plan.on_demand_usd,
        "sensitivity": [vars(swing) for swing in swings],
        **({"measured_rate": measured} if measured else {}),
    }
