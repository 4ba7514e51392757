"""The accelerator's driver, CUDA and NCCL, its memory's bandwidth, and NCCL's all-reduce over several devices."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.cuda.nccl
import torch.distributed as dist

from modelwright.ops.microbenchmark import seconds_of
from modelwright.pipeline.estimate.probes.probe import (
    Probe,
    ProbeResult,
    ProbeSetting,
    ProbeUnavailable,
    rate_text,
    time_text,
)

DRIVER = Path("/proc/driver/nvidia/version")
COPY_BYTES = 256 * 2**20
LEAST_ROUNDS = 3
MOST_ROUNDS = 200


def driver_version(path: Path = DRIVER) -> str:
    """Returns the version of the NVIDIA kernel driver, "" without one."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return next((word for word in words if word.replace(".", "").isdecimal() and "." in word), "")


def _measure(setting: ProbeSetting) -> ProbeResult:
    if not torch.cuda.is_available():
        driver = driver_version()
        why = f"the driver {driver} is there, but PyTorch {torch.__version__} cannot use it" if driver else "no device"
        raise ProbeUnavailable(why)
    num_devices = torch.cuda.device_count()
    nccl: Any = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
    facts = {
        "devices": ", ".join(torch.cuda.get_device_name(number) for number in range(num_devices)),
        "driver": driver_version() or "unknown",
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, nccl)) or "none",
    }
    source = torch.ones(COPY_BYTES // 4, device="cuda")
    target, host = torch.empty_like(source), torch.empty(COPY_BYTES // 4, pin_memory=True)
    part_s = setting.budget_s / 4
    figures = {
        # A copy reads and writes each byte.
        "memory_bytes_per_s": 2 * COPY_BYTES / min(_times(lambda: target.copy_(source), part_s)),
        "to_host_bytes_per_s": COPY_BYTES / min(_times(lambda: host.copy_(source), part_s)),
    }
    if num_devices > 1 and nccl:
        figures |= _nccl_figures(num_devices, part_s)
    return ProbeResult(state="measured", figures=figures, facts=facts)


def _nccl_figures(num_devices: int, part_s: float) -> dict[str, float]:
    """Times an all-reduce over all devices of this host, of one number and of a large tensor."""

    def reduce(tensors: Sequence[torch.Tensor]) -> None:
        torch.cuda.nccl.all_reduce(tensors)
        for number in range(num_devices):
            torch.cuda.synchronize(number)

    small, large = (
        [torch.zeros(length, device=f"cuda:{number}") for number in range(num_devices)]
        for length in (1, COPY_BYTES // 4)
    )
    return {
        "nccl_latency_s": float(np.median(_times(lambda: reduce(small), part_s))),
        "nccl_bytes_per_s": COPY_BYTES / float(np.median(_times(lambda: reduce(large), part_s))),
    }


def _times(call: Callable[[], object], budget_s: float) -> list[float]:
    call()
    times, deadline = list[float](), time.perf_counter() + budget_s
    while len(times) < LEAST_ROUNDS or (len(times) < MOST_ROUNDS and time.perf_counter() < deadline):
        times.append(seconds_of(call, "cuda"))
    return times


def _text(result: ProbeResult) -> str:
    facts = result.facts
    nccl = f"NCCL {facts['nccl']}"
    if "nccl_latency_s" in result.figures:
        nccl += f": {time_text(result, 'nccl_latency_s')} an all-reduce, {rate_text(result, 'nccl_bytes_per_s')}"
    return (
        f"{facts['devices']}; driver {facts['driver']}, CUDA {facts['cuda']}, {nccl}; memory "
        f"{rate_text(result, 'memory_bytes_per_s')} of a copy, {rate_text(result, 'to_host_bytes_per_s')} to the host"
    )


ACCELERATOR = Probe(name="accelerator", budget_s=2.0, measure=_measure, text=_text)
