"""Resources of the process and the machine: peak memory of a piece of work, hardware, versions, the cores that others
use while this process measures something, and the source tree that this package is run from.
"""

import contextlib
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from modelwright.core.config import ConfigError


class ResourceUse:
    """Wall time, CPU time (ended child processes included) and peak resident memory of the `with` block. Linux can
    reset the peak (`/proc/self/clear_refs`), so that each block has its own; elsewhere the peak is that of the whole
    process so far.
    """

    wall_s = 0.0
    cpu_s = 0.0
    peak_bytes = 0

    def __enter__(self) -> "ResourceUse":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.wall_s = time.perf_counter() - self._wall
        self.cpu_s = _cpu_seconds() - self._cpu
        self.peak_bytes = peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak resident memory of this process in bytes, since the last reset if the system can reset it."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux


def resident_bytes() -> int:
    """Resident memory of this process now, in bytes; its peak where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident_bytes()


def num_usable_cores() -> int:
    """Cores that this process may run on (its affinity mask, not the machine's count)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_num_threads() -> int:
    """Threads for a run that names no number: the usable cores, at most `OMP_NUM_THREADS`, as in every OpenMP program.
    Launchers set that variable for each process that they start (torchrun sets it to 1), where it says nothing about
    the cores that all of them share.
    """
    limit = "" if "LOCAL_WORLD_SIZE" in os.environ else os.environ.get("OMP_NUM_THREADS", "")
    return min(num_usable_cores(), int(limit)) if limit.isdigit() and int(limit) else num_usable_cores()


def load() -> float:
    """Runnable processes, mean over the last minute; 0 if the system does not report it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def hardware() -> dict[str, Any]:
    """Describes the machine: processor, cores, memory in bytes, operating system, Python."""
    processor = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": processor or platform.processor() or platform.machine(),
        "cores": num_usable_cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Installed versions by package name; packages that are not installed are left out."""
    result: dict[str, str] = {}
    for package in packages:
        try:
            result[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def git_commit(folder: Path) -> str:
    """Returns the commit checked out in `folder` ("-dirty" when files differ), or "" outside a checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


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


CHECKOUT_FILES = ("pyproject.toml", "README.md", "LICENSE", "constraints.txt")
"""Files that an installation needs in addition to `src`. Containers and rented machines install the package from the
tree, because the name `modelwright` on PyPI belongs to another project."""
PINNED_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The Python for which the versions in constraints.txt are known to exist."""


def source_checkout(setting: str) -> Path:
    """Returns the root of the source tree. setting: option that needs it, for the error. Raises `ConfigError` if this
    package was installed without the tree.
    """
    root = Path(__file__).resolve().parents[3]
    missing = [name for name in CHECKOUT_FILES if not (root / name).is_file()]
    if missing:
        raise ConfigError(
            f"{setting}: needs the source tree of this package, and {root} lacks {missing[0]}; run the command from a "
            "checkout in which the package is installed with pip install -e ."
        )
    return root
