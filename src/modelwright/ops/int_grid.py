"""Integer grids of weights and activations, and rounding to them in training (fake quantization).

A weight is cut into groups that share a step and a zero point: the whole tensor, each output channel, or a number of
neighboring inputs of a channel. A value x has the code clamp(round(x / step) + zero, low, high), which stands for
(code - zero) * step. Gradients pass through the rounding (straight-through estimator, Bengio et al. 2013) where the
code is not clamped; steps may be learned (LSQ, Esser et al. 2020, arXiv 1902.08153, equations 1 to 5).

Legend: O outputs, I inputs, G groups of a tensor in row-major order, S elements of a group, N tokens.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from modelwright.core.config import ConfigError

Granularity = Literal["tensor", "channel", "group_32", "group_64", "group_128"]
Bits = Literal[4, 8]

WEIGHT_LEVELS: dict[Bits, int] = {8: 64, 4: 7}
"""Largest code of symmetric weights. INT8 weights use seven bits, because the CPU kernels add neighboring products in
16 bits (`compress/int8.py`)."""
ACTIVATION_LEVELS = 127
"""Largest code of symmetric activations."""
TINY = 1e-12
"""Smallest step."""


class Codes(NamedTuple):
    """A weight as integers: INT8 codes [O, I], FP32 steps [G], and zero points [G] in the format of the steps."""

    codes_OI: Tensor
    step_G: Tensor
    zero_G: Tensor


@dataclass(frozen=True, kw_only=True)
class WeightGrid:
    """The grid of a weight matrix."""

    bits: Bits = 8
    symmetric: bool = True
    granularity: Granularity = "channel"

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest code."""
        largest = WEIGHT_LEVELS[self.bits]
        return (-largest, largest) if self.symmetric else (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)

    @property
    def group_size(self) -> int:
        """Inputs of a group, 0 for all."""
        return int(self.granularity.partition("_")[2] or 0)

    def check(self, name: str, num_inputs: int) -> None:
        """Raises `ConfigError` if a projection's inputs do not divide into groups."""
        if self.group_size and num_inputs % self.group_size:
            raise ConfigError(
                f"granularity: the {num_inputs} inputs of {name} do not divide into groups of {self.group_size}; "
                "choose a smaller group or channel"
            )

    def num_groups(self, shape: tuple[int, int] | torch.Size) -> int:
        """Number of groups of a weight [O, I]."""
        if self.granularity == "tensor":
            return 1
        return shape[0] * (shape[1] // self.group_size if self.group_size else 1)

    def grouped(self, weight_OI: Tensor) -> Tensor:
        """The elements of each group, [G, S]."""
        return weight_OI.reshape(self.num_groups(weight_OI.shape), -1)

    def ranges(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """Step and zero point of each group, [G] each, that span its values."""
        low, high = self.bounds
        x_GS = self.grouped(weight_OI.detach())
        x_GS = x_GS.to(torch.promote_types(x_GS.dtype, torch.float32))
        if self.symmetric:
            step_G = (x_GS.abs().amax(dim=1) / high).clamp_min(TINY)
            return step_G, torch.zeros_like(step_G)
        return spanning(x_GS.amin(dim=1), x_GS.amax(dim=1), low, high)

    def codes(self, weight_OI: Tensor, step_G: Tensor, zero_G: Tensor) -> Codes:
        """The integers of a weight."""
        low, high = self.bounds
        scaled_GS = self.grouped(weight_OI.detach()).to(step_G.dtype) / step_G[:, None]
        codes_GS = (scaled_GS.round() + zero_G[:, None]).clamp(low, high)
        return Codes(codes_GS.view(weight_OI.shape).to(torch.int8), step_G, zero_G)

    def rounded(self, weight_OI: Tensor, step_G: Tensor, zero_G: Tensor) -> Tensor:
        """The weight on the grid, [O, I], in its own format, with gradients in weight and step."""
        low, high = self.bounds
        result_GS = fake_quantize(self.grouped(weight_OI), step_G[:, None], zero_G[:, None], low, high)
        return result_GS.view(weight_OI.shape)

    def dequantized(self, codes: Codes) -> Tensor:
        """The values that codes stand for, [O, I], in the format of the steps."""
        values_GS = self.grouped(codes.codes_OI).to(codes.step_G.dtype) - codes.zero_G[:, None]
        return (values_GS * codes.step_G[:, None]).view(codes.codes_OI.shape)


def spanning(least: Tensor, most: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Step and zero point of a grid from `low` to `high` that spans [least, most] and has zero on it."""
    least, most = least.clamp_max(0.0), most.clamp_min(0.0)
    step = ((most - least) / (high - low)).clamp_min(TINY)
    return step, (low - least / step).round().clamp(low, high)


def lsq_step(weight_OI: Tensor, grid: WeightGrid) -> Tensor:
    """The initial learned step of each group, [G]: 2 mean(|w|) / sqrt(largest code) (LSQ, section 2.1)."""
    x_GS = grid.grouped(weight_OI.detach())
    x_GS = x_GS.to(torch.promote_types(x_GS.dtype, torch.float32))
    return (2 * x_GS.abs().mean(dim=1) / grid.bounds[1] ** 0.5).clamp_min(TINY)


def fake_quantize(x: Tensor, step: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    """Rounds x to the grid, in its own format. step, zero: broadcast over x.

    The gradient in x is that of the result where the code is not clamped, else 0; in the step it is LSQ's, summed over
    the group and multiplied by 1 / sqrt(elements of the group * largest code). Differentiable once.
    """
    return _FakeQuantize.apply(x, step, zero, low, high)  # type: ignore[return-value]


def fake_quantize_naive(x: Tensor, step: Tensor, zero: Tensor, low: int, high: int) -> Tensor:
    """The definition by automatic differentiation: the reference for `fake_quantize`."""
    factor = (high * x.numel() / step.numel()) ** -0.5
    # The same value with `factor` times the gradient; and the rounded value with the gradient of the unrounded one.
    step = (step - step * factor).detach() + step * factor
    scaled = x / step
    rounded = scaled + (scaled.round() - scaled).detach()
    return ((rounded + zero).clamp(low, high) - zero) * step


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step, zero, low, high):
        ctx.save_for_backward(x, step, zero)
        ctx.bounds = low, high
        codes = ((x.to(step.dtype) / step).round_() + zero).clamp_(low, high)
        return ((codes - zero) * step).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, step, zero = ctx.saved_tensors
        low, high = ctx.bounds
        scaled = x.to(step.dtype) / step
        codes = scaled.round() + zero
        # By codes, not by values: a group's largest value may exceed the grid by a rounding error.
        inside = (codes >= low) & (codes <= high)
        grad_step = None
        if ctx.needs_input_grad[1]:
            # LSQ, equation 3: round(v) - v inside the grid, the bound outside.
            slope = codes.clamp_(low, high) - zero
            slope = torch.where(inside, slope - scaled, slope)
            factor = (high * x.numel() / step.numel()) ** -0.5
            grad_step = (grad.to(step.dtype) * slope).sum_to_size(step.shape) * factor
        return grad * inside, grad_step, None, None, None


def round_tokens(x_NI: Tensor) -> Tensor:
    """Rounds activations to 127 levels each way of a token's largest magnitude, with the gradient of the identity."""
    # In the order of operations of `compress/int8.py`, so that training sees the bits of inference.
    wide_NI = x_NI.detach().to(torch.promote_types(x_NI.dtype, torch.float32))
    peak_N1 = wide_NI.abs().amax(dim=-1, keepdim=True).clamp_min(TINY)
    rounded_NI = torch.round(wide_NI / peak_N1 * ACTIVATION_LEVELS) * (peak_N1 / ACTIVATION_LEVELS)
    return x_NI + (rounded_NI - wide_NI).to(x_NI.dtype) if x_NI.requires_grad else rounded_NI.to(x_NI.dtype)


def activation_range(least: float, most: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Step and zero point, scalars, of activations that are quantized with one static range for all tokens."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    ends = torch.tensor([least, most], dtype=dtype, device=like.device)
    return spanning(ends[0], ends[1], -128, 127)
