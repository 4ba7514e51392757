"""Measured rates of the machine: matrix products, INT8 linears, memory bandwidth.

Plans and automatic settings rest on these figures, measured at the shapes that the model will use, and never on the
nominal rate of a processor. Every rate is the best of several repeats under PyTorch's current number of threads,
because other work on the machine can only slow a repeat down. `microbenchmark.undisturbed` waits for other processes to
finish.
"""

import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.ops.lowp_emulation import product
from modelwright.ops.microbenchmark import own_clock, repeated, seconds_of

Int8Backend = Literal["fbgemm", "int_mm"]


def matmul_rate(m: int, k: int, n: int, *, dtype: torch.dtype, device: torch.device | str, repeats: int = 5) -> float:
    """FLOP/s of [m, k] @ [k, n] in `dtype`, counted as 2 * m * k * n, in a linear layer's layout (weight transposed).
    Formats without instructions are widened, as in models (`ops.lowp_emulation`).
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
