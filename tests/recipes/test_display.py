"""What progress looks like: plain lines at a limited rate, one live line on a terminal."""

import io
import re

import pytest
from rich.console import Console

from modelwright.recipes.display import LiveDisplay, PlainDisplay, TaskProgress, choose_display, duration


def test_plain_lines_come_at_a_limited_rate() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, every_s=3600)
    display.begin("pretrain", 100, "steps")
    for step in range(100):
        display.advance(step + 1, loss=2.0)
    display.note("a note")
    display.end()
    assert stream.getvalue() == "a note\n"


def test_plain_line_says_rate_loss_and_time_left() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, every_s=0)
    display.begin("pretrain", 100, "steps")
    display.advance(10, loss=2.34567, mfu=0.523)
    display.advance(20, loss=2.2, mfu=0.5)
    last = stream.getvalue().splitlines()[-1]
    assert re.fullmatch(r"pretrain: 20/100 steps, \S+ s left, loss 2.2, mfu 50%, \S+ steps/s", last)


def test_a_stream_that_is_no_terminal_gets_plain_lines() -> None:
    assert isinstance(choose_display(io.StringIO()), PlainDisplay)


def test_live_line_leaves_only_notes_behind() -> None:
    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=100))
    display.begin("pretrain", 100, "steps")
    display.advance(50, loss=2.0)
    display.note("a note with [brackets]")
    display.end()
    assert "a note with [brackets]" in stream.getvalue()
    assert "50/100 steps" in stream.getvalue()


def test_unknown_total_has_no_time_left() -> None:
    assert str(TaskProgress("clean", 0, "documents")) == "0 documents"


@pytest.mark.parametrize(("seconds", "text"), [(0.44, "0.4 s"), (59.9, "59.9 s"), (61, "0:01:01"), (3661, "1:01:01")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
