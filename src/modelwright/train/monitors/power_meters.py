"""Meters of the energy of this process or host: Intel and AMD processors (RAPL), NVIDIA GPUs (NVML), and models for
machines without them.

A meter counts joules from its start. If it can no longer be read it raises `OSError`, and `EnergyMonitor` continues
without it.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

POWERCAP = Path("/sys/class/powercap")
MEMORY_WATTS_PER_GB = 0.3725
"""Lannelongue et al. 2021 (Green Algorithms), after Karyakin and Salem 2017."""


class PowerMeter(Protocol):
    """A source of energy readings."""

    @property
    def name(self) -> str: ...

    def joules(self) -> float:
        """Joules since the meter was made. Raises `OSError` if it cannot be read."""
        ...


class RaplMeter:
    """Processor packages, and the memory of those that measure it, of the whole host: other processes count, too."""

    def __init__(self, domains: Sequence[Path], *, name: str) -> None:
        self.name = name
        self._ranges = {domain: int((domain / "max_energy_range_uj").read_text()) for domain in domains}
        self._last = {domain: self._read(domain) for domain in domains}
        self._microjoules = 0

    def joules(self) -> float:
        """See `PowerMeter`. Must be called more often than a counter wraps around, which takes a minute or more."""
        for domain, before in self._last.items():
            now = self._read(domain)
            # A counter starts again at 0 beyond its range.
            self._microjoules += now - before if now >= before else now + self._ranges[domain] - before
            self._last[domain] = now
        return self._microjoules / 1e6

    @staticmethod
    def _read(domain: Path) -> int:
        return int((domain / "energy_uj").read_text())


def rapl_meters(folder: Path = POWERCAP) -> list[PowerMeter]:
    """Meters of processors (`rapl`) and memory (`rapl_memory`) that this process may read (often only root may)."""
    packages: list[Path] = []
    memory: list[Path] = []
    for domain in sorted(folder.glob("intel-rapl:*")):
        try:
            kind = (domain / "name").read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if os.access(domain / "energy_uj", os.R_OK):
            packages += [domain] * kind.startswith("package")
            memory += [domain] * (kind == "dram")
    kinds = {"rapl": packages, "rapl_memory": memory}
    return [RaplMeter(domains, name=name) for name, domains in kinds.items() if domains]


class NvmlMeter:
    """Meter of one NVIDIA GPU (Volta and later) with all of its processes."""

    name = "nvml"

    def __init__(self, read_mj: Callable[[], int]) -> None:
        self._read_mj = read_mj
        # NVML counts since the driver was loaded.
        self._start_mj = read_mj()

    def joules(self) -> float:
        return (self._read_mj() - self._start_mj) / 1e3


def nvml_meters(bus_id: str) -> list[PowerMeter]:
    """Returns the meter of the GPU with this PCI bus id; none without the driver's library or a counter of energy."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(handle)):
            return []
        return [NvmlMeter(lambda: _total_mj(library, handle))]
    except (OSError, AttributeError):
        return []


def _total_mj(library: ctypes.CDLL, handle: ctypes.c_void_p) -> int:
    millijoules = ctypes.c_ulonglong()
    if code := library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
        raise OSError(f"NVML cannot read the GPU's energy (code {code})")
    return millijoules.value


class CoreTimeModel:
    """Estimate: this process's CPU time times the power of one core (Lannelongue et al. 2021)."""

    name = "cores_model"

    def __init__(self, watts_per_core: float, *, cpu_s: Callable[[], float] = time.process_time) -> None:
        self._watts, self._cpu_s = watts_per_core, cpu_s
        self._start_s = cpu_s()

    def joules(self) -> float:
        return self._watts * (self._cpu_s() - self._start_s)


class MemoryModel:
    """Estimate: this process's resident memory times the power of a gigabyte, over time."""

    name = "memory_model"

    def __init__(
        self, *, resident_bytes: Callable[[], int] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._resident_bytes, self._clock = resident_bytes or _resident_bytes, clock
        self._last_s = clock()
        self._joules = 0.0

    def joules(self) -> float:
        now_s = self._clock()
        self._joules += MEMORY_WATTS_PER_GB * self._resident_bytes() / 1e9 * (now_s - self._last_s)
        self._last_s = now_s
        return self._joules


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
