"""How fast each format is here: seconds of a layer's three products at the shapes of the run, casts included; and who
multiplies in FP32 the fastest."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from modelwright.core.errors import ConfigError
from modelwright.ops.formats import Format
from modelwright.ops.rates import seconds_of
from modelwright.precision.model import ModelFormats, fp32_products
from modelwright.precision.policy import Kind

REPEATS = 5
Shape = tuple[int, int]
"""Outputs and inputs of a projection."""


def measure_speeds(
    formats: ModelFormats,
    shapes: Mapping[Kind, Sequence[Shape]],
    candidates: Sequence[Format],
    *,
    num_rows: int,
    device: torch.device,
) -> dict[tuple[Kind, Format], float]:
    """Seconds of forward and backward of each kind's projections in each format: the best of a few, in turn.

    num_rows: tokens that a product sees at once.
    """
    found: dict[tuple[Kind, Format], float] = {}
    for _ in range(REPEATS):
        for kind, of_kind in shapes.items():
            for chosen in candidates:
                took = sum(_seconds(formats, chosen, shape, num_rows, device) for shape in of_kind)
                found[kind, chosen] = min(took, found.get((kind, chosen), took))
    return found


def _seconds(formats: ModelFormats, chosen: Format, shape: Shape, num_rows: int, device: torch.device) -> float:
    weight = torch.randn(shape, device=device).requires_grad_()
    x = torch.randn(num_rows, shape[1], device=device, dtype=formats.config.result_of[chosen]).requires_grad_()
    product = formats.product("", chosen) if chosen != "fp32" else F.linear
    gradient = torch.randn(num_rows, shape[0], device=device, dtype=x.dtype)
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return seconds_of(lambda: product(x, weight).backward(gradient), device)


def onednn_speed_up(shapes: Sequence[Shape], *, num_rows: int) -> float:
    """How many times as fast FP32 products of these shapes are on this CPU when oneDNN makes them, forward and
    backward; 0 where PyTorch would not ask it or it would round.

    num_rows: tokens that a product sees at once. Both ways are timed in turn, and the best of each counts.
    """
    try:
        with fp32_products(onednn=True):
            pass
    except ConfigError:
        return 0.0
    seconds = {False: 0.0, True: 0.0}
    for shape in shapes:
        weight_OI, x_NI = torch.randn(shape), torch.randn(num_rows, shape[1])
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(REPEATS):
            for onednn, took in found.items():
                with fp32_products(onednn=onednn):
                    took.append(_product_seconds(x_NI, weight_OI))
        for onednn, took in found.items():
            seconds[onednn] += min(took)
    return seconds[False] / seconds[True]


def _product_seconds(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> float:
    def products() -> None:
        y_NO = F.linear(x_NI, weight_OI)
        torch.mm(y_NO, weight_OI)
        torch.mm(y_NO.T, x_NI)

    return seconds_of(products, "cpu")
