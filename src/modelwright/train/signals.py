"""SIGTERM and Ctrl-C become a request that the trainer handles between two steps."""

import os
import signal
import threading
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(eq=False)
class StopRequest:
    """A context in which a signal sets `requested` from 0 to its number. A second signal acts as it would before the
    block (usually: ends the process at once). Outside the main thread, where Python delivers no signals, it stays 0.
    """

    requested: int = 0
    _before: dict[int, Any] = field(default_factory=dict[int, Any])

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:  # the second signal goes to the handlers from before the block
            self._restore()
            os.kill(os.getpid(), number)
        self.requested = number

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
