"""Progress on the terminal: one live line on a terminal, an occasional plain line elsewhere. Both implement
`core.progress.Progress`. They know numbers and names, not the work behind them.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from modelwright.core.progress import Progress

if TYPE_CHECKING:  # only a terminal needs it, and every command imports this module
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

LINE_EVERY_S = 10.0
RATE_WINDOW_S = 20.0
"""Time over which the rate is measured: short enough to follow a change, long enough for steps of some seconds."""
_FIRST = ("loss", "bits_per_byte", "mfu")


def choose_display(stream: TextIO) -> Progress:
    """Returns a live line if `stream` is a terminal that can redraw, plain lines otherwise."""
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay(stream)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Shows the progress of the block on the error stream."""
    display = choose_display(sys.stderr)
    try:
        yield display
    finally:
        display.end()


class TaskProgress:
    """Rate and remaining time of a piece of work, from the last seconds, so that a resumed run starts afresh."""

    def __init__(self, name: str = "", total: float = 0, unit: str = "") -> None:
        self.name, self.total, self.unit = name, total, unit
        self.fields: dict[str, float | str] = {}
        self.done = 0.0
        self.started = time.monotonic()
        self._marks: list[tuple[float, float]] = []

    def update(self, done: float, fields: dict[str, float | str]) -> None:
        moment = time.monotonic()
        self.done = done
        self.fields |= fields
        self._marks.append((moment, done))
        # The mark before the window stays, so that the rate covers the whole window.
        while len(self._marks) > 2 and moment - self._marks[1][0] > RATE_WINDOW_S:
            self._marks.pop(0)

    @property
    def rate(self) -> float:
        """Units per second, 0 while unknown."""
        if len(self._marks) < 2:
            return 0.0
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else 0.0

    def __str__(self) -> str:
        """`1,024/2,000 steps, 0:05:12 left, loss 2.31, mfu 52%, 3.1 steps/s`, most important first."""
        rate = self.rate
        parts = [f"{self.done:,.0f}{f'/{self.total:,.0f}' if self.total else ''} {self.unit}"]
        if self.total and rate > 0:
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        # Terminals cut the end of a long line, so the figures that matter most come first.
        ordered = sorted(self.fields, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))
        parts += [f"{key} {show(self.fields[key], key)}" for key in ordered]
        if rate > 0:
            parts.append(f"{rate:,.4g} {self.unit}/s")
        return ", ".join(parts)


class PlainDisplay:
    """Lines for a log file: one at the start, at most one every ten seconds, one at the end."""

    def __init__(self, stream: TextIO, every_s: float = LINE_EVERY_S) -> None:
        self._stream, self._every_s = stream, every_s
        self._work = TaskProgress()
        self._last_line = 0.0
        self._is_open = False

    def begin(self, name: str, total: float, unit: str) -> None:
        self._work = TaskProgress(name, total, unit)
        self._last_line = time.monotonic()
        self._is_open = True

    def advance(self, done: float, **fields: float | str) -> None:
        self._work.update(done, fields)
        if time.monotonic() - self._last_line >= self._every_s:
            self._last_line = time.monotonic()
            self._print(f"{self._work.name}: {self._work}")

    def note(self, text: str) -> None:
        self._print(text)

    def end(self) -> None:
        took = time.monotonic() - self._work.started
        if self._is_open and took >= 1.0:
            fields = "".join(f", {key} {show(value)}" for key, value in self._work.fields.items())
            count = f"{self._work.done:,.0f} {self._work.unit} in " if self._work.done else ""
            self._print(f"{self._work.name}: {count}{duration(took)}{fields}")
        self._is_open = False

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveDisplay:
    """Redraws one line; notes scroll past above it."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._live: Live | None = None
        self._work = TaskProgress()

    def begin(self, name: str, total: float, unit: str) -> None:
        from rich.live import Live

        self.end()
        self._work = TaskProgress(name, total, unit)
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def advance(self, done: float, **fields: float | str) -> None:
        self._work.update(done, fields)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1), expand=False)
        bar = ProgressBar(total=self._work.total or None, completed=self._work.done, width=14)
        words = Text(str(self._work), overflow="ellipsis", no_wrap=True)
        table.add_row(Text(self._work.name, style="bold"), bar, words)
        return table


def show(value: float | str, key: str = "") -> str:
    """Formats a number short enough to read at a glance."""
    if isinstance(value, str):
        return value
    if key == "mfu":
        return f"{value:.0%}"
    return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Formats seconds as `8.3 s` under a minute, as `h:mm:ss` from then on."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
