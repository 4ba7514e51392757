"""The interface by which long work reports its progress. `recipes/display.py` decides how it looks."""

from typing import Protocol


class Progress(Protocol):
    """Receives how far long work is; shows rate and time left."""

    def begin(self, name: str, total: float, unit: str) -> None:
        """A piece of work starts: `total` units of `unit` ("documents", "tokens", "steps"); 0 when unknown."""

    def advance(self, done: float, **fields: float | str) -> None:
        """`done` units are finished; `fields` are shown with them (loss, mfu, ...)."""

    def note(self, text: str) -> None:
        """Show one line that stays: a warning, a decision, a result."""

    def end(self) -> None:
        """The piece of work is over."""


class SilentProgress:
    """Shows nothing; for tests and for ranks other than the first."""

    def begin(self, name: str, total: float, unit: str) -> None: ...

    def advance(self, done: float, **fields: float | str) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...
