"""Sums the energy and the carbon dioxide of a training, measured where the machine allows it, else estimated.

`energy.json` in the stage's folder has one entry for each process that trained the stage, so work that was repeated
after a crash counts twice, as its energy was used twice.

Meters count joules from their start, of this process or host: Intel and AMD processors (RAPL), NVIDIA GPUs (NVML), and
models for machines without them. One that can no longer be read raises `OSError`, and `EnergyMonitor` continues without
it. codecarbon (optional extra `carbon`, offline) gives a second estimate: it models the power of processor and memory
where it cannot read it, follows the whole machine, other processes included, and takes one mean carbon intensity for a
country.
"""

import ctypes
import importlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import ConfigError, constant, did_you_mean
from modelwright.core.resources import resident_bytes
from modelwright.train.technique import Runtime, StepInfo, Technique

ENERGY_FILE = "energy.json"


WRITE_EVERY_S = 10.0


SUM_EVERY_STEPS = 10
"""Steps between sums over several ranks, each one small message."""


JOULES_PER_KWH = 3.6e6


MEMORY_WATTS_PER_GB = 0.3725
"""Lannelongue et al. 2021 (Green Algorithms), after Karyakin and Salem 2017."""


POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, kw_only=True)
class EnergyConfig:
    """Factors from which the energy and the carbon dioxide of a training are computed where they are not measured."""

    watts_per_core: float = constant(12.0)
    """Power of one busy core where the processor cannot be measured: its TDP over its cores. The default is that of
    Green Algorithms (Lannelongue et al. 2021) for an unknown processor."""
    pue: float = 1.56
    """Power usage effectiveness: energy of the data center per energy of its computers. The default is the mean of the
    Uptime Institute's survey of 2024; a desktop has 1."""
    carbon_g_per_kwh: float = 445.0
    """Carbon dioxide per energy, in grams per kWh. The default is the mean of the world's electricity in 2024 (IEA,
    Electricity 2025)."""
    country: str = ""
    """Country of an additional estimate by codecarbon, as its ISO 3166 code of three letters, such as FRA (needs the
    extra `carbon`); "" for none."""

    def __post_init__(self) -> None:
        for name in ("watts_per_core", "carbon_g_per_kwh"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}")
        if self.pue < 1:
            raise ConfigError(f"pue: must be at least 1, got {self.pue}; 1 is without cooling and losses")


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

        def total_mj() -> int:
            millijoules = ctypes.c_ulonglong()
            if code := library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
                raise OSError(f"NVML cannot read the GPU's energy (code {code})")
            return millijoules.value

        return [NvmlMeter(total_mj)]
    except (OSError, AttributeError):
        return []


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
        self, *, resident_bytes: Callable[[], int] = resident_bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._resident_bytes, self._clock = resident_bytes, clock
        self._last_s = clock()
        self._joules = 0.0

    def joules(self) -> float:
        now_s = self._clock()
        self._joules += MEMORY_WATTS_PER_GB * self._resident_bytes() / 1e9 * (now_s - self._last_s)
        self._last_s = now_s
        return self._joules


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
        return kwh * JOULES_PER_KWH / self.seconds


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


_SOURCES = ("rapl", "rapl_memory", "nvml", CoreTimeModel.name, MemoryModel.name)


MEASURED = frozenset(_SOURCES[:3])
"""The sources that are readings; the others are estimates."""


class EnergyMonitor:
    """Sums meters over the ranks and keeps the sum in a file of the first rank."""

    def __init__(
        self,
        meters: Sequence[PowerMeter],
        config: EnergyConfig,
        *,
        path: Path | None,
        sums: Callable[[Sequence[float]], list[float]],
        note: Callable[[str], None],
        sum_every: int,
        last_step: int,
        codecarbon: CodecarbonTracker | None = None,
    ) -> None:
        self.meters, self.config, self.path, self.sums, self.note = list(meters), config, path, sums, note
        self.sum_every, self.last_step, self.codecarbon = sum_every, last_step, codecarbon
        self.earlier = read_energy(path) if path else []
        self.joules: dict[str, float] = {}
        self.num_tokens = self._new_tokens = 0
        self._known = dict.fromkeys(_SOURCES, 0.0)
        self._started_s = self._written_s = time.monotonic()

    def observe(self, info: StepInfo) -> None:
        """Read the meters; sum them over the ranks every `sum_every` steps."""
        self._new_tokens += info.num_tokens
        for meter in list(self.meters):
            try:
                self._known[meter.name] = meter.joules()
            except (OSError, ValueError) as error:
                self.meters.remove(meter)
                self.note(f"energy: {meter.name} can no longer be read and does not count from here on ({error})")
        if info.step % self.sum_every and info.step != self.last_step:
            return
        # Collective: a rank sends all sources, with 0 for those that it lacks, so that the messages have one form.
        totals = self.sums([self._known[name] for name in _SOURCES])
        self.joules = {name: total for name, total in zip(_SOURCES, totals, strict=True) if total}
        self.num_tokens = self._new_tokens
        if time.monotonic() - self._written_s >= WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write the sum so far as this process's entry of the file. A full disk does not end the run."""
        self._written_s = time.monotonic()  # also after a failure, so that a full disk is not tried at every step
        if self.path is None or not self.num_tokens:
            return
        reading = self.codecarbon.read() if self.codecarbon is not None else None
        entry = {
            **({"codecarbon": asdict(reading)} if reading else {}),
            "joules": self.joules,
            "seconds": time.monotonic() - self._started_s,
            "num_tokens": self.num_tokens,
            "pue": self.config.pue,
            "carbon_g_per_kwh": self.config.carbon_g_per_kwh,
            "watts_per_core": self.config.watts_per_core,
        }
        try:
            write_atomic(self.path, json.dumps([*self.earlier, entry], indent=1))
        except OSError as error:
            self.note(f"energy: {self.path} cannot be written ({error})")

    def close(self) -> None:
        """Write the sum of the run, with codecarbon's last reading."""
        if self.codecarbon is not None and self.codecarbon.stop() is None:
            self.note("energy: codecarbon cannot track this machine; its estimate is left out")
        self.write()


