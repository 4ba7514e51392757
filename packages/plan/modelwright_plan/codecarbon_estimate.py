"""codecarbon's figure for a job on this machine: a few seconds under load, extended over the job."""

import time
from dataclasses import dataclass

import torch

from modelwright.core.errors import ConfigError
from modelwright.train.monitors.codecarbon_tracker import CodecarbonReading, CodecarbonTracker

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
    tracker = CodecarbonTracker(country, setting="--country", pue=1.0, read_every_s=_READ_EVERY_S)
    try:
        _compute(load_s)
    finally:
        reading = tracker.stop()
    if reading is None:
        raise ConfigError("--country: codecarbon cannot track this machine; leave the option out")
    return _estimate(reading, hours)


def _estimate(reading: CodecarbonReading, hours: float) -> CodecarbonEstimate:
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


def _compute(seconds: float) -> None:
    """Keep all of PyTorch's threads busy."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = torch.rand(_MATRIX_DIM, _MATRIX_DIM, device=device)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        torch.mm(one, one)
        if device == "cuda":
            torch.cuda.synchronize()
