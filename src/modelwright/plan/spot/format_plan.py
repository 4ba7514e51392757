"""The plan of a job on spot instances as text and as plain data."""

import math
from collections.abc import Sequence
from typing import Any

from modelwright.core.records import summarize
from modelwright.plan.cost.sensitivity import Swing, tornado_lines
from modelwright.plan.estimate import duration
from modelwright.plan.spot.measured import MeasuredRate
from modelwright.plan.spot.plan import SpotPlan


def spot_text(plan: SpotPlan, swings: Sequence[Swing], measured: MeasuredRate | None = None) -> str:
    """Intervals, times, costs and the tornado. measured: where the rate of interruptions comes from."""
    job, costs = plan.job, plan.job.costs
    walls = summarize([outcome.wall_s for outcome in plan.outcomes])
    dollars = summarize([job.cost(outcome) for outcome in plan.outcomes])
    mtbf_s = job.availability.mtbf_s
    often = f"one in {duration(mtbf_s)} of presence" if math.isfinite(mtbf_s) else "none"
    lines = [
        f"work             {duration(job.work_s)}; a checkpoint stalls it {costs.stall_s:g} s, a recovery takes "
        f"{costs.recovery_s:g} s",
        f"interruptions    {often} on average",
        *([f"                 {measured.text}"] if measured else []),
        f"save every       {duration(plan.interval_s)} of work (Young {_interval(plan.young_s)}, Daly "
        f"{_interval(plan.daly_s)})",
        f"expected time    {_interval(plan.expected_wall_s)} by Daly's model, without absence, notice and deadline",
        f"simulated time   {duration(walls['mean'])} on average, 5% to 95%: {duration(walls['p05'])} to "
        f"{duration(walls['p95'])} ({walls['count']:.0f} courses)",
        f"cost             ${dollars['mean']:,.2f} on average, 5% to 95%: ${dollars['p05']:,.2f} to "
        f"${dollars['p95']:,.2f}; on demand from the start: ${plan.on_demand_usd:,.2f}",
    ]
    if not math.isinf(job.deadline_s):
        late = sum(outcome.on_demand_s > 0 for outcome in plan.outcomes)
        lines.append(
            f"deadline         {duration(job.deadline_s)}, met in all courses; {late / len(plan.outcomes):.0%} of them "
            "change to on-demand instances to meet it"
        )
    lines += ["", "What the mean cost depends on most:"]
    return "\n".join([*lines, *tornado_lines(swings, plan.mean_usd, top=len(swings))])


def spot_data(plan: SpotPlan, swings: Sequence[Swing], measured: MeasuredRate | None = None) -> dict[str, Any]:
    """The same as plain data: seconds and dollars."""
    return {
        "young_interval_s": plan.young_s,
        "daly_interval_s": plan.daly_s,
        "interval_s": plan.interval_s,
        "expected_wall_s": plan.expected_wall_s,
        "wall_s": summarize([outcome.wall_s for outcome in plan.outcomes]),
        "usd": summarize([plan.job.cost(outcome) for outcome in plan.outcomes]),
        "on_demand_usd": plan.on_demand_usd,
        "share_changed_to_on_demand": sum(o.on_demand_s > 0 for o in plan.outcomes) / len(plan.outcomes),
        "sensitivity": [vars(swing) for swing in swings],
        **({"measured_rate": _rate_data(measured)} if measured else {}),
    }


def _rate_data(measured: MeasuredRate) -> dict[str, Any]:
    return {
        **vars(measured),
        "per_hour": measured.per_hour,
        "interval_per_hour": measured.interval,
        "is_upper_bound": not measured.count,
    }


def _interval(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) else "never ends"
