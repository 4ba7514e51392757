"""Bandwidth of the machine's memory, by the triad of STREAM (McCalpin 1995): a = b + s * c in FP64, on one thread and
on all; and the accelerator's versions of driver, CUDA and NCCL, its memory's bandwidth, and NCCL's all-reduce over
several devices.

The triad is counted as STREAM does: 24 bytes an element, without the line that a store may have to fetch first. Each
array is at least four times the last-level cache, which is STREAM's rule.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.cuda.nccl
import torch.distributed as dist

from modelwright.ops.microbenchmark import seconds_of
from modelwright.pipeline.estimate.doctor import available_memory
from modelwright.pipeline.estimate.probes.probe import (
    Probe,
    ProbeResult,
    ProbeSetting,
    ProbeUnavailable,
    rate_text,
    time_text,
)

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
TIMES_CACHE = 4
LEAST_ARRAY_BYTES = 64 * 2**20
LARGEST_ARRAY_BYTES = 2**30
MEMORY_SHARE = 0.125
"""Share of the available memory that one of the three arrays may take."""
NUM_ARRAYS = 3
LEAST_ROUNDS = 3
_SCALE = 3.0


def last_level_cache_bytes(folder: Path = CACHES) -> int:
    """Returns the size of the largest cache of the first processor, 0 if the system does not tell it."""
    sizes = [0]
    for path in folder.glob("index*/size"):
        try:
            sizes.append(int(path.read_text().strip().removesuffix("K")) * 1024)
        except (OSError, ValueError):
            continue
    return max(sizes)


def array_bytes(cache_bytes: int, available_bytes: int) -> int:
    """Returns bytes of an array of the triad. Raises `ProbeUnavailable` if memory is too small for arrays beyond the
    cache.
    """
    wanted = min(max(TIMES_CACHE * cache_bytes, LEAST_ARRAY_BYTES), LARGEST_ARRAY_BYTES)
    room = int(MEMORY_SHARE * available_bytes)
    if room < min(wanted, cache_bytes or LEAST_ARRAY_BYTES):
        raise ProbeUnavailable(f"{available_bytes / 1e6:,.0f} MB of memory are available, too few beyond the cache")
    return min(wanted, room)


def _measure_memory(setting: ProbeSetting) -> ProbeResult:
    cache_bytes = last_level_cache_bytes()
    size = array_bytes(cache_bytes, available_memory())
    b, c = (torch.full((size // 8,), value, dtype=torch.float64) for value in (1.0, 2.0))
    a = torch.zeros_like(b)  # written to before the timing, which must not include page faults
    num_threads = torch.get_num_threads()

    def triad() -> None:
        torch.add(b, c, alpha=_SCALE, out=a)

    def rate(threads: int) -> float:
        torch.set_num_threads(threads)
        triad()
        deadline, times = time.perf_counter() + setting.budget_s / 2, list[float]()
        while len(times) < LEAST_ROUNDS or time.perf_counter() < deadline:
            times.append(seconds_of(triad, "cpu"))
        return NUM_ARRAYS * size / min(times)

    try:
        one = rate(1)
        every = rate(num_threads) if num_threads > 1 else one
    finally:
        torch.set_num_threads(num_threads)
    assert a[0] == 1.0 + _SCALE * 2.0 == a[-1], "the triad computed something else"
    figures = {
        "one_thread_bytes_per_s": one,
        "all_threads_bytes_per_s": every,
        "num_threads": float(num_threads),
        "array_bytes": float(size),
        "cache_bytes": float(cache_bytes),
    }
    return ProbeResult(state="measured", figures=figures)


def _memory_text(result: ProbeResult) -> str:
    figures = result.figures
    small = figures["array_bytes"] < TIMES_CACHE * figures["cache_bytes"]
    note = ", less than 4 times the cache: the rate may be the cache's" if small else ""
    several = f", {rate_text(result, 'all_threads_bytes_per_s')} on {figures['num_threads']:.0f}"
    return (
        f"{rate_text(result, 'one_thread_bytes_per_s')} on one thread{several if figures['num_threads'] > 1 else ''} "
        f"(triad, arrays of {figures['array_bytes'] / 2**20:,.0f} MiB{note})"
    )


MEMORY = Probe(name="memory", budget_s=2.0, measure=_measure_memory, text=_memory_text)


DRIVER = Path("/proc/driver/nvidia/version")
COPY_BYTES = 256 * 2**20
MOST_ROUNDS = 200


def driver_version(path: Path = DRIVER) -> str:
    """Returns the version of the NVIDIA kernel driver, "" without one."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return next((word for word in words if word.replace(".", "").isdecimal() and "." in word), "")


def _measure_accelerator(setting: ProbeSetting) -> ProbeResult:
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
        # An all-reduce over all devices of this host, of one number and of a large tensor.
        def reduce(tensors: Sequence[torch.Tensor]) -> None:
            torch.cuda.nccl.all_reduce(tensors)
            for number in range(num_devices):
                torch.cuda.synchronize(number)

        small, large = (
            [torch.zeros(length, device=f"cuda:{number}") for number in range(num_devices)]
            for length in (1, COPY_BYTES // 4)
        )
        figures["nccl_latency_s"] = float(np.median(_times(lambda: reduce(small), part_s)))
        figures["nccl_bytes_per_s"] = COPY_BYTES / float(np.median(_times(lambda: reduce(large), part_s)))
    return ProbeResult(state="measured", figures=figures, facts=facts)


def _times(call: Callable[[], object], budget_s: float) -> list[float]:
    call()
    times, deadline = list[float](), time.perf_counter() + budget_s
    while len(times) < LEAST_ROUNDS or (len(times) < MOST_ROUNDS and time.perf_counter() < deadline):
        times.append(seconds_of(call, "cuda"))
    return times


def _accelerator_text(result: ProbeResult) -> str:
    facts = result.facts
    nccl = f"NCCL {facts['nccl']}"
    if "nccl_latency_s" in result.figures:
        nccl += f": {time_text(result, 'nccl_latency_s')} an all-reduce, {rate_text(result, 'nccl_bytes_per_s')}"
    return (
        f"{facts['devices']}; driver {facts['driver']}, CUDA {facts['cuda']}, {nccl}; memory "
        f"{rate_text(result, 'memory_bytes_per_s')} of a copy, {rate_text(result, 'to_host_bytes_per_s')} to the host"
    )


ACCELERATOR = Probe(name="accelerator", budget_s=2.0, measure=_measure_accelerator, text=_accelerator_text)
