"""Matrix products in eight bits, where groups of elements share a scale and sums have a higher precision, and products
with frozen weights that are stored packed.

All products of a linear layer have the form a b' with both factors cut into groups along the summed dimension. A grid
gives the (rows, columns) of a group, 0 for all of them. Tensorwise: one scale; rowwise: one for each row; blockwise, as
in DeepSeek-V3 (2024, section 3.3): 1 x 128 for activations and gradients, 128 x 128 for weights. `scaled_product` uses
the hardware's kernel if there is one; `scaled_product_naive` is the definition, and runs anywhere.

Weights in four bits are NormalFloat (QLoRA, Dettmers et al. 2023, section 3), two codes in a byte: each run of 64
weights of a row has one FP32 scale, its largest magnitude; a code is the number of the nearest of 16 levels, quantiles
of a normal distribution scaled to [-1, 1]. Together 0.56 bytes per weight.

Legend: M, N rows of the factors, K the summed dimension, R rows of either, G groups; O outputs, I inputs, P bytes of a
row.
"""

import logging
import math
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from modelwright.ops import cpu_kernels
from modelwright.ops.matmul import is_emulated, triton_compiles

log = logging.getLogger("modelwright.ops")

Grid = tuple[int, int]
TENSORWISE: Grid = (0, 0)
ROWWISE: Grid = (1, 0)
BLOCK = 128
ROW_BLOCKS: Grid = (1, BLOCK)
SQUARE_BLOCKS: Grid = (BLOCK, BLOCK)
Maxima = Callable[[Tensor], Tensor]
"""`(present largest magnitudes of groups) -> the magnitudes to scale by`, of the same shape."""
INT8_MAX = 127.0
SMALLEST_SCALE = 2.0**-100
"""Smallest scale: groups of zeros divide by it."""


def largest(dtype: torch.dtype) -> float:
    """The largest code of an eight-bit format; INT8 is used symmetrically."""
    return INT8_MAX if dtype == torch.int8 else torch.finfo(dtype).max


def group_maxima(x_RK: Tensor, grid: Grid) -> Tensor:
    """Largest magnitude of each group, [rows of groups, columns of groups], FP32. The last groups may be smaller."""
    (rows, columns), (num_rows, num_columns) = _sizes(x_RK, grid), x_RK.shape
    x = x_RK.detach().abs()
    if columns < num_columns:
        x = torch.nn.functional.pad(x, (0, -num_columns % columns)).unflatten(1, (-1, columns)).amax(2)
    else:
        x = x.amax(1, keepdim=True)
    if rows == 1:
        return x.float()
    if rows < num_rows:
        x = torch.nn.functional.pad(x, (0, 0, 0, -num_rows % rows)).unflatten(0, (-1, rows)).amax(1)
    else:
        x = x.amax(0, keepdim=True)
    return x.float()


