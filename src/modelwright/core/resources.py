"""Resources of the process and the machine: peak memory of a piece of work, hardware, versions, commit."""

import contextlib
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any


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
