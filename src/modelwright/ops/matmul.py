"""Matrix products and convolutions in any format, and the three products of a linear layer.

Without instructions for a format PyTorch multiplies BF16 and FP16 at a tenth of FP32's speed and INT8 at a thirtieth
(AVX2, one thread). FP32 products of widened factors give the same result: a product of two BF16, FP16 or INT8 numbers
is exact in FP32, and sums are kept in FP32, as in hardware with such instructions. Only one product's factors are
widened, and only while it runs; the model keeps the narrow format.

A layer y = x W' costs one product forward and two backward: the gradients of its input, dy W (dgrad), and of its
weight, dy' x (wgrad). Number formats change how these are computed (`lowp_linear.py`), sparse updates how much of them.

Legend: N flattened rows, I inputs, O outputs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.core.library_environment import lowered

NARROW = frozenset({torch.bfloat16, torch.float16, torch.int8})
ROW_STEP = 64
"""Divisor of the numbers of rows that `padded_rows` returns."""


def _instructions_of_cpu() -> frozenset[torch.dtype]:
    # PyTorch's checks ask the processor, not the older instruction set that it may be restricted to.
    if lowered() is not None:
        return frozenset()
    # Without oneDNN PyTorch cannot tell.
    if not torch.backends.mkldnn.is_available():
        return NARROW
    result = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
        torch.int8: torch.cpu._is_vnni_supported(),
    }
    return frozenset(dtype for dtype, has in result.items() if has)


CPU_MULTIPLIES = _instructions_of_cpu()
"""Narrow formats with instructions on this machine's processor."""


@cache
def triton_compiles() -> bool:
    """Returns whether Triton compiles kernels for the GPU of this machine. Where it does, CUDA tensors use them."""
    from torch.utils._triton import has_triton  # imports Triton, which takes 0.3 s

    return has_triton()


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether factors of this format are multiplied as FP32 on this device."""
    return device.type == "cpu" and dtype in NARROW and dtype not in CPU_MULTIPLIES


def product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right, both in one floating-point format, in that format; sums in FP32."""
    if is_emulated(left.dtype, left.device):
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def padded_rows(x_NI: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x in a floating-point format, followed by rows of zeros where each number of rows would cost memory.

    oneDNN compiles kernels for each shape of narrow factors and keeps up to 1,024, with AMX 0.7 to 2.5 MiB each.
    Whole numbers of steps are also faster: losses with both gradients took a tenth less (Intel Xeon with AMX).
    """
    num_added = -len(x_NI) % ROW_STEP
    if not num_added or x_NI.device.type != "cpu" or dtype not in CPU_MULTIPLIES:
        return x_NI.to(dtype)
    padded = x_NI.new_zeros((len(x_NI) + num_added, x_NI.shape[1]), dtype=dtype)
    padded[: len(x_NI)] = x_NI
    return padded


def convolution(x_NCHW: Tensor, weight_OCkk: Tensor, bias_O: Tensor | None, *, stride: int, padding: int) -> Tensor:
    """The convolution of factors in one floating-point format, in that format; sums in FP32."""
    x, weight = upcast(x_NCHW, weight_OCkk)
    bias = None if bias_O is None else bias_O.to(x.dtype)
    return F.conv2d(x, weight, bias, stride=stride, padding=padding).to(x_NCHW.dtype)


def upcast(*factors: Tensor) -> tuple[Tensor, ...]:
    """Widens factors to FP32 if this processor lacks instructions for their format; else they are unchanged."""
    return tuple(one.float() if is_emulated(one.dtype, one.device) else one for one in factors)


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


@dataclass
class Executed:
    """Counter of the FLOPs in this process."""

    flops: int = 0

    def add(self, flops: int) -> None:
        self.flops += flops


def counted(inner: LinearGemms, executed: Executed) -> LinearGemms:
    """Wraps `inner` so that its FLOPs are added to `executed`, from the shapes that reach it, 2 per multiply-add.

    Wrap the innermost `LinearGemms`, so that skipped work does not count. Attention and the head are not layers with
    `LinearGemms`; the code that runs them calls `Executed.add`.
    """

    def counting(product: Pair) -> Pair:
        def run(left: Tensor, right: Tensor) -> Tensor:
            result = product(left, right)
            # Of matrices (m k), (k n) and (m n), transposed or not: (mk * kn * mn) is the square of mkn.
            executed.add(2 * math.isqrt(left.numel() * right.numel() * result.numel()))
            return result

        return run

    forward, dgrad, wgrad = map(counting, (inner.forward, inner.dgrad, inner.wgrad))
    return replace(inner, name=f"{inner.name}, counted", forward=forward, dgrad=dgrad, wgrad=wgrad)
