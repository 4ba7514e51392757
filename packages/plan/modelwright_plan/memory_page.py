"""The memory of a training step over time, before and after a plan, as one page that works offline."""

import itertools

from modelwright.pipeline.estimate.cost import size
from modelwright.pipeline.report.charts import Line, line_chart
from modelwright.train.config import TrainConfig
from modelwright.train.memory.step_arena import Kind, MemoryTimeline
from modelwright_plan.format_memory import Known, plan_text
from modelwright_plan.memory_plan import StepPlan
from modelwright_plan.plan_page import plan_page

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
