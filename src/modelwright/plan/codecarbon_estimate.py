"""codecarbon's figure for a job on this machine, offline: an estimate beside our own (optional extra `carbon`).

codecarbon models the power of processor and memory where it cannot read it, and takes one mean intensity for a country.
"""

import importlib
import logging
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from modelwright.core.errors import ConfigError
from modelwright.core.suggest import did_you_mean

LOAD_S = 3.0
"""Seconds of matrix products on all threads under the tracker, as long as several of its readings."""
_READ_EVERY_S = 0.5
_MATRIX_DIM = 1024


@dataclass(frozen=True, kw_only=True)
class CodecarbonEstimate:
    """A job as long as it was given, at the power that codecarbon finds under load."""

    version: str
    country: str
    watts: float
    """Processor, memory and accelerator, without the data center's overhead."""
    cpu_watts: float
    ram_watts: float
    gpu_watts: float
    g_per_kwh: float
    kwh: float
    co2_g: float


def codecarbon_estimate(country: str, *, hours: float, load_s: float = LOAD_S) -> CodecarbonEstimate:
    """Track a few seconds of products here and extend their power over the job.

    country: ISO 3166 code of three letters, as FRA. Raises `ConfigError` if codecarbon is not installed, does not know
    the country or cannot track this machine.
    """
    package = _codecarbon()
    code = _known_country(package, country)
    logging.getLogger("codecarbon").setLevel(logging.CRITICAL)  # it logs before it reads its own level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tracker = package.OfflineEmissionsTracker(
            country_iso_code=code,
            output_methods=[],  # neither files nor its API
            emissions_endpoint=None,
            electricitymaps_api_token=None,
            force_carbon_intensity_g_co2e_kwh=None,
            allow_multiple_runs=True,
            tracking_mode="machine",
            measure_power_secs=_READ_EVERY_S,
            pue=1.0,
            log_level="critical",
        )
        tracker.start()
        try:
            _compute(load_s)
        finally:
            tracker.stop()
    data = getattr(tracker, "final_emissions_data", None)
    if data is None or not data.energy_consumed or not data.duration:
        raise ConfigError("--country: codecarbon cannot track this machine; leave the option out")
    return _estimate(data, code, hours)


def _estimate(data: Any, country: str, hours: float) -> CodecarbonEstimate:
    """codecarbon counts kWh and kg."""
    seconds = data.duration
    watts = {part: getattr(data, f"{part}_energy") * 3.6e6 / seconds for part in ("cpu", "ram", "gpu")}
    total = data.energy_consumed * 3.6e6 / seconds
    g_per_kwh = 1000 * data.emissions / data.energy_consumed
    kwh = total * hours / 1000
    return CodecarbonEstimate(
        version=data.codecarbon_version,
        country=country,
        watts=total,
        cpu_watts=watts["cpu"],
        ram_watts=watts["ram"],
        gpu_watts=watts["gpu"],
        g_per_kwh=g_per_kwh,
        kwh=kwh,
        co2_g=kwh * g_per_kwh,
    )


def _codecarbon() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("codecarbon")
    except ImportError:
        raise ConfigError(
            "--country: needs codecarbon, which is not installed; install it: pip install 'modelwright[carbon]'"
        ) from None


def _known_country(package: Any, country: str) -> str:
    """The code in capitals. codecarbon itself takes the mean of the world for a country that it does not know."""
    known = importlib.import_module(f"{package.__name__}.input").DataSource().get_global_energy_mix_data()
    code = country.upper()
    if code not in known:
        raise ConfigError(
            f"--country: codecarbon knows no country {country!r}; write its ISO 3166 code of three letters, such as "
            f"FRA{did_you_mean(code, list(known))}"
        )
    return code


def _compute(seconds: float) -> None:
    """Keep all of PyTorch's threads busy."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = torch.rand(_MATRIX_DIM, _MATRIX_DIM, device=device)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        torch.mm(one, one)
        if device == "cuda":
            torch.cuda.synchronize()
