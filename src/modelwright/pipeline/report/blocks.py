"""The building blocks of a report: sections of figures, tables, samples and text, independent of HTML and of stages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Fact:
    """A large figure at the top: `value` with its `label`, and a small line with what it is compared with."""

    label: str
    value: str
    hint: str = ""


@dataclass(frozen=True)
class Chart:
    """An inline SVG with a description (`title`) and how to read it (`caption`)."""

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
    """A question and its answer, with a small line of details. image: what the question is about, answer_images: what
    belongs to the answer, as `data:` URLs.
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
    """One section of the report. Neighboring charts share a row if there is room."""

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