def energy_monitor(config: EnergyConfig, run: Runtime) -> Technique | None:
    """Returns None for a step that is only traced, and for ranks that do not make their updates together."""
    if run.mesh.world.size < run.world.size or (run.log_event is None and run.world.size == 1):
        return None
    is_host_first = int(os.environ.get("LOCAL_RANK", run.world.rank)) == 0
    codecarbon = None
    if config.country and run.log_event is not None:
        codecarbon = CodecarbonTracker(
            config.country, setting="energy.country", pue=config.pue, read_every_s=WRITE_EVERY_S
        )
    monitor = EnergyMonitor(
        meters_of_rank(config, run.world.device, is_host_first=is_host_first),
        config,
        path=run.folder / ENERGY_FILE if run.log_event is not None else None,
        sums=run.mesh.world.sums,
        note=run.note,
        sum_every=1 if run.world.size == 1 else SUM_EVERY_STEPS,
        last_step=run.num_steps,
        codecarbon=codecarbon,
    )
    run.on_exit.callback(monitor.close)
    return Technique(name="energy", on_step_end=monitor.observe, needs=frozenset())


def meters_of_rank(
    config: EnergyConfig, device: torch.device, *, is_host_first: bool, rapl: Sequence[PowerMeter] | None = None
) -> list[PowerMeter]:
    """Returns the meters of this rank: its GPU, and its cores and memory, by models unless RAPL measures them."""
    # RAPL counts the whole host, so only the host's first rank reads it.
    readable = rapl_meters() if rapl is None else list(rapl)
    meters = [meter for meter in readable if is_host_first]
    measured = {meter.name for meter in readable}
    if "rapl" not in measured:
        meters.append(CoreTimeModel(config.watts_per_core))
    if "rapl_memory" not in measured and Path("/proc/self/statm").exists():
        meters.append(MemoryModel())
    if device.type == "cuda":
        gpu = cast(Any, torch.cuda.get_device_properties(device))  # pyright: ignore[reportUnknownMemberType]
        meters += nvml_meters(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    return meters


def read_energy(path: Path) -> list[dict[str, Any]]:
    """The entries of all processes that trained the stage; none if the file is missing or damaged."""
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return cast(list[dict[str, Any]], entries) if isinstance(entries, list) else []


@dataclass(frozen=True, kw_only=True)
class CodecarbonTotal:
    """codecarbon's estimate of a stage, over the processes that had one."""

    version: str
    country: str
    joules: float
    """Total joules, PUE included."""
    co2_g: float
    num_tokens: int
    seconds: float
    num_processes: int


@dataclass(frozen=True, kw_only=True)
class EnergyTotal:
    """The energy of a stage, over all processes that trained it."""

    joules: dict[str, float]
    """Joules by source, without the data center's overhead (PUE)."""
    total_joules: float
    """Joules of all sources, PUE included."""
    co2_g: float
    num_tokens: int
    seconds: float
    codecarbon: "CodecarbonTotal | None" = None

    @property
    def joules_per_token(self) -> float:
        return self.total_joules / max(1, self.num_tokens)

    @property
    def measured_share(self) -> float:
        """Share of the energy that was read and not estimated."""
        read = sum(value for name, value in self.joules.items() if name in MEASURED)
        return read / max(1e-12, sum(self.joules.values()))


def total_energy(entries: Sequence[dict[str, Any]]) -> EnergyTotal:
    """Sum the entries of `energy.json`."""
    joules: dict[str, float] = {}
    total = co2_g = 0.0
    for entry in entries:
        for name, value in entry["joules"].items():
            joules[name] = joules.get(name, 0.0) + value
        # By the entry's own factors: a resumed run may have other settings.
        used = sum(entry["joules"].values()) * entry["pue"]
        total += used
        co2_g += used / JOULES_PER_KWH * entry["carbon_g_per_kwh"]
    codecarbon = None
    if tracked := [entry for entry in entries if "codecarbon" in entry]:
        readings = [entry["codecarbon"] for entry in tracked]
        codecarbon = CodecarbonTotal(
            version=readings[-1]["version"],
            country=", ".join(dict.fromkeys(reading["country"] for reading in readings)),
            joules=JOULES_PER_KWH * sum(reading["kwh"] for reading in readings),
            co2_g=sum(reading["co2_g"] for reading in readings),
            num_tokens=sum(entry["num_tokens"] for entry in tracked),
            seconds=sum(reading["seconds"] for reading in readings),
            num_processes=len(readings),
        )
    return EnergyTotal(
        joules=joules,
        total_joules=total,
        co2_g=co2_g,
        num_tokens=sum(entry["num_tokens"] for entry in entries),
        seconds=sum(entry["seconds"] for entry in entries),
        codecarbon=codecarbon,
    )
