"""The gated activation of the feed-forward layers (Shazeer 2020)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.ops import cpu_kernels


def swiglu(gate: Tensor, up: Tensor, *, in_fp32: bool = False) -> Tensor:
    """Returns gate * sigmoid(gate) * up, in the format of `up`. in_fp32: compute the activation in FP32 at least.
    Differentiable; once where a kernel computes it.
    """
    if gate.dtype == up.dtype and cpu_kernels.take("gated_activation", gate, up):
        return _SwiGlu.apply(gate.contiguous(), up.contiguous())  # type: ignore[return-value]
    # Step by step, because PyTorch's operators on a CPU round the last elements of a tensor differently, so that a
    # row's result would depend on the number of rows.
    if not torch.is_grad_enabled():
        wide = gate.float() if gate.dtype.itemsize < 4 else gate
        activated = wide / (1.0 + (-wide).exp())
        return ((activated if in_fp32 else activated.to(gate.dtype)) * up).to(up.dtype)
    return swiglu_naive(gate, up, in_fp32=in_fp32)


def swiglu_naive(gate: Tensor, up: Tensor, *, in_fp32: bool = False) -> Tensor:
    """The definition: the reference for `swiglu`."""
    return (F.silu(gate.float() if in_fp32 else gate) * up).to(up.dtype)


def gated_gelu(gate: Tensor, up: Tensor, *, by_tanh: bool, in_fp32: bool = False) -> Tensor:
    """Returns gelu(gate) * up (GeGLU), in the format of `up`. by_tanh: approximate gelu by a tanh."""
    gate = gate.float() if in_fp32 else gate
    # Step by step for the same reason as in `swiglu`.
    if not torch.is_grad_enabled():
        wide = gate.float() if gate.dtype.itemsize < 4 else gate
        if by_tanh:
            # Hendrycks and Gimpel 2016
            bent = (math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)).tanh()
        else:
            bent = (wide * math.sqrt(0.5)).erf()
        return ((0.5 * wide * (1.0 + bent)).to(gate.dtype) * up).to(up.dtype)
    return (F.gelu(gate, approximate="tanh" if by_tanh else "none") * up).to(up.dtype)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return cpu_kernels.swiglu(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return cpu_kernels.swiglu_backward(grad.contiguous(), *ctx.saved_tensors)
