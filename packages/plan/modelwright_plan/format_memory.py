"""The timeline of a step's memory and its plan as plain text, as plain data for JSON, and as an HTML page."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.pipeline.estimate.cost import size
from modelwright.pipeline.report.charts import Line, line_chart
from modelwright.train.config import TrainConfig
from modelwright.train.memory.trace import KINDS, Kind, MemoryTimeline, plan_arena
from modelwright_plan.memory_plan import StepPlan
from modelwright_plan.page import plan_page

WIDTH = 72
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Known:
    """Notes on a plan. error: measured error of predicted peaks, "" if unknown; gaps: measured gaps of the heap."""

    error: str = ""
    gaps: str = ""


def plan_text(plan: StepPlan, configured: TrainConfig, *, top: int, known: Known) -> str:
    """Formats both timelines, the tensors alive at their peaks, the settings that the plan changes, and the arenas."""
    settings = plan.settings(configured)
    lines = timeline_lines("as configured", plan.before, top=top)
    if settings:
        lines += ["", *timeline_lines("planned", plan.after, top=top, scale=plan.before.peak_bytes), ""]
        configured_flops = f" ({plan.present_flops:.1%} as configured)" if plan.present_flops else ""
        lines.append(
            f"peak {size(plan.before.peak_bytes)} before, {size(plan.after.peak_bytes)} after: "
            f"{abs(plan.saved_share):.0%} {'less' if plan.saved_share >= 0 else 'more'} "
            f"for {plan.more_flops:.1%} more FLOPs{configured_flops}"
            + (f" and {size(plan.moved_bytes)} written and read again in each step" if plan.moved_bytes else "")
        )
        for name, value in settings.items():
            if name != "activation_checkpointing":
                lines.append(f"  {name}: {value}")
        activations = settings.get("activation_checkpointing")
        if isinstance(activations, Mapping):
            names = ["mode", "budget_bytes"]
            names += ["offload", "flops_per_byte"] if activations["offload"] != "none" else []
            own = ", ".join(f"{name}: {activations[name]}" for name in names)
            lines.append(f"  activation_checkpointing: {{{own}}}")
    else:
        lines += ["", "nothing to change: the step as configured is the plan"]
    lines += ["", f"predicted peaks: {known.error or 'their error has not been measured here'}"]
    lines += heap_lines(known)
    return "\n".join([*lines, "(of tensors; the process itself takes further memory)"])


def heap_lines(known: Known) -> list[str]:
    """Formats the amount that heap fragmentation in training adds to the predicted peaks."""
    how_much = known.gaps or "how much has not been measured here"
    return [f"gaps: the heap's gaps come on top of these peaks ({how_much})"]


def plan_data(plan: StepPlan, configured: TrainConfig, *, top: int) -> dict[str, Any]:
    """Returns the plan as plain data."""
    timelines: dict[str, Any] = {}
    for name, timeline in (("before", plan.before), ("after", plan.after)):
        time, arena = timeline.peak_time, plan_arena(timeline.of_step)
        timelines[name] = {
            "peak_bytes": timeline.peak_bytes,
            "peak_phase": timeline.phase_at(time),
            "by_kind": dict(timeline.by_kind(time)),
            "largest": [vars(one) for one in timeline.alive(time)[:top]],
            "num_operators": timeline.length,
            "arena_bytes": arena.num_bytes,
            "arena_lower_bound_bytes": arena.live_bytes,
            "reuse_share": arena.reuse_share,
        }
    return {
        **timelines,
        "saved_share": plan.saved_share,
        "present_flops": plan.present_flops,
        "more_flops": plan.more_flops,
        "moved_bytes": plan.moved_bytes,
        "settings": plan.settings(configured),
    }


def timeline_lines(name: str, timeline: MemoryTimeline, *, top: int, scale: int = 0) -> list[str]:
    """Draws the bytes alive over time, by kind, and lists the largest tensors at the peak. scale: bytes of a full bar;
    0 means the peak.
    """
    time, live = timeline.peak_time, timeline.live_bytes()
    scale = scale or max(live)
    kinds = timeline.by_kind(time)
    lines = [f"{name}: peak {size(live[time])} in {timeline.phase_at(time)}, at operator {time} of {timeline.length}"]
    # A letter for each column: f, b or u.
    last = max(1, timeline.length - 1)
    phases = (timeline.phase_at(round(column * last / (WIDTH - 1))) for column in range(WIDTH))
    lines.append(f"{'':<12} {''.join(phase[0] for phase in phases)}")
    for kind in KINDS:
        lines.append(f"{kind:<12} {_bars(timeline.live_bytes(kind), scale)} {size(kinds[kind]):>9} at the peak")
    lines.append(f"{'all':<12} {_bars(live, scale)} {size(live[time]):>9}")
    lines.append(f"largest of {len(timeline.alive(time))} at the peak:")
    for one in timeline.alive(time)[:top]:
        origin = f"{one.operator} {one.place}" if one.place else one.operator
        lines.append(f"  {size(one.num_bytes):>9}  {one.kind:<12} {origin}, alive from {one.birth} to {one.death}")
    arena = plan_arena(timeline.of_step)
    total = sum(one.num_bytes for one in arena.lifetimes)
    return [
        *lines,
        f"what comes and goes, {size(total)} in {len(arena.lifetimes)} tensors, fits into an arena of "
        f"{size(arena.num_bytes)}: {arena.reuse_share:.1%} reused; {arena.fragmentation:.1%} of the arena is gaps",
    ]


def _bars(values: Sequence[int], scale: int) -> str:
    """Draws the maximum of each column; every value above zero is visible."""
    bars, edges = [], [column * len(values) // WIDTH for column in range(WIDTH + 1)]
    for first, last in itertools.pairwise(edges):
        value = max(values[first : max(last, first + 1)], default=0)
        height = value / scale * (len(_BARS) - 1) if scale else 0.0
        bars.append(_BARS[min(len(_BARS) - 1, max(round(height), int(value > 0)))])
    return "".join(bars)


MIB = 2**20
NUM_POINTS = 600
_OF_STEP: tuple[Kind, ...] = ("activations", "gradients", "temporary")


def memory_page(plan: StepPlan, configured: TrainConfig, *, title: str, known: Known) -> str:
    """Renders the curves and the text of the plan (`plan_text`) as HTML."""
    both = [Line("as configured", _points(plan.before)), Line("planned", _points(plan.after), color=1)]
    before, after = (
        [Line(kind, _points(timeline, kind), color=number) for number, kind in enumerate(_OF_STEP)]
        for timeline in (plan.before, plan.after)
    )
    charts = [
        (title, line_chart(lines, name=name, x_label="operator", y_label="MiB", from_zero=True))
        for title, name, lines in (
            ("All that is alive", "all", both),
            ("As configured, by kind", "before", before),
            ("Planned, by kind", "after", after),
        )
    ]
    facts = [
        (size(plan.before.peak_bytes), "peak as configured"),
        (size(plan.after.peak_bytes), "peak planned"),
        (f"{plan.saved_share:.0%}", "less memory"),
        (f"{plan.more_flops:.1%}", "more FLOPs"),
    ]
    return plan_page(title, facts, charts, plan_text(plan, configured, top=12, known=known))


def _points(timeline: MemoryTimeline, kind: Kind | None = None) -> list[tuple[float, float]]:
    """Returns the maximum over each stretch of operators, in MiB, to limit the number of points."""
    values = timeline.live_bytes(kind)
    edges = [number * len(values) // NUM_POINTS for number in range(NUM_POINTS + 1)]
    return [(float(first), max(values[first:last]) / MIB) for first, last in itertools.pairwise(edges) if last > first]
