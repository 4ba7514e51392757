"""A bill or the cost of a spot job as a page, with its tornado chart."""

from collections.abc import Sequence

from modelwright.pipeline.report.charts import tornado_chart
from modelwright.pipeline.report.plan_page import plan_page
from modelwright.plan.cost.sensitivity import Swing


def cost_page(name: str, text: str, swings: Sequence[Swing], base: float) -> str:
    """HTML with the total, the tornado and the text. swings: the widest first."""
    names = [f"{swing.name} ({swing.low:.4g} to {swing.high:.4g})" for swing in swings]
    ranges = [(min(swing.at_low, swing.at_high), max(swing.at_low, swing.at_high)) for swing in swings]
    svg = tornado_chart(names, ranges, base=base, name="tornado", x_label="US dollars")
    return plan_page(f"Cost of {name}", [(f"${base:,.2f}", "total")], [("What the total depends on", svg)], text)
