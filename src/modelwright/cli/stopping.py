"""Ctrl-C and SIGTERM mean the same in every command: an exception in the main thread, and if that does not end the
command, the end of the process. Training and the server have their own handlers, which stop gracefully.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Self

from modelwright.core.errors import Stopped

GRACE_S = 5.0
"""Time for a call into a library to return to Python, which alone can raise an exception."""
LEAVING_S = 120
"""Time for a process whose parent has gone to save or to finish answers."""


class StopSignals:
    """Within the block, from `listen` on, Ctrl-C raises `KeyboardInterrupt` and SIGTERM `SystemExit`. received: signals
    so far. If the block does not end within `GRACE_S` of a signal, because a call does not return or a library has
    swallowed the exception, `give_up` is called with the signal and the process ends at once. is_last: the process ends
    after the block, silently if a signal ended it; spared: signals that the command may survive. Does nothing outside
    the main thread, where Python handles no signals.
    """

    def __init__(self, give_up: Callable[[int], object], *, is_last: bool, spared: Sequence[int] = ()) -> None:
        self.received: list[int] = []
        self._give_up, self._is_last, self._spared = give_up, is_last, spared
        self._before: dict[signal.Signals, Any] = {}
        self._has_ended = threading.Event()
        self._pipe = self._pipe_before = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            reading, self._pipe = os.pipe()
            # Python's own signal handler writes to the pipe, which must never block it.
            os.set_blocking(self._pipe, False)
            self._pipe_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reading,), name="stop", daemon=True).start()
        return self

    def listen(self) -> None:
        """Install the handlers. Call it where the exceptions that they raise are caught, because a signal may be
        pending.
        """
        if self._pipe == -1:
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # nohup, or a shell's background job: that stays so
                self._before[number] = before
                signal.signal(number, self._on_signal)

    def __exit__(self, *error: object) -> None:
        if self._pipe == -1:
            return
        self._has_ended.set()
        # The handlers go first: a signal that comes after them must not raise into the code after the block.
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if self._is_last else handler)
        signal.set_wakeup_fd(self._pipe_before)
        os.close(self._pipe)  # which ends `_watch`

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Recorded before the exception: code that swallows it must not hide that a signal came.
        self.received.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _watch(self, reading: int) -> None:
        """Runs in its own thread: Python writes the number of each signal to the pipe before any handler runs."""
        while came := os.read(reading, 1):
            number = came[0]
            if number not in self._spared and signal.getsignal(number) == self._on_signal:
                break
        os.close(reading)
        if came and not self._has_ended.wait(GRACE_S):
            try:
                self._give_up(came[0])
            finally:
                os._exit(128 + came[0])


def leave_with_parent() -> None:
    """Send SIGTERM to this process once its parent has changed, because a killed parent cannot notify anyone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LEAVING_S)
        os._exit(Stopped.exit_code)  # it waits for other processes in a call that no signal interrupts

    threading.Thread(target=watch, daemon=True).start()
