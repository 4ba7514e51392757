"""A plan as one page that works offline: figures, charts, and the same as text."""

from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined


def plan_page(title: str, facts: Sequence[tuple[str, str]], charts: Sequence[tuple[str, str]], text: str) -> str:
    """HTML. facts: values with their labels; charts: titles with their `<svg>` elements."""
    source = files("modelwright_plan").joinpath("plan.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
    return template.render(title=title, facts=facts, charts=charts, text=text)
