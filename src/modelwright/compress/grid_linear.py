"""Linear layers over integer weights on any grid of `ops/int_grid.py`, by exact integer sums.

With codes q of the weight and a of the activation, steps s and t, and zero points z and y, over the groups g of the
summed inputs:

    out[n, o] = sum over g of s[o, g] * t[n] * sum over i in g of (a[n, i] - y[n]) * (q[o, i] - z[o, g])

4-bit weights have a kernel (`ops/decode_step.py`), which reads the packed codes in place; PyTorch's operators are its
reference. `none` below multiplies dequantized weights by FP32 activations.

Legend: N tokens, O outputs, I inputs, G groups of the whole weight, P groups of each output, S inputs of a group.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelwright.ops import cpu_kernels
from modelwright.ops.decode_step import FourBitWeight, RowProduct
from modelwright.ops.int_grid import ACTIVATION_LEVELS, TINY, Codes, WeightGrid, activation_range
from modelwright.ops.quantize import int8_product

ActivationGrid = Literal["none", "token", "tensor"]
"""`none` multiplies dequantized weights; `token` quantizes each token by its largest magnitude, `tensor` all tokens by
one static range."""


@dataclass(frozen=True, kw_only=True)
class InputGrid:
    """Quantization of a layer's input. least, most: the range of kind `tensor`."""

    kind: ActivationGrid = "none"
    least: float = 0.0
    most: float = 0.0

    def codes(self, x_NI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantizes to INT8 codes [N, I]; returns them with step and zero point of each token, [N, 1] each."""
        if self.kind == "token":
            peak_N1 = x_NI.abs().amax(dim=-1, keepdim=True).clamp_min(TINY)
            codes_NI = torch.round(x_NI / peak_N1 * ACTIVATION_LEVELS)
            return codes_NI.to(torch.int8), peak_N1 / ACTIVATION_LEVELS, torch.zeros_like(peak_N1)
        # The static range of calibration; inputs outside of it are clamped.
        step, zero = activation_range(self.least, self.most, x_NI)
        codes_NI = (torch.round(x_NI / step) + zero).clamp(-128, 127)
        ones_N1 = torch.ones_like(x_NI[:, :1])
        return codes_NI.to(torch.int8), step * ones_N1, zero * ones_N1


class GridLinear(nn.Module):
    """A linear layer over the codes of a weight; 4-bit codes are stored two to a byte. Its bias, if set, is FP32."""

    def __init__(self, codes: Codes, grid: WeightGrid, inputs: InputGrid) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.codes_OI.shape
        self.grid = grid
        self.inputs = inputs
        stored = pack_nibbles(codes.codes_OI) if grid.bits == 4 else codes.codes_OI.contiguous()
        self.register_buffer("quantized", stored)
        self.register_buffer("scale", codes.step_G)
        self.register_buffer("zero", codes.zero_G)
        self.quantized: Tensor
        self.scale: Tensor
        self.zero: Tensor
        self.bias: nn.Parameter | None = None
        self._kernel: RowProduct[FourBitWeight] | None = None

    @property
    def codes(self) -> Codes:
        """The weight's integers, [O, I]."""
        codes_OI = unpack_nibbles(self.quantized, self.in_features) if self.grid.bits == 4 else self.quantized
        return Codes(codes_OI, self.scale, self.zero)

    @property
    def weight(self) -> Tensor:
        """The weight [O, I], dequantized."""
        return self.grid.dequantized(self.codes)

    def forward(self, x: Tensor) -> Tensor:
        x_NI = x.reshape(-1, self.in_features).to(self.scale.dtype)
        has_kernel = self.grid.bits == 4 and self.inputs.kind != "tensor"
        if has_kernel and cpu_kernels.take("four_bits", x_NI, self.scale):
            # The kernel points to the codes, which loading a state replaces.
            if self._kernel is None or self._kernel.weight.packed is not self.quantized:
                self._kernel = RowProduct(self.packed_weight())
            out_NO = self._kernel(x_NI)
        elif self.inputs.kind == "none":
            out_NO = F.linear(x_NI, self.weight)
        else:
            codes_NI, step_N1, zero_N1 = self.inputs.codes(x_NI)
            codes_OI = self.codes.codes_OI
            step_OP, zero_OP = self._by_output()
            per_output = step_OP.shape[1]
            size = self.in_features // per_output
            out_NO = torch.zeros(len(x_NI), self.out_features, dtype=x_NI.dtype, device=x_NI.device)
            for group in range(per_output):
                places = slice(group * size, (group + 1) * size)
                a_NS, q_OS = codes_NI[:, places].contiguous(), codes_OI[:, places].contiguous()
                z_O, a_sum_N1 = zero_OP[:, group], a_NS.sum(dim=1, keepdim=True, dtype=torch.int32)
                # sum (a - y)(q - z) = sum a q - y sum q + (S y - sum a) z: only the first term is a matrix product.
                sums_NO = int8_product(a_NS, q_OS).to(x_NI.dtype) - zero_N1 * q_OS.sum(dim=1, dtype=torch.int32)
                sums_NO += (size * zero_N1 - a_sum_N1) * z_O
                out_NO += sums_NO * step_OP[:, group]
            out_NO = out_NO * step_N1
        out_NO = out_NO if self.bias is None else out_NO + self.bias
        return out_NO.view(*x.shape[:-1], self.out_features)

    def packed_weight(self) -> FourBitWeight:
        """Packed codes for the kernel, which are not copied; without the bias."""
        step_OP, zero_OP = self._by_output()
        return FourBitWeight(
            packed=self.quantized,
            num_inputs=self.in_features,
            step_OP=step_OP,
            zero_OP=zero_OP[:0] if self.grid.symmetric else zero_OP,
            takes_codes=self.inputs.kind == "token",
        )

    def _by_output(self) -> tuple[Tensor, Tensor]:
        """Steps and zero points, [O, P]; those of a whole matrix are repeated."""
        per_output = max(1, self.scale.numel() // self.out_features)
        step_OP, zero_OP = (one.view(-1, per_output).expand(self.out_features, -1) for one in (self.scale, self.zero))
        return step_OP, zero_OP


def pack_nibbles(codes_OI: Tensor) -> Tensor:
    """Packs codes in [-8, 7] into bytes, [O, I / 2 rounded up]: the first of two in the low half."""
    padded = F.pad(codes_OI, (0, codes_OI.shape[1] % 2)) + 8
    low, high = padded.to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor, num_inputs: int) -> Tensor:
    """Unpacks the codes of `pack_nibbles`, INT8 [O, I]."""
    both = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, :num_inputs]
    return both.to(torch.int8) - 8
