"""The start of a job that causes the least carbon dioxide, by an hourly table of the electricity's carbon intensity;
and codecarbon's estimate of a job: a few seconds under load on this machine, extrapolated to the job.
"""

import csv
import datetime
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from modelwright.core.config import ConfigError, DataError
from modelwright.train.monitors.energy import CodecarbonTracker

HOUR = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class CarbonTable:
    """Grams of carbon dioxide per kWh for each hour from `start` on."""

    start: datetime.datetime
    g_per_kwh: Sequence[float]

    def mean(self, first_hour: int, hours: float) -> float:
        """Returns the mean intensity over a job of constant power that starts with an hour of the table."""
        whole = math.floor(hours)
        rest = hours - whole
        total = sum(self.g_per_kwh[first_hour : first_hour + whole])
        return (total + (rest * self.g_per_kwh[first_hour + whole] if rest else 0.0)) / hours


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of a job and its emissions."""

    time: datetime.datetime
    g_per_kwh: float
    co2_g: float


@dataclass(frozen=True, kw_only=True)
class StartPlan:
    """The first possible start, and the one with the least emissions."""

    at_once: Start
    best: Start

    @property
    def saved_share(self) -> float:
        return 1 - self.best.co2_g / self.at_once.co2_g if self.at_once.co2_g else 0.0


def read_carbon_table(path: Path) -> CarbonTable:
    """Reads a CSV file with the columns `time` (ISO 8601, every full hour) and `g_per_kwh`. Raises `DataError` that
    names the file and the line.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: is not a CSV file ({error})") from None
    if not rows or not {"time", "g_per_kwh"} <= rows[0].keys():
        raise DataError(f"{path}: needs the columns time and g_per_kwh, and at least one hour")
    hours = list[tuple[datetime.datetime, float]]()
    for line, row in enumerate(rows, start=2):
        try:
            hour, value = datetime.datetime.fromisoformat(row["time"]), float(row["g_per_kwh"])
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}:{line}: {error}; write 2026-01-31T14:00 and grams per kWh") from None
        if (hour.minute, hour.second, hour.microsecond) != (0, 0, 0) or not 0 <= value < math.inf:
            raise DataError(f"{path}:{line}: needs a full hour and an intensity from 0 on, got {row['time']}, {value}")
        hours.append((hour, value))
    for line, ((before, _), (after, _)) in enumerate(itertools.pairwise(hours), start=3):
        if after - before != HOUR:
            raise DataError(f"{path}:{line}: {after.isoformat()} must be one hour after {before.isoformat()}")
    return CarbonTable(hours[0][0], [value for _, value in hours])


def plan_start(
    table: CarbonTable,
    *,
    hours: float,
    watts: float,
    earliest: datetime.datetime | None = None,
    finish_by: datetime.datetime | None = None,
) -> StartPlan:
    """Finds the start at a full hour that causes the least carbon dioxide; among equal ones, the first.

    hours, watts: length and constant power of the job; earliest, finish_by: bounds, by default those of the table.
    Raises `ConfigError` if the job does not fit.
    """
    if not 0 < hours < math.inf or not 0 < watts < math.inf:
        raise ConfigError(f"--hours, --watts: must be above 0, got {hours} and {watts}")
    last = len(table.g_per_kwh) - math.ceil(hours)
    possible = [
        first
        for first in range(last + 1)
        if (earliest is None or table.start + first * HOUR >= earliest)
        and (finish_by is None or table.start + first * HOUR + hours * HOUR <= finish_by)
    ]
    if not possible:
        end = table.start + len(table.g_per_kwh) * HOUR
        raise ConfigError(
            f"--hours: no {hours:g} hours fit between the earliest start and the latest end; the table has "
            f"{table.start.isoformat()} to {end.isoformat()}"
        )
    means = {first: table.mean(first, hours) for first in possible}
    starts = [
        Start(time=table.start + first * HOUR, g_per_kwh=mean, co2_g=mean * watts * hours / 1000)
        for first, mean in means.items()
    ]
    return StartPlan(at_once=starts[0], best=min(starts, key=lambda start: start.co2_g))


LOAD_S = 3.0
"""Seconds of matrix products on all threads under the tracker, enough for several of its readings."""
_READ_EVERY_S = 0.5
_MATRIX_DIM = 1024


@dataclass(frozen=True, kw_only=True)
class CodecarbonEstimate:
    """Energy and emissions of a job at the power that codecarbon measures under load."""

    version: str
    country: str
    watts: float
    """Power of processor, memory and accelerator, without the data center's overhead."""
    cpu_watts: float
    ram_watts: float
    gpu_watts: float
    g_per_kwh: float
    kwh: float
    co2_g: float


def codecarbon_estimate(country: str, *, hours: float, load_s: float = LOAD_S) -> CodecarbonEstimate:
    """Tracks a few seconds of matrix products on this machine and extrapolates their power to the job.

    country: ISO 3166 code of three letters, as FRA. Raises `ConfigError` if codecarbon is not installed, does not know
    the country or cannot track this machine.
    """
    tracker = CodecarbonTracker(country, setting="--country", pue=1.0, read_every_s=_READ_EVERY_S)
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        matrix = torch.rand(_MATRIX_DIM, _MATRIX_DIM, device=device)
        deadline = time.monotonic() + load_s
        while time.monotonic() < deadline:  # keeps all of PyTorch's threads busy
            torch.mm(matrix, matrix)
            if device == "cuda":
                torch.cuda.synchronize()
    finally:
        reading = tracker.stop()
    if reading is None:
        raise ConfigError("--country: codecarbon cannot track this machine; leave the option out")
    watts, g_per_kwh = reading.watts(reading.kwh), reading.co2_g / reading.kwh
    kwh = watts * hours / 1000
    return CodecarbonEstimate(
        version=reading.version,
        country=reading.country,
        watts=watts,
        cpu_watts=reading.watts(reading.cpu_kwh),
        ram_watts=reading.watts(reading.ram_kwh),
        gpu_watts=reading.watts(reading.gpu_kwh),
        g_per_kwh=g_per_kwh,
        kwh=kwh,
        co2_g=kwh * g_per_kwh,
    )
