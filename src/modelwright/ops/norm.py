"""Root-mean-square normalization (Zhang and Sennrich 2019).

PyTorch's own `rms_norm` takes many elementwise passes on a CPU, forward and backward; here both directions are one
kernel each (`cpu_kernels`) or, without kernels, as few passes as eager code allows.

Legend: D normalized width, the last dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.ops import cpu_kernels


def rms_norm(
    x: Tensor, weight_D: Tensor, eps: float, *, out_dtype: torch.dtype | None = None, in_fp32: bool = True
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the format of `x` or `out_dtype`.

    Computed in FP32 or wider; without `in_fp32` in the format of `x`, unless a kernel is used.

    Differentiable once, in `x` and `weight_D`. Under `torch.compile` the definition itself is traced: the compiler
    fuses it better than it would fuse a fixed backward.
    """
    if torch.compiler.is_compiling():
        return rms_norm_naive(x, weight_D, eps, out_dtype=out_dtype, in_fp32=in_fp32)
    # One kernel call, because a decode step of few rows is bound by the number of calls.
    if not torch.is_grad_enabled() and x.dtype == weight_D.dtype == torch.float32 and out_dtype in (None, x.dtype):
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    out_dtype = out_dtype or x.dtype
    if weight_D.dtype == torch.float32 and out_dtype in cpu_kernels.NAMES and cpu_kernels.take("norm", x, weight_D):
        return _RmsNormByKernel.apply(x.contiguous(), weight_D, eps, out_dtype)  # type: ignore[return-value]
    return _RmsNorm.apply(x, weight_D, eps, out_dtype, in_fp32)  # type: ignore[return-value]


def rms_norm_naive(
    x: Tensor, weight_D: Tensor, eps: float, *, out_dtype: torch.dtype | None = None, in_fp32: bool = True
) -> Tensor:
    """The definition: the reference for `rms_norm`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) if in_fp32 else x
    unit = wide / (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return (unit * weight_D.to(wide.dtype)).to(out_dtype or x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps, out_dtype, in_fp32):
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) if in_fp32 else x
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = wide * inverse
        ctx.save_for_backward(unit, inverse, weight_D)
        ctx.dtype = x.dtype
        return (unit * weight_D.to(unit.dtype)).to(out_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        unit, inverse, weight_D = ctx.saved_tensors
        grad = grad.to(unit.dtype)
        product = grad * unit
        weight = weight_D.to(product.dtype)
        projection = (product @ weight).unsqueeze(-1).div_(unit.shape[-1])
        # With u = x / norm: dx = (w g - u mean(w g u)) / norm.
        grad_x = (grad * weight).sub_(unit * projection).mul_(inverse)
        return grad_x.to(ctx.dtype), product.flatten(0, -2).sum(0).to(weight_D.dtype), None, None, None


class _RmsNormByKernel(torch.autograd.Function):
    """Saves its input, which the residual stream keeps in any case; `_RmsNorm` saves a normalized copy."""

    @staticmethod
    def forward(ctx, x, weight_D, eps, out_dtype):
        y, inverse = cpu_kernels.norm(x, weight_D, eps, out_dtype)
        ctx.save_for_backward(x, weight_D, inverse)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return *cpu_kernels.norm_backward(grad.contiguous(), *ctx.saved_tensors), None, None
