"""Charts as inline SVG whose colors are CSS variables, so that one picture works in light and dark mode.

Drawn with matplotlib's `Figure` objects alone (no pyplot, no global state). Text stays text: it can be selected, and
the page's font is used.
"""

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelwright.core.config import install_line, is_installed
from modelwright.pipeline.report.blocks import compact

WIDTH_IN, HEIGHT_IN = 4.5, 2.45
FONT_PT = 8.5
LEAST_LOG_SPAN = 20.0
"""Ratio of largest to smallest value below which a logarithmic axis has too few ticks to read."""
LEFT_OUT = f"<p>A chart was left out: {html.escape(install_line('report'))}, then <code>modelwright report</code></p>"
"""What stands where a chart would be without the extra `report`."""
MOST_POINTS = 700
"""Points of a line that are drawn, evenly chosen, and the last one: more only enlarge the file."""

# Stand-ins that matplotlib draws with; each is replaced by a CSS variable of the page.
_INK, _MUTED, _GRID = "#010101", "#020202", "#030303"
_SERIES = ("#040404", "#050505", "#060606", "#070707")
_VARIABLES = {_INK: "--ink", _MUTED: "--muted", _GRID: "--grid"} | {
    color: f"--series-{i + 1}" for i, color in enumerate(_SERIES)
}


@dataclass(frozen=True)
class Line:
    """`points`: (x, y); `faint` for raw values behind a smoothed line; `marks` for few measured points."""

    label: str
    points: Sequence[tuple[float, float]]
    faint: bool = False
    marks: bool = False
    color: int = 0


def line_chart(
    lines: Sequence[Line],
    *,
    name: str,
    x_label: str,
    y_label: str,
    log: bool = False,
    level: float = 0.0,
    level_label: str = "",
    percent: bool = False,
    from_zero: bool = False,
    top: float = 0.0,
) -> str:
    """Draws lines over a common axis; `level` adds a dashed horizontal line (0: none); the axis begins at zero with
    `from_zero` and ends at `top` (0: where the data end). Returns an `<svg>` element.

    Non-finite values are gaps. With `log`, values of zero and below are left out.
    """
    if not is_installed("report"):
        return LEFT_OUT
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    figure, axes = _figure()
    for line in lines:
        stride = max(1, math.ceil(len(line.points) / MOST_POINTS))
        thinned = list(line.points[::stride])
        if thinned and thinned[-1] != line.points[-1]:
            thinned.append(line.points[-1])
        points = [(x, y if math.isfinite(y) else math.nan) for x, y in thinned if not log or y > 0]
        if points:
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=_SERIES[line.color],
                linewidth=0.8 if line.faint else 1.6,
                alpha=0.35 if line.faint else 1.0,
                marker="o" if line.marks else "",
                markersize=3.2,
                label="" if line.faint else line.label,
            )
    if level:
        axes.axhline(level, color=_MUTED, linewidth=1, linestyle=(0, (4, 3)), label=level_label)
    positive = [y for line in lines for _, y in line.points if math.isfinite(y) and y > 0]
    if log and positive and max(positive) / min(positive) > LEAST_LOG_SPAN:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if percent else compact(value))
    if from_zero or percent:
        axes.set_ylim(bottom=0)
    if top and any(y > top for line in lines for _, y in line.points):
        axes.set_ylim(top=top)
    if len([line for line in lines if not line.faint]) + bool(level_label) > 1:
        _legend(axes)
    return _svg(figure, name)


