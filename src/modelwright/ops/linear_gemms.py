"""The three matrix products of a linear layer, each of which a technique may replace.

A layer y = x W' costs one product forward and two backward: the gradients of its input, dy W (dgrad), and of its
weight, dy' x (wgrad). Number formats change how these are computed, sparse updates how much of them.

Legend: N flattened rows, I inputs, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.ops.lowp_emulation import is_emulated, product

Pair = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearGemms:
    """The products of a linear layer.

    forward: (x_NI, weight_OI) -> y_NO; dgrad: (dy_NO, weight_OI) -> dx_NI; wgrad: (dy_NO, x_NI) -> dw_OI. pack and
    unpack: convert the input x_NI to the tensors that are saved for backward, and back.
    """

    name: str = "plain"
    forward: Pair = lambda x_NI, weight_OI: product(x_NI, weight_OI.T)
    dgrad: Pair = lambda dy_NO, weight_OI: product(dy_NO, weight_OI)
    wgrad: Pair = lambda dy_NO, x_NI: product(dy_NO.T, x_NI)
    pack: Callable[[Tensor], tuple[Tensor, ...]] = lambda x_NI: (x_NI,)
    unpack: Callable[..., Tensor] = lambda x_NI: x_NI


PLAIN = LinearGemms()
"""Products in the format of the factors; the reference for all others."""


def multiply(x: Tensor, weight_OI: Tensor, products: LinearGemms = PLAIN) -> Tensor:
    """Returns x [..., I] times weight', [..., O], with gradients computed by `products`. Differentiable once."""
    if products is PLAIN and not is_emulated(x.dtype, x.device):
        return F.linear(x, weight_OI)
    return _Multiply.apply(x, weight_OI, products)  # type: ignore[return-value]


def multiply_add(y: Tensor, x: Tensor, weight_OI: Tensor) -> Tensor:
    """Returns y [..., O] plus x [..., I] times weight', all in one format: one pass over y where I is small."""
    if is_emulated(y.dtype, y.device):
        return y + multiply(x, weight_OI)
    sums_NO = torch.addmm(y.flatten(0, -2), x.flatten(0, -2), weight_OI.T)
    # Not a view to autograd: see `_Multiply`.
    return torch.ops.aten._unsafe_view(sums_NO, list(y.shape))


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_OI, products):
        x_NI = x.flatten(0, -2)
        ctx.save_for_backward(weight_OI, *products.pack(x_NI))
        ctx.products, ctx.shape, ctx.dtype = products, x.shape, x.dtype
        y_NO = products.forward(x_NI, weight_OI)
        # As in `F.linear`: not a view to autograd, or FSDP2 warns that an operation in place may lose its hook.
        return torch.ops.aten._unsafe_view(y_NO, [*x.shape[:-1], y_NO.shape[-1]])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        weight_OI, *packed = ctx.saved_tensors
        dy_NO, dx, dw_OI = grad.flatten(0, -2), None, None
        if ctx.needs_input_grad[0]:
            dx = ctx.products.dgrad(dy_NO, weight_OI).view(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            x_NI = ctx.products.unpack(*packed)
            dw_OI = ctx.products.wgrad(dy_NO, x_NI).to(weight_OI.dtype)
        return dx, dw_OI, None
