"""Plans as HTML pages that work offline: figures, charts, and the plan as text; and the page of a cost with its
tornado.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from modelwright.core.artifacts import writing
from modelwright.core.config import ConfigError
from modelwright.pipeline.report.charts import tornado_chart
from modelwright_plan.cost.bill import Swing


def plan_page(title: str, facts: Sequence[tuple[str, str]], charts: Sequence[tuple[str, str]], text: str) -> str:
    """Renders a plan as HTML. facts: values with their labels; charts: titles with their `<svg>` elements."""
    source = files("modelwright_plan").joinpath("plan.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
    return template.render(title=title, facts=facts, charts=charts, text=text)


def write_cost_page(path: Path, name: str, text: str, swings: Sequence[Swing], base: float) -> None:
    """Writes HTML with the total, the tornado and the text. swings: the widest first. Raises `ConfigError` if the
    folder does not exist.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"--html: {path.parent} is not a folder; name a file in one that exists")
    names = [f"{swing.name} ({swing.low:.4g} to {swing.high:.4g})" for swing in swings]
    ranges = [(min(swing.at_low, swing.at_high), max(swing.at_low, swing.at_high)) for swing in swings]
    svg = tornado_chart(names, ranges, base=base, name="tornado", x_label="US dollars")
    page = plan_page(f"Cost of {name}", [(f"${base:,.2f}", "total")], [("What the total depends on", svg)], text)
    with writing(path):
        path.write_text(page, encoding="utf-8")
