"""Measures the speed of formats (a layer's three products at the run's shapes, casts included) and FP32 kernels."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from modelwright.core.errors import ConfigError
from modelwright.ops.lowp_linear import Format
from modelwright.ops.microbenchmark import in_turn, own_clock, seconds_of
from modelwright.train.precision.apply import ModelPrecision, fp32_products
from modelwright.train.precision.controllers import ROOMY
from modelwright.train.precision.policy import Kind, PrecisionConfig

REPEATS = 5
Shape = tuple[int, int]
"""Outputs and inputs of a projection."""


@dataclass(frozen=True)
class DtypeTimings:
    """Measurements made once, at the start of the run."""

    seconds: Mapping[tuple[Kind, Format], float]
    """Seconds of forward and backward for a kind of submodule in a format."""
    memory_pressure: float
    """Fraction of the machine's memory in use before the run or by weights, gradients and moments, not activations."""

    def relative_seconds(self, kind: Kind, chosen: Format) -> float:
        """Seconds of a format relative to FP32."""
        return self.seconds[kind, chosen] / self.seconds[kind, "fp32"]

    def worthwhile(self, config: PrecisionConfig, widest: Set[Format], memory_pressure: float) -> tuple[Format, ...]:
        """The candidates by which a part in one of the formats `widest` might gain.

        They are fast enough here or, under memory pressure, take fewer bytes however slow they are. Considering any
        other would cost time in every period for nothing.
        """
        candidates: tuple[Format, ...] = config.adaptive.candidates
        kinds: set[Kind] = {kind for kind, _ in self.seconds}
        largest = max(map(config.relative_bytes, widest))
        is_short = memory_pressure >= ROOMY
        smaller = [chosen for chosen in candidates if is_short and config.relative_bytes(chosen) < largest]
        gain = config.adaptive.min_speedup if not smaller and widest == {"fp32"} else 1.0
        return tuple(
            chosen
            for chosen in candidates
            if chosen in smaller
            or any(self.seconds[kind, "fp32"] >= gain * self.seconds[kind, chosen] for kind in kinds)
        )


def measure_speeds(
    formats: ModelPrecision,
    shapes: Mapping[Kind, Sequence[Shape]],
    candidates: Sequence[Format],
    *,
    num_rows: int,
    device: torch.device,
) -> dict[tuple[Kind, Format], float]:
    """Measures seconds of forward and backward by kind and format, interleaved, best of a few. num_rows: tokens."""

    def seconds(chosen: Format, of_kind: Sequence[Shape]) -> float:
        return sum(_seconds(formats, chosen, shape, num_rows, device) for shape in of_kind)

    measures: dict[tuple[Kind, Format], Callable[[], float]] = {
        (kind, chosen): partial(seconds, chosen, of_kind) for kind, of_kind in shapes.items() for chosen in candidates
    }
    return {key: min(times) for key, times in in_turn(measures, num_rounds=REPEATS).items()}


def _seconds(formats: ModelPrecision, chosen: Format, shape: Shape, num_rows: int, device: torch.device) -> float:
    weight = torch.randn(shape, device=device).requires_grad_()
    x = torch.randn(num_rows, shape[1], device=device, dtype=formats.config.result_of[chosen]).requires_grad_()
    product = formats.product("", chosen) if chosen != "fp32" else F.linear
    gradient = torch.randn(num_rows, shape[0], device=device, dtype=x.dtype)
    return seconds_of(lambda: product(x, weight).backward(gradient), device, clock=own_clock(device))


def onednn_speed_up(shapes: Sequence[Shape], *, num_rows: int) -> float:
    """Measures the speedup of FP32 products of these shapes on this CPU with oneDNN, forward and backward; 0 if PyTorch
    would not use it or it would round. num_rows: tokens per product. Both are timed in turn; the best of each counts.
    """
    try:
        with fp32_products(onednn=True):
            pass
    except ConfigError:
        return 0.0

    def seconds(onednn: bool, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> float:
        with fp32_products(onednn=onednn):
            return _product_seconds(x_NI, weight_OI)

    totals = {False: 0.0, True: 0.0}
    for shape in shapes:
        weight_OI, x_NI = torch.randn(shape), torch.randn(num_rows, shape[1])
        measures = {onednn: partial(seconds, onednn, x_NI, weight_OI) for onednn in totals}
        for onednn, times in in_turn(measures, num_rounds=REPEATS).items():
            totals[onednn] += min(times)
    return totals[False] / totals[True]


def _product_seconds(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> float:
    def products() -> None:
        y_NO = F.linear(x_NI, weight_OI)
        torch.mm(y_NO, weight_OI)
        torch.mm(y_NO.T, x_NI)

    return seconds_of(products, "cpu", clock=own_clock("cpu"))
