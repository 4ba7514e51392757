"""Measured rates of the machine: matrix products, INT8 linears, memory bandwidth.

Plans and "fastest" settings rest on these figures, measured at the shapes that the model will use, and never on what
a processor of that name is supposed to do. Every rate is the best of several repeats under PyTorch's current number of
threads: other work on the machine can only slow a repeat down, and what serves as a peak must not lie below what the
machine can do. `undisturbed` sees to it that other processes are not in the way. Knows nothing about models.
"""

import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from modelwright.core.busy import LoadMeter, missing_cores
from modelwright.core.errors import ConfigError
from modelwright.core.resources import num_usable_cores
from modelwright.ops.narrow import product

Int8Backend = Literal["fbgemm", "int_mm"]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

NUM_ROUNDS = 2
PATIENCE_S = 2.0
"""How long several threads wait for a moment in which each of them has a core."""
_PERIOD_S = 0.2
"""The shortest time over which the use of cores is known well enough; the system counts in hundredths of a second."""
_MISSING_CORES = 0.25
"""As many are always used by something."""


@dataclass(frozen=True, kw_only=True)
class Undisturbed(Generic[T]):
    """value: what was measured; num_threads: by how many threads; busy_cores: that other processes used at the quietest
    time, 0 where they left a core for each thread."""

    value: T
    num_threads: int
    busy_cores: float


def undisturbed(
    measure: Callable[[], T],
    others: LoadMeter,
    *,
    patience_s: float = PATIENCE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Undisturbed[T]:
    """Measure on the CPU when other processes leave a core for each of PyTorch's threads, or else on one thread.

    Threads that wait for each other and have no core each reach a hundredth of their rate, of which nothing follows.
    One thread's own time is known however busy the machine is (`seconds_of`).
    """
    num_threads, busy_cores = torch.get_num_threads(), 0.0
    if num_threads > 1:
        busy_cores = _wait_for_free_cores(others, num_threads, patience_s, sleep)
    if not busy_cores:
        others.begin()
        value = measure()
        sleep(max(0.0, _PERIOD_S - others.seconds()))
        busy_cores = _cores_in_the_way(others, num_threads)
        if num_threads == 1 or not busy_cores:
            return Undisturbed(value=value, num_threads=num_threads, busy_cores=busy_cores)
    torch.set_num_threads(1)
    try:
        return Undisturbed(value=measure(), num_threads=1, busy_cores=busy_cores)
    finally:
        torch.set_num_threads(num_threads)


def best_of_rounds(measures: Mapping[K, Callable[[], float]]) -> dict[K, float]:
    """The highest figure of every measure over a few rounds through all of them: other work on the machine meets all
    of them alike, and one moment of it none for good."""
    best = dict.fromkeys(measures, 0.0)
    for _ in range(NUM_ROUNDS):
        best = {key: max(best[key], measure()) for key, measure in measures.items()}
    return best


def _wait_for_free_cores(
    others: LoadMeter, num_threads: int, patience_s: float, sleep: Callable[[float], None]
) -> float:
    """0 as soon as there is a core for each thread; after `patience_s` the cores that others used at the quietest
    time."""
    quietest = float(num_usable_cores())
    for _ in range(max(1, round(patience_s / _PERIOD_S))):
        others.begin()
        sleep(_PERIOD_S)
        quietest = min(quietest, _cores_in_the_way(others, num_threads))
        if not quietest:
            break
    return quietest


def _cores_in_the_way(others: LoadMeter, num_threads: int) -> float:
    """Cores that other processes use, 0 where they leave enough."""
    cores = others.other_cores()
    return cores if missing_cores(cores, num_threads) >= _MISSING_CORES else 0.0


def matmul_rate(m: int, k: int, n: int, *, dtype: torch.dtype, device: torch.device | str, repeats: int = 5) -> float:
    """FLOP/s of [m, k] @ [k, n] in `dtype`, counted as 2 * m * k * n. A linear layer's layout (weight transposed).

    As models multiply: formats without instructions are widened (`ops.narrow`).
    """
    x = torch.randn(m, k, device=device).to(dtype)
    weight = torch.randn(n, k, device=device).to(dtype)
    return 2.0 * m * k * n / _best_time(lambda: product(x, weight.T), device, repeats)


def int8_linear_rate(m: int, k: int, n: int, *, backend: Int8Backend, repeats: int = 5) -> float:
    """Operations/s (2 * m * k * n) of a dynamically quantised linear on the CPU, the input's quantisation included.

    `fbgemm`: PyTorch's packed `quantized.linear_dynamic` (only on builds with that engine); `int_mm`: per-token
    quantisation around `torch._int_mm`. Raises `ConfigError` when this build does not have the backend.
    """
    x = torch.randn(m, k)
    if backend == "fbgemm":
        call = _fbgemm_call(x, torch.randn(n, k) / k**0.5)
    else:
        call = _int_mm_call(x, torch.randint(-127, 128, (n, k), dtype=torch.int8))
    return 2.0 * m * k * n / _best_time(call, "cpu", repeats)


def copy_bandwidth(*, device: torch.device | str, num_bytes: int = 128 * 2**20, repeats: int = 5) -> float:
    """Bytes/s of a large copy, read and write both counted."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * num_bytes / _best_time(lambda: target.copy_(source), device, repeats)


def _fbgemm_call(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise ConfigError("backend: this PyTorch build has no 'fbgemm' engine; use 'int_mm'")
    scales = (weight.abs().amax(dim=1) / 127.0).double()
    zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
    engine = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = "fbgemm"  # the engine is chosen when the weight is packed
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
            quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantised, None)
    finally:
        torch.backends.quantized.engine = engine
    return lambda: torch.ops.quantized.linear_dynamic(x, packed)


def _int_mm_call(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    columns = weight.t()
    int_mm = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]

    def call() -> Tensor:
        scale = x.abs().amax(dim=1, keepdim=True) / 127.0
        quantised = (x / scale).round_().to(torch.int8)
        return int_mm(quantised, columns).float() * scale

    return call


def _best_time(call: Callable[[], Tensor], device: torch.device | str, repeats: int) -> float:
    """Seconds of one call: the best of `repeats`, each at least a millisecond of work, after a warm-up."""
    seconds_of(call, device)
    calls = max(1, round(1e-3 / max(seconds_of(call, device), 1e-7)))
    return min(seconds_of(call, device, calls) / calls for _ in range(repeats))


def seconds_of(call: Callable[[], object], device: torch.device | str, calls: int = 1) -> float:
    """Seconds of all calls. On a single thread of a CPU the time that it had a core: what other processes take away in
    between does not count."""
    on_cpu = torch.device(device).type == "cpu"
    clock = time.thread_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(calls):
        call()
    if not on_cpu:
        torch.accelerator.synchronize()
    return clock() - start
