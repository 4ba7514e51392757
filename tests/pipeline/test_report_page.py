"""The page: everything inside one file, nothing fetched, readable on a phone, no text taken for HTML."""

import io
import math
import random
import re
from pathlib import Path
from typing import Literal

import pytest
from PIL import Image

from modelwright.pipeline.report.blocks import (
    Chart,
    Excerpt,
    Fact,
    Fold,
    Note,
    Page,
    Samples,
    Section,
    Table,
    TextSample,
    compact,
    number,
    seconds,
    size,
)
from modelwright.pipeline.report.charts import Line, bar_chart, line_chart, smooth
from modelwright.pipeline.report.page import render

CHROMIUM = Path("/usr/bin/chromium")


def sample_page() -> Page:
    noise = random.Random(1)
    raw = [(float(step), 9 * math.exp(-step / 300) + 2.5 + noise.gauss(0, 0.15)) for step in range(1000)]
    loss = [
        Line("every step", raw, faint=True),
        Line("training", smooth(raw)),
        Line("held out", [(x, y + 0.1) for x, y in smooth(raw)[::100]], marks=True, color=1),
    ]
    norms = [Line("norm", [(x, y / 5) for x, y in raw])]
    bars = bar_chart(
        ["Modelwright", "bigram", "xz", "gzip"],
        [("prose", [1.71, 2.4, 2.6, 2.9]), ("code", [1.5, 2.1, 1.9, 2.2])],
        name="bits",
        x_label="bits per byte",
    )
    charts = [
        Chart("Loss", line_chart(loss, name="loss", x_label="step", y_label="nats per token"), "Lower is better."),
        Chart("Gradient norm", line_chart(norms, name="norm", x_label="step", y_label="norm", log=True, level=1.0)),
        Chart("Bits per byte", bars),
    ]
    table = Table(
        ["model", "bits", "<b>note</b>"], [["ours", "1.71", "a long remark " * 6], ["xz", "2.6", ""]], "Table"
    )
    blocks = [
        *charts,
        table,
        Table(["row", *(f"column {i}" for i in range(8)), "last"], [["first row", *["123,456"] * 9]], "Wide table"),
        Table(["row", "value"], [["only row", "1"]], "Narrow table"),
        Note("Watch <out>", "warning"),
        Samples([TextSample("What does `len` do?", "Return the number of items.", "12 tokens")], "Answers"),
        Fold("Examples", [Excerpt("dropped: too short", "<script>alert(1)</script>")]),
    ]
    return Page(
        title="A run",
        subtitle="on a machine",
        facts=[Fact("Parameters", "8.4 M", "6 layers"), Fact("Bits per byte", "1.71", "xz 2.6")] * 2,
        sections=[Section("one", "Pretraining", blocks, "The lead."), Section("two", "Serving", [table])],
        footer="the end",
    )


def test_everything_is_inside_and_text_is_escaped() -> None:
    html = render(sample_page())
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", html)
    assert "http" not in re.sub(r"<style>.*?</style>", "", html, flags=re.S)
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_charts_have_no_color_of_their_own() -> None:
    html = render(sample_page())
    svg = html[html.index("<svg") : html.rindex("</svg>")]
    assert not re.findall(r"#[0-9a-f]{6}", svg)
    assert "var(--series-1)" in svg


def test_charts_survive_odd_numbers() -> None:
    odd = [(1.0, math.nan), (2.0, math.inf), (3.0, 0.0), (4.0, -1.0), (5.0, 2.0)]
    assert "<svg" in line_chart([Line("odd", odd)], name="odd", x_label="x", y_label="y", log=True)
    assert "<svg" in line_chart([Line("none", [])], name="none", x_label="x", y_label="y")
    assert "<svg" in bar_chart(["a"], [("s", [0.0])], name="bars", x_label="x")


def test_numbers_read_well() -> None:
    assert [compact(value) for value in (0, 0.00002, 0.5, 12_000, 3_400_000)] == ["0", "2e-05", "0.5", "12k", "3.4M"]
    assert [number(value) for value in (0, 1.23456, 1234.5, 0.1)] == ["0", "1.235", "1,234", "0.1"]
    assert [size(value) for value in (12, 34_200_000)] == ["12 B", "34.2 MB"]
    assert [seconds(value) for value in (0.42, 12, 200, 7500)] == ["0.4 s", "12 s", "3 min 20 s", "2 h 05 min"]


@pytest.fixture
def open_tab():
    """Opens a tab in a Chromium without a network: `open_tab(width, scheme)`."""
    if not CHROMIUM.exists():
        pytest.skip("needs Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as tool:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = tool.chromium.launch(executable_path=str(CHROMIUM), args=arguments)

        def open_tab(width: int, scheme: Literal["light", "dark"] = "light"):
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            tab.set_default_timeout(5_000)
            return tab

        yield open_tab
        browser.close()


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(render(sample_page()), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_opens_in_chromium_without_network_or_sideways_scrolling(open_tab, page_file: Path, width: int) -> None:
    tab = open_tab(width)
    requests: list[str] = []
    messages: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("console", lambda message: messages.append(message.text))
    tab.goto(page_file.as_uri())
    assert tab.locator("svg").count() == 3
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert requests == [page_file.as_uri()]
    assert messages == []


def right_edge_contrast(region) -> int:
    """How much the background at a scroll region's right edge differs from that in its middle, 0 to 255.

    Text and lines are hidden first; they would differ too.
    """
    region.evaluate("element => element.style.color = 'transparent'")
    image = Image.open(io.BytesIO(region.screenshot())).convert("L")
    first = image.width * (image.height - 8)
    row = image.tobytes()[first : first + image.width]
    return abs(row[-2] - row[image.width // 2])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_clipped_table_shows_that_it_scrolls(open_tab, page_file: Path, scheme: Literal["light", "dark"]) -> None:
    """A shadow marks the right edge while columns are hidden there, and only then."""
    tab = open_tab(390, scheme)
    tab.goto(page_file.as_uri())
    wide = tab.get_by_role("region", name="Wide table")
    assert wide.evaluate("element => element.scrollWidth > element.clientWidth")
    assert right_edge_contrast(wide) > 15
    wide.evaluate("element => element.scrollLeft = element.scrollWidth")
    assert right_edge_contrast(wide) < 3
    narrow = tab.get_by_role("region", name="Narrow table")
    assert narrow.evaluate("element => element.scrollWidth == element.clientWidth")
    assert right_edge_contrast(narrow) < 3


def test_the_last_column_is_reached_with_the_keyboard(open_tab, page_file: Path) -> None:
    tab = open_tab(390)
    tab.goto(page_file.as_uri())
    wide = tab.get_by_role("region", name="Wide table")
    last = wide.get_by_role("columnheader", name="last")
    assert right_edge(last) > 390
    for _ in range(30):
        tab.keyboard.press("Tab")
        if wide.evaluate("element => element === document.activeElement"):
            break
    else:
        pytest.fail("Tab never reaches the table")
    for _ in range(20):
        tab.keyboard.press("ArrowRight")
    tab.wait_for_function("element => element.scrollLeft + element.clientWidth >= element.scrollWidth - 1",
                          arg=wide.element_handle())  # fmt: skip
    assert right_edge(last) <= 390
    row = wide.get_by_role("rowheader", name="first row")
    assert row.bounding_box()["x"] >= 0, "the row's name stays in view"


def right_edge(element) -> float:
    box = element.bounding_box()
    return box["x"] + box["width"]
