"""Sums the energy and the carbon dioxide of a training, measured where the machine allows it, else estimated.

`energy.json` in the stage's folder has one entry for each process that trained the stage, so work that was repeated
after a crash counts twice, as its energy was used twice.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ConfigError
from modelwright.train.monitors.power_meters import (
    CodecarbonTracker,
    CoreTimeModel,
    MemoryModel,
    PowerMeter,
    nvml_meters,
    rapl_meters,
)
from modelwright.train.technique import Runtime, StepInfo, Technique

ENERGY_FILE = "energy.json"
WRITE_EVERY_S = 10.0
SUM_EVERY_STEPS = 10
"""Steps between sums over several ranks, each one small message."""
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True)
class EnergyConfig:
    """Factors from which the energy and the carbon dioxide of a training are computed where they are not measured."""

    watts_per_core: float = 12.0
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


_SOURCES = ("rapl", "rapl_memory", "nvml", CoreTimeModel.name, MemoryModel.name)
MEASURED = frozenset(_SOURCES[:3])
"""The sources that are readings; the others are estimates."""


def energy_monitor(config: EnergyConfig, run: Runtime) -> Technique | None:
    """Returns None for a step that is only traced, and for ranks that do not make their updates together."""
    if run.mesh.world.size < run.world.size or (run.anomalies is None and run.world.size == 1):
        return None
    is_host_first = int(os.environ.get("LOCAL_RANK", run.world.rank)) == 0
    codecarbon = None
    if config.country and run.anomalies is not None:
        codecarbon = CodecarbonTracker(
            config.country, setting="energy.country", pue=config.pue, read_every_s=WRITE_EVERY_S
        )
    monitor = EnergyMonitor(
        meters_of_rank(config, run.world.device, is_host_first=is_host_first),
        config,
        path=run.folder / ENERGY_FILE if run.anomalies is not None else None,
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
