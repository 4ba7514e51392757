"""Tracks codecarbon's estimate for this machine, offline, in addition to our own (optional extra `carbon`).

codecarbon models the power of processor and memory where it cannot read it, follows the whole machine, other processes
included, and takes one mean carbon intensity for a country.
"""

import importlib
import logging
import warnings
from dataclasses import dataclass
from typing import Any

from modelwright.core.errors import ConfigError
from modelwright.core.texts import did_you_mean

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
