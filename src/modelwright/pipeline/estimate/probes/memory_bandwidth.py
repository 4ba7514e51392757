"""Memory bandwidth by the triad of STREAM (McCalpin 1995): a = b + s * c in FP64, on one thread and on all.

Counted as STREAM does: 24 bytes an element, without the line that a store may have to fetch first. Each array is at
least four times the last-level cache, which is STREAM's rule.
"""

import time
from pathlib import Path

import torch

from modelwright.ops.microbenchmark import seconds_of
from modelwright.pipeline.estimate.doctor import available_memory
from modelwright.pipeline.estimate.probes.probe import Probe, ProbeResult, ProbeSetting, ProbeUnavailable, rate_text

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


def _measure(setting: ProbeSetting) -> ProbeResult:
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


def _text(result: ProbeResult) -> str:
    figures = result.figures
    small = figures["array_bytes"] < TIMES_CACHE * figures["cache_bytes"]
    note = ", less than 4 times the cache: the rate may be the cache's" if small else ""
    several = f", {rate_text(result, 'all_threads_bytes_per_s')} on {figures['num_threads']:.0f}"
    return (
        f"{rate_text(result, 'one_thread_bytes_per_s')} on one thread{several if figures['num_threads'] > 1 else ''} "
        f"(triad, arrays of {figures['array_bytes'] / 2**20:,.0f} MiB{note})"
    )


MEMORY = Probe(name="memory", budget_s=2.0, measure=_measure, text=_text)
