"""Measures the cores that other processes use while this one measures something."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from modelwright.core.resources import load, num_usable_cores

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Columns of a processor's line in /proc/stat that count idle time and time of waiting for a disk, see proc(5)."""
_GUEST = 8
"""First column whose times the columns before it include: guests' time is also the user time of the host."""

PERIOD_S = 0.2
"""The shortest time over which the use of cores is known well enough; the system counts in hundredths of a second."""
MISSING_CORES = 0.25
"""Cores that the system itself always uses; a smaller lack of cores is not reported."""


class LoadMeter(Protocol):
    """Meter of the load that other processes cause. Tests provide their own."""

    def begin(self) -> None:
        """Start a new period."""

    def seconds(self) -> float:
        """Seconds since the period began."""
        ...

    def other_cores(self) -> float:
        """Cores that other processes used on average in the period, of those that this process may run on."""
        ...


class OtherProcesses:
    """`LoadMeter` of this machine, from /proc/stat, or from the load average of the last minute without it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._began, self._own, self._all = time.monotonic(), time.process_time(), _busy_seconds()

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def other_cores(self) -> float:
        own = (time.process_time() - self._own) / max(self.seconds(), 1e-3)
        if self._all is None:
            return max(0.0, load() - own)
        busy = (_busy_seconds() or 0.0) - self._all
        return max(0.0, busy / max(self.seconds(), 1e-3) - own)


def missing_cores(other_cores: float, num_threads: int) -> float:
    """Number of this process's threads that were waiting for a core."""
    return max(0.0, min(num_threads, other_cores + num_threads - num_usable_cores()))


def busy_machine(others: LoadMeter, num_threads: int, *, sleep: Callable[[float], None] = time.sleep) -> str:
    """Returns a warning if other processes leave this one fewer cores than its threads, else ""; takes `PERIOD_S`."""
    # A fresh period, so that earlier load does not count.
    others.begin()
    sleep(PERIOD_S)
    cores = others.other_cores()
    if missing_cores(cores, num_threads) < MISSING_CORES:
        return ""
    return (
        f"busy machine: other processes use {cores:.1f} of {num_usable_cores()} cores; training takes longer than it "
        "would alone, and times that are measured meanwhile say little"
    )


def _busy_seconds() -> float | None:
    """Time for which the usable processors have been busy since the machine started; None without /proc/stat."""
    try:
        lines = _STAT.read_text().splitlines()
    except OSError:
        return None
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}  # the line "cpu" is the sum of all, usable or not
    ticks = 0
    for line in lines:
        name, *columns = line.split()
        if name in usable:
            ticks += sum(int(n) for place, n in enumerate(columns[:_GUEST]) if place not in _IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")
