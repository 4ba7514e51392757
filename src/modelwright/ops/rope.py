"""Rotary position embedding (Su et al. 2021) in the half-rotation layout that Hugging Face checkpoints use."""

import torch
from torch import Tensor

from modelwright.ops import cpu_kernels


def rope_tables(positions_BT: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of integer positions, each [B, T, 1, head_dim] in FP32.

    The sines of the first half carry the minus sign of the rotation, which saves a pass over the data.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions_BT.device, dtype=torch.float32) / head_dim
    angles = (positions_BT[..., None].float() * (1.0 / theta**exponents)).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x_BTHd: Tensor, cos_BT1d: Tensor, sin_BT1d: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of the last dimension by its position's angle; tables of `rope_tables`."""
    tables = (cos_BT1d, sin_BT1d)
    whole = cos_BT1d.shape[:2] == x_BTHd.shape[:2] and all(table.is_contiguous() for table in tables)
    if whole and cpu_kernels.take_elements("rotary", x_BTHd, *tables):
        return _Rotate.apply(x_BTHd, *tables)  # type: ignore[return-value]
    swapped = x_BTHd.roll(x_BTHd.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTHd * cos_BT1d, swapped, sin_BT1d).to(x_BTHd.dtype)


def apply_rope_naive(x_BTHd: Tensor, positions_BT: Tensor, theta: float) -> Tensor:
    """The definition: pair i as a complex number, times exp(i * position * theta^(-2i / head_dim)). The reference."""
    half = x_BTHd.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = positions_BT[..., None, None].double() * frequencies
    pairs = torch.complex(x_BTHd[..., :half].double(), x_BTHd[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1).to(x_BTHd.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTHd, cos_BT1d, sin_BT1d):
        ctx.save_for_backward(cos_BT1d, sin_BT1d)
        return cpu_kernels.rotate(x_BTHd.contiguous(), cos_BT1d, sin_BT1d, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return cpu_kernels.rotate(grad.contiguous(), *ctx.saved_tensors, back=True), None, None