def bar_chart(
    groups: Sequence[str],
    series: Sequence[tuple[str, Sequence[float]]],
    *,
    name: str,
    x_label: str,
    values: Sequence[Sequence[str]] = (),
    largest: float = math.inf,
    stacked: bool = False,
) -> str:
    """Draws horizontal bars: one group per entry of `groups`, one bar per series, its value written at its end.

    `values`: words at the bars' ends by series, when a plain number is not enough; `largest`: largest possible value,
    the last with a tick (the axis extends beyond it to leave room for the words); `stacked`: the bars of a group follow
    each other in one line.
    """
    if not is_installed("report"):
        return LEFT_OUT
    num_lines = 1 if stacked else len(series)
    rows = len(groups) * (num_lines + (0.6 if num_lines > 1 else 0.35))
    figure, axes = _figure(height_in=0.55 + 0.2 * rows)
    thickness = 0.8 / num_lines
    ends = [[value for value in column if math.isfinite(value)] for _, column in series]
    if stacked:
        ends = [[sum(parts) for parts in zip(*ends, strict=True)]]
    top = max((value for column in ends for value in column), default=1.0) or 1.0
    lefts = [0.0] * len(groups)
    for number, (label, column) in enumerate(series):
        shift = 0.0 if stacked else (number - (num_lines - 1) / 2) * thickness
        places = [group + shift for group in range(len(groups))]
        axes.barh(places, column, height=thickness * 0.84, left=lefts, color=_SERIES[number], label=label)
        for group, (place, value) in enumerate(zip(places, column, strict=True)):
            words = values[number][group] if values else compact(value)
            end = lefts[group] + value + top * 0.015
            axes.text(end, place, words, va="center", color=_INK, fontsize=FONT_PT - 0.5)
        if stacked:
            lefts = [left + value for left, value in zip(lefts, column, strict=True)]
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    # Beyond the longest bar, to leave room for the words at its end.
    axes.set_xlim(0, top * 1.2)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= min(largest, top * 1.2)])
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", colors=_INK)
    if len(series) > 1:
        _legend(axes, above=True, columns=len(series))
    return _svg(figure, name)


def tornado_chart(
    names: Sequence[str], ranges: Sequence[tuple[float, float]], *, base: float, name: str, x_label: str
) -> str:
    """Draws bars from the result at one end of an assumption to that at its other end, `base` as a vertical line.

    `ranges`: (lowest, highest) result of each of `names`.
    """
    if not is_installed("report"):
        return LEFT_OUT
    figure, axes = _figure(height_in=0.55 + 0.27 * len(names))
    for row, (low, high) in enumerate(ranges):
        axes.barh(row, high - low, left=low, height=0.62, color=_SERIES[0])
    axes.axvline(base, color=_INK, linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", colors=_INK)
    return _svg(figure, name)


def smooth(points: Sequence[tuple[float, float]], weight: float = 0.0) -> list[tuple[float, float]]:
    """Returns the exponential moving average of the finite values, with Adam's bias correction, so that the start is
    not biased toward zero. weight: weight of the past; 0 averages over about a fortieth of the points (two at least,
    fifty at most).
    """
    weight = weight or 1 - 1 / min(50.0, max(2.0, len(points) / 40))
    result, mean, norm = [], 0.0, 0.0
    for x, y in points:
        if math.isfinite(y):
            mean, norm = weight * mean + (1 - weight) * y, weight * norm + (1 - weight)
            result.append((x, mean / norm))
    return result


def _figure(height_in: float = HEIGHT_IN):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(visible=True, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
    axes.tick_params(colors=_MUTED, labelsize=FONT_PT, length=0)
    axes.xaxis.label.set(color=_MUTED, size=FONT_PT)
    axes.yaxis.label.set(color=_MUTED, size=FONT_PT)
    return figure, axes


def _legend(axes, *, above: bool = False, columns: int = 1) -> None:
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2} if above else {"loc": "best"}
    axes.legend(frameon=False, fontsize=FONT_PT, labelcolor=_INK, handlelength=1.3, ncols=columns, **place)


def _svg(figure, name: str) -> str:
    import matplotlib

    buffer = io.StringIO()
    # Without the salt, ids would be random and the same report would differ from one writing to the next.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": f"chart-{name}", "font.family": ["sans-serif"]}
    with matplotlib.rc_context(settings):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # What only a file of its own needs is removed: XML header, metadata, namespaces, and the fixed size, without which
    # the picture scales with the page.
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" ?', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*" ?', r"<svg \1", svg, count=1)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", svg)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    # Every id gets the chart's name as a prefix, because several charts share one page.
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    return re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', svg)