def quantize(
    x_RK: Tensor, grid: Grid, dtype: torch.dtype, *, maxima: Maxima | None = None, stochastic: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns codes [R, K] in `dtype` (INT8 or an FP8 format) and FP32 scales, one for each group: x is about code *
    scale.

    maxima: the maxima that scales derive from, given the present ones (delayed scaling uses those of earlier steps);
    larger values are clipped. A group with a non-finite value has a non-finite scale, so that no overflow passes for a
    large number. stochastic: INT8 codes are rounded stochastically (Gupta et al. 2015), with the device's default
    generator.
    """
    in_one_piece = x_RK.is_contiguous() or x_RK.T.is_contiguous()
    if (grid, dtype, maxima) == (ROWWISE, torch.int8, None) and in_one_piece and cpu_kernels.take("int8", x_RK):
        return cpu_kernels.quantize(x_RK.detach(), stochastic=stochastic)
    is_fused = grid in (ROW_BLOCKS, SQUARE_BLOCKS) and dtype != torch.int8 and maxima is None
    if is_fused and x_RK.is_cuda and triton_compiles():
        return torch.ops.modelwright.quantize_blocks(x_RK.detach(), *grid, dtype)
    return quantize_naive(x_RK, grid, dtype, maxima=maxima, stochastic=stochastic)


@torch.library.custom_op("modelwright::quantize_blocks", mutates_args=(), device_types="cuda")
def quantize_blocks(x_RK: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from modelwright.ops.triton_quantize import quantize_tiles  # imports Triton, which CPU builds lack

    return quantize_tiles(
        x_RK, dtype, is_square=rows == columns, block=BLOCK, largest=largest(dtype), smallest=SMALLEST_SCALE
    )


@quantize_blocks.register_fake
def _(x_RK: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (num_rows, num_columns), codes_RK = x_RK.shape, torch.empty(x_RK.shape, dtype=dtype, device=x_RK.device)
    shape = (-(-num_rows // rows), -(-num_columns // columns))
    return codes_RK, x_RK.new_empty(shape, dtype=torch.float32)


def quantize_naive(
    x_RK: Tensor, grid: Grid, dtype: torch.dtype, *, maxima: Maxima | None = None, stochastic: bool = False
) -> tuple[Tensor, Tensor]:
    """The definition, in PyTorch operators: the reference for `quantize`."""
    result = group_maxima(x_RK, grid)
    # A non-finite maximum stays, or delayed scaling would clip an overflow to a finite value.
    if maxima is not None:
        result = torch.where(result.isfinite(), maxima(result), result)
    scales = (result / largest(dtype)).clamp_min_(SMALLEST_SCALE)
    scaled_RK = x_RK.float() / spread(scales, x_RK, grid)
    if dtype == torch.int8:
        rounded = scaled_RK.add_(torch.rand_like(scaled_RK)).floor_() if stochastic else scaled_RK.round_()
        return rounded.clamp_(-INT8_MAX, INT8_MAX).to(dtype), scales
    return scaled_RK.clamp_(-largest(dtype), largest(dtype)).to(dtype), scales


def dequantize(codes_RK: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """Dequantize to FP32 [R, K]."""
    return codes_RK.float() * spread(scales, codes_RK, grid)


def scaled_product_naive(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], grids: tuple[Grid, Grid], result: torch.dtype
) -> Tensor:
    """a_MK b_NK', [M, N] in `result`, of codes and scales: the definition, with sums in FP32, and the reference."""
    return (dequantize(*a, grids[0]) @ dequantize(*b, grids[1]).T).to(result)


def scaled_product(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    grids: tuple[Grid, Grid],
    result: torch.dtype,
    *,
    name: str = "eight-bit product",
    has_kernel: bool = False,
) -> Tensor:
    """a_MK b_NK', [M, N] in `result`, of codes and scales.

    INT8 with scales that do not change along K: an integer product, exact before scaling. FP8: the device's kernel if
    it has one (`has_fp8_kernel`) and that supports these shapes, else the definition; on accelerators that is logged,
    once for each `name`.
    """
    (a_MK, a_scales), (b_NK, b_scales) = a, b
    if a_MK.dtype == torch.int8 and not grids[0][1] and not grids[1][1]:
        sums_MN = int8_product(a_MK, b_NK)
        fits = sums_MN.dtype == torch.int32 and result in cpu_kernels.NAMES
        if fits and cpu_kernels.take("int8", a_scales, b_scales):
            return cpu_kernels.rescale(sums_MN, a_scales, b_scales, result)
        return (sums_MN.float() * a_scales * b_scales.T).to(result)
    # CUDA's kernels need dimensions in multiples of 16, and a blockwise summed dimension in multiples of 128.
    multiple = BLOCK if BLOCK in (grids[0][1], grids[1][1]) else 16
    if has_kernel and a_MK.shape[1] % multiple == 0 and b_NK.shape[0] % 16 == 0 and a_MK.shape[0] % 16 == 0:
        return scaled_mm(a, b, grids, result)
    if a_MK.device.type != "cpu" and not torch.compiler.is_compiling():
        _say_that_it_is_slow(name, "its shapes" if has_kernel else "its formats and scales")
    return scaled_product_naive(a, b, grids, result)


def int8_product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """a b' of INT8 codes, exact, [M, N]: INT32, or FP32 where codes are widened (exact up to 2^24, then rounded)."""
    if is_emulated(torch.int8, a_MK.device):
        return a_MK.float() @ b_NK.float().T
    int_mm = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
    if a_MK.device.type == "cpu":
        return int_mm(a_MK, b_NK.T)
    # CUDA's kernel needs more than 16 rows and multiples of 8: factors are padded with zeros.
    (num_rows, num_summed), num_columns = a_MK.shape, b_NK.shape[0]
    pad = torch.nn.functional.pad
    more_rows = max(32 - num_rows, -num_rows % 8)
    a_MK = pad(a_MK, (0, -num_summed % 8, 0, more_rows)).contiguous()
    b_NK = pad(b_NK, (0, -num_summed % 8, 0, -num_columns % 8)).contiguous()
    return int_mm(a_MK, b_NK.T)[:num_rows, :num_columns]


def _sizes(x_RK: Tensor, grid: Grid) -> tuple[int, int]:
    """Rows and columns of a group of this tensor."""
    rows, columns = grid
    return min(rows or x_RK.shape[0], x_RK.shape[0]), min(columns or x_RK.shape[1], x_RK.shape[1])


def spread(scales: Tensor, x_RK: Tensor, grid: Grid) -> Tensor:
    """Repeats scales of groups so that they multiply with x_RK."""
    rows, columns = _sizes(x_RK, grid)
    if scales.shape[0] > 1 and rows > 1:
        scales = scales.repeat_interleave(rows, dim=0)[: x_RK.shape[0]]
    if scales.shape[1] > 1 and columns > 1:
        scales = scales.repeat_interleave(columns, dim=1)[:, : x_RK.shape[1]]
    return scales


@cache
def _say_that_it_is_slow(name: str, reason: str) -> None:
    log.warning(
        "%s: the device has no kernel for %s. FP32 products of dequantized factors take its place, more slowly.",
        name,
        reason,
    )


@cache
def has_fp8_kernel(
    device: torch.device, a_dtype: torch.dtype, b_dtype: torch.dtype, grids: tuple[Grid, Grid], result: torch.dtype
) -> bool:
    """Returns whether `scaled_mm` runs on the device and agrees with the definition on an example. Tried once."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9) or torch.int8 in (a_dtype, b_dtype):
        return False
    generator, dtypes = torch.Generator(device).manual_seed(0), (a_dtype, b_dtype)
    # Transposed views, as in backward.
    factors = [torch.randn(2 * BLOCK, 256, device=device, generator=generator).T for _ in dtypes]
    a, b = (quantize(x, grid, dtype) for x, grid, dtype in zip(factors, grids, dtypes, strict=True))
    try:
        findings, requested = scaled_mm(a, b, grids, result), scaled_product_naive(a, b, grids, torch.float32)
    except (RuntimeError, ValueError, NotImplementedError):  # this build or device has none for these grids
        return False
    tolerance = 4 * math.sqrt(2 * BLOCK) * torch.finfo(result).eps
    return bool(((findings.float() - requested).abs().max() <= tolerance * requested.std()).item())


def scaled_mm(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], grids: tuple[Grid, Grid], result: torch.dtype
) -> Tensor:
    """CUDA's FP8 product. It reads both factors along the summed dimension: codes of transposed views are copied."""
    (a_MK, a_scales), (b_NK, b_scales) = a, b
    scale_a, scale_b = _laid_out(a_scales, grids[0]), _laid_out(b_scales, grids[1]).T
    if grids == (TENSORWISE, TENSORWISE):
        scale_a, scale_b = scale_a.view(()), scale_b.view(())
    product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(a_MK.contiguous(), b_NK.contiguous().T, scale_a=scale_a, scale_b=scale_b, out_dtype=result)


def _laid_out(scales: Tensor, grid: Grid) -> Tensor:
    """Scales in the layout that CUDA's product expects (cuBLAS, "1D and 2D block scaling"): those of row blocks column
    by column, those of squares row by row with each row starting at a multiple of four, all others contiguous.
    """
    if grid == ROW_BLOCKS:
        return scales.T.contiguous().T
    if grid == SQUARE_BLOCKS:
        num_columns = scales.shape[1]
        return torch.nn.functional.pad(scales.contiguous(), (0, -num_columns % 4))[:, :num_columns]
    return scales.contiguous()


RowBlocks = Callable[[Tensor, Tensor], Iterator[Tensor]]
"""`(codes, scales)` -> consecutive rows of the weight [O, I], together all of them."""
Product = Callable[[Tensor, Tensor], Tensor]
"""`(x [..., I], weight [O, I])` -> [..., O]."""


def packed_product(x: Tensor, codes: Tensor, scales: Tensor, row_blocks: RowBlocks, product: Product) -> Tensor:
    """Returns product(x, W), [..., O] for x [..., I]. Its gradient is the same product of the output's gradient with W
    transposed, which unpacks some rows at a time again: codes and scales are saved, neither x nor W. Differentiable
    once, in x.
    """
    return _PackedProduct.apply(x, codes, scales, row_blocks, product)  # type: ignore[return-value]


def packed_product_naive(x: Tensor, codes: Tensor, scales: Tensor, row_blocks: RowBlocks, product: Product) -> Tensor:
    """The definition, with the whole weight: the reference for `packed_product`."""
    return product(x, torch.cat(list(row_blocks(codes, scales))))


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scales, row_blocks, product):
        ctx.save_for_backward(codes, scales)
        ctx.row_blocks, ctx.product, ctx.dtype = row_blocks, product, x.dtype
        parts = [product(x, rows_RI) for rows_RI in row_blocks(codes, scales)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        dx, start = None, 0
        for rows_RI in ctx.row_blocks(*ctx.saved_tensors):
            part = ctx.product(grad[..., start : start + rows_RI.shape[0]], rows_RI.T)
            # Several parts are added up in FP32 at least.
            dx = part if dx is None else dx.to(torch.promote_types(part.dtype, torch.float32)) + part
            start += rows_RI.shape[0]
        assert dx is not None
        return dx.to(ctx.dtype), None, None, None, None


RUN_LEN = 64
RUNS: Grid = (1, RUN_LEN)
"""The groups of weights that share a scale."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""QLoRA, appendix E."""


def quantize_nf4(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes [O, P] as uint8, the even columns' in the lower halves of the bytes, and FP32 scales [O, runs]. The
    last run of a row may be shorter; a row of odd length ends in half a byte.
    """
    scales = group_maxima(weight_OI, RUNS).clamp_min_(SMALLEST_SCALE)
    levels = torch.tensor(LEVELS, device=weight_OI.device)
    between = (levels[1:] + levels[:-1]) / 2
    codes_OI = torch.bucketize(weight_OI.float() / spread(scales, weight_OI, RUNS), between).to(torch.uint8)
    codes_OI = torch.nn.functional.pad(codes_OI, (0, codes_OI.shape[1] % 2))
    return codes_OI[:, ::2] | (codes_OI[:, 1::2] << 4), scales


def dequantize_nf4(codes_OP: Tensor, scales: Tensor, num_inputs: int) -> Tensor:
    """Returns the weight [O, I] in the format of the scales."""
    # A table of all 256 bytes gives two weights per lookup.
    levels = torch.tensor(LEVELS, device=codes_OP.device, dtype=scales.dtype)
    pairs = torch.stack((levels.repeat(16), levels.repeat_interleave(16)), dim=1)
    weight_OI = pairs[codes_OP.int()].flatten(1)
    # Whole runs are scaled in place, without a copy of the scales as large as the weight.
    if num_inputs % RUN_LEN == 0:
        weight_OI.unflatten(1, (-1, RUN_LEN)).mul_(scales[..., None])
        return weight_OI
    weight_OI = weight_OI[:, :num_inputs]
    return weight_OI.mul_(spread(scales, weight_OI, RUNS))
