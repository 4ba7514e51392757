"""The timeline of a step's memory and its plan as plain text, or as plain data for JSON.

The memory of a training step over time, before and after a plan, as one page that works offline.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.pipeline.estimate.cost import size
from modelwright.pipeline.report.charts import Line, line_chart
from modelwright.train.config import TrainConfig
from modelwright.train.memory.trace import KINDS, Arena, Kind, Lifetime, MemoryTimeline, plan_arena
from modelwright_plan.memory_plan import StepPlan
from modelwright_plan.page import plan_page

WIDTH = 72
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Known:
    """Notes on a plan. error: the measured error of predicted peaks, "" if unknown; gaps: the same for the heap."""

    error: str = ""
    gaps: str = ""


def plan_text(plan: StepPlan, configured: TrainConfig, *, top: int, known: Known) -> str:
    """Both timelines, the tensors alive at their peaks, what the plan changes, and the arenas."""
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
        lines += [f"  {line}" for line in _setting_lines(settings)]
    else:
        lines += ["", "nothing to change: the step as configured is the plan"]
    lines += ["", f"predicted peaks: {known.error or 'their error has not been measured here'}"]
    lines += heap_lines(known)
    return "\n".join([*lines, "(of tensors; a process takes memory of its own beside them)"])


def heap_lines(known: Known) -> list[str]:
    """What heap fragmentation in training adds to the predicted peaks."""
    how_much = known.gaps or "how much has not been measured here"
    return [f"gaps: the heap's gaps come on top of these peaks ({how_much})"]


def plan_data(plan: StepPlan, configured: TrainConfig, *, top: int) -> dict[str, Any]:
    """The same as plain data."""
    parts = {"before": plan.before, "after": plan.after}
    return {
        **{name: _timeline_data(timeline, top) for name, timeline in parts.items()},
        "saved_share": plan.saved_share,
        "present_flops": plan.present_flops,
        "more_flops": plan.more_flops,
        "moved_bytes": plan.moved_bytes,
        "settings": plan.settings(configured),
    }


def timeline_lines(name: str, timeline: MemoryTimeline, *, top: int, scale: int = 0) -> list[str]:
    """A chart of bytes alive over time, by kind, and the largest tensors at the peak. scale: bytes of a full bar."""
    time, live = timeline.peak_time, timeline.live_bytes()
    scale = scale or max(live)
    kinds = timeline.by_kind(time)
    lines = [f"{name}: peak {size(live[time])} in {timeline.phase_at(time)}, at operator {time} of {timeline.length}"]
    lines.append(f"{'':<12} {_phase_line(timeline)}")
    for kind in KINDS:
        lines.append(f"{kind:<12} {_bars(timeline.live_bytes(kind), scale)} {size(kinds[kind]):>9} at the peak")
    lines.append(f"{'all':<12} {_bars(live, scale)} {size(live[time]):>9}")
    lines.append(f"largest of {len(timeline.alive(time))} at the peak:")
    lines += [f"  {_describe(one)}" for one in timeline.alive(time)[:top]]
    return [*lines, arena_line(plan_arena(timeline.of_step))]


def arena_line(arena: Arena) -> str:
    total = sum(one.num_bytes for one in arena.lifetimes)
    return (
        f"what comes and goes, {size(total)} in {len(arena.lifetimes)} tensors, fits into an arena of "
        f"{size(arena.num_bytes)}: {arena.reuse_share:.1%} reused; {arena.fragmentation:.1%} of the arena is gaps"
    )


def _phase_line(timeline: MemoryTimeline) -> str:
    """A letter for each column: f, b or u."""
    last = max(1, timeline.length - 1)
    times = [round(column * last / (WIDTH - 1)) for column in range(WIDTH)]
    return "".join(timeline.phase_at(time)[0] for time in times)


def _bars(values: Sequence[int], scale: int) -> str:
    """The maximum of each column; anything above zero is visible."""
    bars, edges = [], [column * len(values) // WIDTH for column in range(WIDTH + 1)]
    for first, last in itertools.pairwise(edges):
        value = max(values[first : max(last, first + 1)], default=0)
        height = value / scale * (len(_BARS) - 1) if scale else 0.0
        bars.append(_BARS[min(len(_BARS) - 1, max(round(height), int(value > 0)))])
    return "".join(bars)


def _describe(one: Lifetime) -> str:
    where = f" {one.place}" if one.place else ""
    return f"{size(one.num_bytes):>9}  {one.kind:<12} {one.operator}{where}, alive from {one.birth} to {one.death}"


def _setting_lines(settings: Mapping[str, object]) -> list[str]:
    if "activation_checkpointing" not in settings:
        return [f"{name}: {value}" for name, value in settings.items()]
    shown = {name: value for name, value in settings.items() if name != "activation_checkpointing"}
    activations = settings["activation_checkpointing"]
    assert isinstance(activations, Mapping)
    names = ["mode", "budget_bytes"] + (["offload", "flops_per_byte"] if activations["offload"] != "none" else [])
    own = ", ".join(f"{name}: {activations[name]}" for name in names)
    return [*(f"{name}: {value}" for name, value in shown.items()), f"activation_checkpointing: {{{own}}}"]


def _timeline_data(timeline: MemoryTimeline, top: int) -> dict[str, Any]:
    time, arena = timeline.peak_time, plan_arena(timeline.of_step)
    return {
        "peak_bytes": timeline.peak_bytes,
        "peak_phase": timeline.phase_at(time),
        "by_kind": dict(timeline.by_kind(time)),
        "largest": [vars(one) for one in timeline.alive(time)[:top]],
        "num_operators": timeline.length,
        "arena_bytes": arena.num_bytes,
        "arena_lower_bound_bytes": arena.live_bytes,
        "reuse_share": arena.reuse_share,
    }


MIB = 2**20
NUM_POINTS = 600
_OF_STEP: tuple[Kind, ...] = ("activations", "gradients", "temporary")


def memory_page(plan: StepPlan, configured: TrainConfig, *, title: str, known: Known) -> str:
    """HTML with the curves, and the same as text (`plan_text`)."""
    both = [Line("as configured", _points(plan.before)), Line("planned", _points(plan.after), color=1)]
    charts = [
        ("All that is alive", _chart(both, "all")),
        ("As configured, by kind", _chart(_lines(plan.before), "before")),
        ("Planned, by kind", _chart(_lines(plan.after), "after")),
    ]
    facts = [
        (size(plan.before.peak_bytes), "peak as configured"),
        (size(plan.after.peak_bytes), "peak planned"),
        (f"{plan.saved_share:.0%}", "less memory"),
        (f"{plan.more_flops:.1%}", "more FLOPs"),
    ]
    return plan_page(title, facts, charts, plan_text(plan, configured, top=12, known=known))


def _chart(lines: list[Line], name: str) -> str:
    return line_chart(lines, name=name, x_label="operator", y_label="MiB", from_zero=True)


def _lines(timeline: MemoryTimeline) -> list[Line]:
    return [Line(kind, _points(timeline, kind), color=number) for number, kind in enumerate(_OF_STEP)]


def _points(timeline: MemoryTimeline, kind: Kind | None = None) -> list[tuple[float, float]]:
    """The maximum over each stretch of operators, in MiB, to limit the number of points."""
    values = timeline.live_bytes(kind)
    edges = [number * len(values) // NUM_POINTS for number in range(NUM_POINTS + 1)]
    return [(float(first), max(values[first:last]) / MIB) for first, last in itertools.pairwise(edges) if last > first]
