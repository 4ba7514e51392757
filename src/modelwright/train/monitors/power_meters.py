"""Meters of the energy of this process or host: Intel and AMD processors (RAPL), NVIDIA GPUs (NVML), models for
machines without them, and codecarbon's estimate in addition to our own (optional extra `carbon`, offline).

A meter counts joules from its start. If it can no longer be read it raises `OSError`, and `EnergyMonitor` continues
without it. codecarbon models the power of processor and memory where it cannot read it, follows the whole machine,
other processes included, and takes one mean carbon intensity for a country.
"""

import ctypes
import importlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from modelwright.core.errors import ConfigError
from modelwright.core.texts import did_you_mean

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


_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True)
class CodecarbonReading:
    """codecarbon's totals since it was started."""

    version: str
    country: str
    seconds: float
    cpu_kwh: float
    ram_kwh: float
    gpu_kwh: float
    kwh: float
    co2_g: float

    def watts(self, kwh: float) -> float:
        """The mean power of a part of the energy."""
        return kwh * _JOULES_PER_KWH / self.seconds


class CodecarbonTracker:
    """Runs codecarbon in a background thread until it is stopped. After an error in codecarbon it counts nothing."""

    def __init__(self, country: str, *, setting: str, pue: float, read_every_s: float) -> None:
        """country, setting: see `known_country`; pue: energy of the data center per energy of its computers."""
        package, self.country = _package(setting), known_country(country, setting)
        self._sums = _SumsReceiver()
        logging.getLogger("codecarbon").setLevel(logging.CRITICAL)  # it logs before it reads its own level
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._tracker = package.OfflineEmissionsTracker(
                country_iso_code=self.country,
                output_methods=[],  # neither files nor its API
                output_handlers=[self._sums],
                api_call_interval=1,  # at each of its readings
                emissions_endpoint=None,
                electricitymaps_api_token=None,
                force_carbon_intensity_g_co2e_kwh=None,
                allow_multiple_runs=True,
                tracking_mode="machine",
                measure_power_secs=read_every_s,
                pue=pue,
                log_level="critical",
            )
            self._tracker.start()

    def read(self) -> CodecarbonReading | None:
        """The sums until its last reading; None if it cannot track this machine, or has read nothing yet."""
        total = self._sums.total
        if total is None or not total.energy_consumed or not total.duration:
            return None
        return CodecarbonReading(
            version=total.codecarbon_version,
            country=self.country,
            seconds=total.duration,
            cpu_kwh=total.cpu_energy,
            ram_kwh=total.ram_energy,
            gpu_kwh=total.gpu_energy,
            kwh=total.energy_consumed,
            co2_g=1000 * total.emissions,
        )

    def stop(self) -> CodecarbonReading | None:
        """End its thread, after a last reading, which is returned."""
        self._tracker.stop()
        return self.read()


@dataclass(eq=False)
class _SumsReceiver:
    """An output of codecarbon (its BaseOutput) that keeps the newest totals."""

    total: Any = None

    def live_out(self, total: Any, delta: Any) -> None:
        """Called by codecarbon at each of its readings, and as `out` once with the final totals."""
        self.total = total

    out = live_out

    def exit(self) -> None:
        """Called by codecarbon after `out`."""


def known_country(country: str, setting: str) -> str:
    """Returns the country's ISO 3166 code of three letters, in capitals. setting: names the option, for errors. Raises
    `ConfigError` if codecarbon is not installed or does not know the country.
    """
    package = _package(setting)
    # Checked here, because codecarbon silently takes the world's mean for a country that it does not know.
    known = importlib.import_module(f"{package.__name__}.input").DataSource().get_global_energy_mix_data()
    code = country.upper()
    if code not in known:
        raise ConfigError(
            f"{setting}: codecarbon knows no country {country!r}; write its ISO 3166 code of three letters, such as "
            f"FRA{did_you_mean(code, list(known))}"
        )
    return code


def _package(setting: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("codecarbon")
    except ImportError:
        raise ConfigError(
            f"{setting}: needs codecarbon, which is not installed; install it: pip install 'modelwright[carbon]'"
        ) from None
