"""The micro-benchmark timer: seconds of short calls, repeated, interleaved, and undisturbed by other processes; and the
rates of matrix products by it.

Whether the minimum or the median of the repeats counts is up to the caller: the minimum for a machine's best, since
other work only slows a repeat down; the median for its usual speed. Plans and automatic settings rest on measured
rates, at the shapes that the model will use, and never on the nominal rate of a processor.

`torch.utils.benchmark.Timer` is not suitable: it repeats one statement before the next, so that a busy moment affects
only one of two alternatives, and it counts time in which other processes had the core.
"""

import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from modelwright.core.config import ConfigError
from modelwright.core.resources import MISSING_CORES, PERIOD_S, LoadMeter, missing_cores, num_usable_cores
from modelwright.ops.matmul import product

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Int8Backend = Literal["fbgemm", "int_mm"]
Clock = Callable[[], float]
"""Seconds since any moment."""

PATIENCE_S = 2.0
"""Longest wait in seconds for a moment in which each of several threads has a core."""


def seconds_of(
    call: Callable[[], object], device: torch.device | str, *, calls: int = 1, clock: Clock = time.perf_counter
) -> float:
    """Measures the seconds of all calls together, from idle device to idle device."""
    on_cpu = torch.device(device).type == "cpu"
    if not on_cpu:
        torch.accelerator.synchronize()
    start = clock()
    for _ in range(calls):
        call()
    if not on_cpu:
        torch.accelerator.synchronize()
    return clock() - start


def own_clock(device: torch.device | str) -> Clock:
    """Returns the clock that other processes disturb least. For a single CPU thread it stops while they have the core.
    Several threads wait for each other, and an accelerator for its host, so for them it is the wall clock.
    """
    on_one_thread = torch.device(device).type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if on_one_thread else time.perf_counter


def in_turn(
    measures: Mapping[K, Callable[[], float]], *, num_rounds: int, num_warmups: int = 0
) -> dict[K, list[float]]:
    """Returns the results of each measure in every round; a round goes through all of them, so that all meet the same
    conditions. num_warmups: rounds before those that count.
    """
    figures: dict[K, list[float]] = {key: [] for key in measures}
    for number in range(num_warmups + num_rounds):
        for key, measure in measures.items():
            figure = measure()
            if number >= num_warmups:
                figures[key].append(figure)
    return figures


def repeated(measure: Callable[[], float], *, num_rounds: int, num_warmups: int = 0) -> list[float]:
    """`in_turn` for a single measure."""
    return in_turn({None: measure}, num_rounds=num_rounds, num_warmups=num_warmups)[None]


@dataclass(frozen=True, kw_only=True)
class Undisturbed(Generic[T]):
    """value: the measurement; num_threads: threads used; busy_cores: cores that other processes used at the quietest
    time, 0 if they left a core for each thread.
    """

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
    """Measures on the CPU if other processes leave a core for each of PyTorch's threads, or else on one thread."""
    # Threads that wait for each other without a core each reach a hundredth of their rate, which says nothing. One
    # thread's own time is known on a busy machine too (`own_clock`).
    num_threads, busy_cores = torch.get_num_threads(), 0.0
    if num_threads > 1:
        busy_cores = _wait_for_free_cores(others, num_threads, patience_s, sleep)
    if not busy_cores:
        others.begin()
        value = measure()
        # The load meter needs a whole period, and a short measurement may end before.
        sleep(max(0.0, PERIOD_S - others.seconds()))
        busy_cores = _competing_cores(others, num_threads)
        if num_threads == 1 or not busy_cores:
            return Undisturbed(value=value, num_threads=num_threads, busy_cores=busy_cores)
    torch.set_num_threads(1)
    try:
        return Undisturbed(value=measure(), num_threads=1, busy_cores=busy_cores)
    finally:
        torch.set_num_threads(num_threads)


def _wait_for_free_cores(
    others: LoadMeter, num_threads: int, patience_s: float, sleep: Callable[[float], None]
) -> float:
    """Returns 0 once each thread has a core; after `patience_s` the cores that others used at the quietest time."""
    quietest = float(num_usable_cores())
    for _ in range(max(1, round(patience_s / PERIOD_S))):
        others.begin()
        sleep(PERIOD_S)
        quietest = min(quietest, _competing_cores(others, num_threads))
        if not quietest:
            break
    return quietest


def _competing_cores(others: LoadMeter, num_threads: int) -> float:
    """Cores that other processes use, 0 if they leave enough."""
    cores = others.other_cores()
    return cores if missing_cores(cores, num_threads) >= MISSING_CORES else 0.0


def matmul_rate(m: int, k: int, n: int, *, dtype: torch.dtype, device: torch.device | str, repeats: int = 5) -> float:
    """FLOP/s of [m, k] @ [k, n] in `dtype`, counted as 2 * m * k * n, in a linear layer's layout (weight transposed).
    Formats without instructions are widened, as in models (`ops.matmul`).
    """
    x = torch.randn(m, k, device=device).to(dtype)
    weight = torch.randn(n, k, device=device).to(dtype)
    return 2.0 * m * k * n / _best_time(lambda: product(x, weight.T), device, repeats)


def int8_linear_rate(m: int, k: int, n: int, *, backend: Int8Backend, repeats: int = 5) -> float:
    """Operations/s (2 * m * k * n) of a dynamically quantized linear on the CPU, the input's quantization included.

    `fbgemm`: PyTorch's packed `quantized.linear_dynamic` (only on builds with that engine); `int_mm`: per-token
    quantization around `torch._int_mm`. Raises `ConfigError` if this build lacks the backend.
    """
    x = torch.randn(m, k)
    if backend == "fbgemm":
        weight = torch.randn(n, k) / k**0.5
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise ConfigError("backend: this PyTorch build lacks the 'fbgemm' engine; use 'int_mm'")
        scales = (weight.abs().amax(dim=1) / 127.0).double()
        zeros = torch.zeros(n, dtype=torch.int64)
        engine = torch.backends.quantized.engine
        try:
            # The engine is chosen when the weight is packed.
            torch.backends.quantized.engine = "fbgemm"
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
                quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
            packed = torch.ops.quantized.linear_prepack(quantized, None)
        finally:
            torch.backends.quantized.engine = engine
        return 2.0 * m * k * n / _best_time(lambda: torch.ops.quantized.linear_dynamic(x, packed), "cpu", repeats)
    columns = torch.randint(-127, 128, (n, k), dtype=torch.int8).t()
    int_mm = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]

    def call() -> Tensor:
        scale = x.abs().amax(dim=1, keepdim=True) / 127.0
        quantized = (x / scale).round_().to(torch.int8)
        return int_mm(quantized, columns).float() * scale

    return 2.0 * m * k * n / _best_time(call, "cpu", repeats)


def _best_time(call: Callable[[], Tensor], device: torch.device | str, repeats: int) -> float:
    """Measures the seconds of one call: the best of `repeats`, after a warm-up."""
    clock = own_clock(device)
    seconds_of(call, device, clock=clock)
    # Each repeat takes a millisecond at least, which the clock resolves.
    calls = max(1, round(1e-3 / max(seconds_of(call, device, clock=clock), 1e-7)))
    return min(repeated(lambda: seconds_of(call, device, calls=calls, clock=clock) / calls, num_rounds=repeats))
