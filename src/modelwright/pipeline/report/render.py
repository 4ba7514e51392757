"""A `Page` as one HTML file that needs nothing else: no network, no scripts, fonts of the reader's system."""

from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby

from jinja2 import Environment, StrictUndefined

from modelwright.pipeline.report.blocks import Block, Page


def render(page: Page) -> str:
    """The page as HTML. Every text in it is escaped; only the charts' SVG is taken as it is."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["runs"] = _runs
    source = files("modelwright.pipeline.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source).render(page=page)


def _runs(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
    """Neighbors of the same kind together, so that charts can share a row."""
    return [(kind, list(group)) for kind, group in groupby(blocks, key=lambda block: block.kind)]
