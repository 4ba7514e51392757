"""Ends a process that hangs, with the stacks of all its threads in the log, so that a launcher can restart it.

A lost link or a collective that one rank never enters blocks a process inside C code without an error. The timer runs
in `faulthandler`'s own thread, which needs neither the interpreter's lock nor a healthy main thread. A process has only
one such timer.
"""

import faulthandler
from pathlib import Path
from typing import Self

from modelwright.core.errors import ConfigError, writing


class Watchdog:
    """Context that ends the process (exit status 1) if `alive` was not called for `limit_s` seconds; 0 disables it. The
    stacks are appended to `log`, which is removed afterwards if it is empty.
    """

    def __init__(self, log: Path, *, limit_s: float) -> None:
        if limit_s < 0:
            raise ConfigError(f"hang_after_s: must not be negative, got {limit_s}; 0 disables it")
        self.log = log
        self.limit_s = limit_s

    def __enter__(self) -> Self:
        if self.limit_s:
            with writing(self.log):
                self.log.parent.mkdir(parents=True, exist_ok=True)
                # Unbuffered and kept open, because faulthandler writes to the descriptor without Python's help.
                self._file = open(self.log, "ab", buffering=0)
            self.alive()
        return self

    def alive(self) -> None:
        """Reset the timer (some tens of microseconds)."""
        if self.limit_s:
            faulthandler.dump_traceback_later(self.limit_s, exit=True, file=self._file)

    def __exit__(self, *exception: object) -> None:
        if self.limit_s:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            if not self.log.stat().st_size:
                self.log.unlink()
