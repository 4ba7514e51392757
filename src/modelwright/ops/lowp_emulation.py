"""Matrix products and convolutions in formats for which a processor may lack instructions.

Without instructions PyTorch multiplies BF16 and FP16 at a tenth of FP32's speed and INT8 at a thirtieth (AVX2, one
thread). FP32 products of widened factors give the same result: a product of two BF16, FP16 or INT8 numbers is exact in
FP32, and sums are kept in FP32, as in hardware with such instructions. Only one product's factors are widened, and only
while it runs; the model keeps the narrow format.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.core.library_environment import lowered

NARROW = frozenset({torch.bfloat16, torch.float16, torch.int8})


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


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether factors of this format are multiplied as FP32 on this device."""
    return device.type == "cpu" and dtype in NARROW and dtype not in CPU_MULTIPLIES


def product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right, both in one floating-point format, in that format; sums in FP32."""
    if is_emulated(left.dtype, left.device):
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def convolution(x_NCHW: Tensor, weight_OCkk: Tensor, bias_O: Tensor | None, *, stride: int, padding: int) -> Tensor:
    """The convolution of factors in one floating-point format, in that format; sums in FP32."""
    x, weight = upcast(x_NCHW, weight_OCkk)
    bias = None if bias_O is None else bias_O.to(x.dtype)
    return F.conv2d(x, weight, bias, stride=stride, padding=padding).to(x_NCHW.dtype)


def upcast(*factors: Tensor) -> tuple[Tensor, ...]:
    """Widens factors to FP32 if this processor lacks instructions for their format; else they are unchanged."""
    return tuple(one.float() if is_emulated(one.dtype, one.device) else one for one in factors)
