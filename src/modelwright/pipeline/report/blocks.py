"""Building blocks of a report: sections of figures, tables, samples and text, independent of HTML and of stages, and
numbers formatted for reading.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def compact(value: float) -> str:
    """Formats a number for an axis: `12k`, `3.4M`, `0.002`, `2e-05`."""
    if not math.isfinite(value):
        return str(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.4g}"


def first_lines(lines: Sequence[str], most: int, rest_in: str = "") -> str:
    """Joins the first `most` lines, with the number of omitted lines and the file that contains all of them."""
    rest = [f"... and {len(lines) - most} more{f' in {rest_in}' if rest_in else ''}"] if len(lines) > most else []
    return "\n".join([*lines[:most], *rest])


def plural(number: int, noun: str) -> str:
    """`1 thread`, `2 threads`, `2 processes`."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def kind_title(kind: str) -> str:
    """Returns the words for a domain of documents."""
    return {"qa": "question-answer pairs"}.get(kind, kind)


def count(value: float) -> str:
    """Formats an integer with grouped thousands."""
    return f"{value:,.0f}"


def number(value: float, digits: int = 4) -> str:
    """Formats a number with `digits` significant digits and grouped thousands; very small and large numbers with one
    digit less and a power of ten.
    """
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e9:
        mantissa, _, exponent = f"{value:.{max(0, digits - 2)}e}".partition("e")
        return power_of_ten(mantissa, int(exponent))
    # Significant digits, not decimals: digits before the point count, too.
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def power_of_ten(mantissa: str, exponent: int) -> str:
    """Formats `8.2×10⁻⁵`: no line can break inside it, while it can after the hyphen of `8.2e-5`."""
    return f"{mantissa}×10{str(exponent).translate(_SUPERSCRIPTS)}"


def size(value: float) -> str:
    """Formats bytes in decimal units: `34.2 MB`."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def seconds(value: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `2 h 05 min`."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 60:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def percent(value: float, digits: int = 1) -> str:
    """Formats a fraction as a percentage: `26.1%`."""
    return f"{100 * value:.{digits}f}%"


@dataclass(frozen=True)
class Fact:
    """A large figure at the top: `value` with its `label`, and a small line with figures for comparison."""

    label: str
    value: str
    hint: str = ""


@dataclass(frozen=True)
class Chart:
    """An inline SVG with a description (`title`) and an explanation (`caption`)."""

    title: str
    svg: str
    caption: str = ""
    kind: Literal["chart"] = "chart"


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first cell of each row is the row's header.

    `title` also names the region that scrolls where the table is wider than the page. Columns in `numeric` are
    right-aligned; `strong` highlights rows by number.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str
    caption: str = ""
    numeric: Sequence[int] = ()
    strong: Sequence[int] = ()
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Note:
    """A paragraph; `level` "warning" is highlighted."""

    text: str
    level: Literal["plain", "good", "warning"] = "plain"
    kind: Literal["note"] = "note"


@dataclass(frozen=True)
class TextSample:
    """A question and its answer, with a small line of details. image: image of the question; answer_images: images of
    the answer; both as `data:` URLs.
    """

    question: str
    answer: str
    detail: str = ""
    image: str = ""
    answer_images: Sequence[str] = ()


@dataclass(frozen=True)
class Samples:
    """Questions and answers, one below the other."""

    items: Sequence[TextSample]
    title: str = ""
    kind: Literal["samples"] = "samples"


@dataclass(frozen=True)
class Excerpt:
    """A text excerpt; `label` names it."""

    label: str
    text: str


@dataclass(frozen=True)
class Fold:
    """Excerpts behind a heading that expands on a click."""

    title: str
    items: Sequence[Excerpt]
    kind: Literal["fold"] = "fold"


Block = Chart | Table | Note | Samples | Fold


@dataclass(frozen=True)
class Section:
    """A section of the report. Neighboring charts share a row if they fit."""

    anchor: str
    title: str
    blocks: Sequence[Block]
    lead: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """The whole report."""

    title: str
    subtitle: str
    facts: Sequence[Fact]
    sections: Sequence[Section]
    footer: str = ""
    warnings: Sequence[str] = field(default_factory=tuple)
