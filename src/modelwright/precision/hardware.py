"""How fast each format is here: seconds of a layer's three products at the shapes of the run, casts included."""

import time
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from modelwright.ops.formats import Format
from modelwright.precision.model import ModelFormats
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
    _synchronise(device)
    started = time.perf_counter()
    product(x, weight).backward(gradient)
    _synchronise(device)
    return time.perf_counter() - started


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
