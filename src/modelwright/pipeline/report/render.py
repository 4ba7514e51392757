"""A `Page` as one self-contained HTML file: no network, no scripts, the reader's system fonts."""

from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby

from jinja2 import Environment, StrictUndefined

from modelwright.pipeline.report.blocks import Block, Page


def render(page: Page) -> str:
    """The page as HTML. All text is escaped; only the charts' SVG is inserted as it is."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["runs"] = _runs
    source = files("modelwright.pipeline.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source).render(page=page)


def _runs(blocks: Sequence[Block]) -> list[tuple[str, list[Block]]]:
    """Group neighbors of the same kind, so that charts can share a row."""
    return [(kind, list(group)) for kind, group in groupby(blocks, key=lambda block: block.kind)]
