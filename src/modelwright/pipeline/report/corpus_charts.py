"""Charts of the text: what each step left, lengths, languages, personal data and clusters of near-duplicates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelwright.data.clean.steps.duplicates import DUPLICATES
from modelwright.pipeline.report.blocks import Block, Chart
from modelwright.pipeline.report.charts import bar_chart
from modelwright.pipeline.report.format import count

_MOST_BARS = 12
_OTHERS = "others"


def corpus_charts(clean: Mapping[str, Any]) -> list[Block]:
    """Those charts for which the report of cleaning has figures."""
    return [chart for draw in _CHARTS for chart in draw(clean)]


def _funnel(clean: Mapping[str, Any]) -> list[Block]:
    """The documents left after each step that dropped some; none where nothing was dropped."""
    left, bars = clean["num_documents"], [("read", clean["num_documents"])]
    for step, reasons in clean["dropped"].items():
        left -= sum(entry["documents"] for entry in reasons.values())
        bars.append((f"after {step}", left))
    return _bars("Documents left after each step", "funnel", bars) if len(bars) > 1 else []


def _lengths(clean: Mapping[str, Any]) -> list[Block]:
    """Kept and dropped documents by length."""
    kept, dropped = clean.get("kept_lengths", {}), clean.get("dropped_lengths", {})
    sizes = sorted({int(size) for size in (*kept, *dropped)})
    if not sizes:
        return []
    while sizes[-1] != sizes[0] and len(sizes) <= sizes[-1].bit_length() - sizes[0].bit_length():
        sizes = sorted({*sizes, *(size * 2 for size in sizes if size < sizes[-1])})  # no gap between two bars
    names = [f"{count(size)} to {count(2 * size - 1)}" if size > 1 else "up to 1" for size in sizes]
    series = [("kept", [kept.get(str(size), 0) for size in sizes])]
    if dropped:
        series.append(("dropped", [dropped.get(str(size), 0) for size in sizes]))
    values = [[count(number) for number in numbers] for _, numbers in series]
    svg = bar_chart(names, series, name="lengths", x_label="documents", values=values)
    return [Chart("Documents by length in characters", svg)]


def _languages(clean: Mapping[str, Any]) -> list[Block]:
    bars = sorted(clean.get("languages", {}).items(), key=lambda bar: (-bar[1], bar[0]))
    caption = (
        "A sample: every 20th kept document of prose and pairs, by its beginning. Short texts are often mistaken, and "
        "parts of the corpus with fewer than 500 documents (shards of few or of long texts) are not sampled."
    )
    return _bars("Languages", "languages", _first(bars), caption)


def _personal_data(clean: Mapping[str, Any]) -> list[Block]:
    bars = sorted(clean.get("replaced", {}).items(), key=lambda bar: (-bar[1], bar[0]))
    return _bars("Personal data replaced in kept documents", "personal", _first(bars), x_label="values")


def _clusters(clean: Mapping[str, Any]) -> list[Block]:
    """Clusters by size, larger ones together by doubling sizes."""
    sizes: Mapping[str, int] = clean.get("figures", {}).get(DUPLICATES.name, {}).get("cluster_sizes", {})
    bars: dict[str, int] = {}
    for size, number in sorted((int(size), number) for size, number in sizes.items()):
        low = 1 << size.bit_length() - 1
        name = str(size) if size < 4 else f"{count(low)} to {count(2 * low - 1)}"
        bars[name] = bars.get(name, 0) + number
    caption = "A cluster is a kept document with those that were dropped because they nearly repeat it."
    return _bars("Clusters of near-duplicates by size", "clusters", list(bars.items()), caption, x_label="clusters")


def _first(bars: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The first bars, and one for all others."""
    rest = sum(number for _, number in bars[_MOST_BARS:])
    return [*bars[:_MOST_BARS], *([(_OTHERS, rest)] if rest else [])]


def _bars(
    title: str, name: str, bars: Sequence[tuple[str, int]], caption: str = "", *, x_label: str = "documents"
) -> list[Block]:
    if not bars:
        return []
    names, numbers = zip(*bars, strict=True)
    svg = bar_chart(names, [(x_label, numbers)], name=name, x_label=x_label, values=[list(map(count, numbers))])
    return [Chart(title, svg, caption)]


_CHARTS: tuple[Callable[[Mapping[str, Any]], list[Block]], ...] = (
    _funnel, _lengths, _languages, _personal_data, _clusters
)  # fmt: skip
