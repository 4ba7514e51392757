"""Blockwise FP8 quantization on CUDA (DeepSeek-V3, 2024, section 3.3) in one Triton kernel: it reads each tile once, in
any layout, finds the scales, casts, and writes codes row by row, so that codes of a transposed view need no copy.

Chains of PyTorch operators (`quantize_naive`, the reference) read an activation three times, and products copy codes of
transposed views once more. Codes and finite scales equal the reference's to the bit: division is rounded correctly
(`div_rn`; Triton's `/` is approximate). Products are PyTorch's (`scaled_mm` in `quantize.py`).

Triton is a part of PyTorch's CUDA builds. Imported where a kernel is needed; `TRITON_INTERPRET=1` runs it on a CPU.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

NUM_WARPS = 8
"""A tile of 128 x 128 FP32 numbers is 64 per thread with eight warps."""


@triton.jit
def quantize_tile_kernel(
    x: Any, codes: Any, scales: Any, num_rows: Any, num_columns: Any, row_stride: Any, column_stride: Any,
    largest_code: tl.constexpr, smallest: tl.constexpr, is_square: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One tile of x [num_rows, num_columns]; its last rows and columns may be missing."""
    row_tile, column_tile = tl.program_id(0), tl.program_id(1)
    rows = row_tile.to(tl.int64) * block + tl.arange(0, block)
    columns = column_tile.to(tl.int64) * block + tl.arange(0, block)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    at = rows[:, None] * row_stride + columns[None, :] * column_stride
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    # `tl.max` may drop NaN. As infinity it stays, so that no overflow passes for a large number.
    magnitudes = tl.where(tile == tile, tl.abs(tile), float("inf"))
    num_column_tiles = tl.cdiv(num_columns, block)
    maxima = tl.max(magnitudes, axis=1)
    if is_square:
        maxima = tl.zeros_like(maxima) + tl.max(maxima, axis=0)
    tile_scales = tl.maximum(tl.div_rn(maxima, tl.zeros_like(maxima) + largest_code), smallest)
    if is_square:
        tl.store(scales + row_tile * num_column_tiles + column_tile, tl.max(tile_scales, axis=0))
    else:
        tl.store(scales + rows * num_column_tiles + column_tile, tile_scales, mask=rows < num_rows)
    scaled = tl.div_rn(tile, tl.zeros_like(tile) + tile_scales[:, None])
    scaled = tl.minimum(tl.maximum(scaled, -largest_code), largest_code)
    out_at = rows[:, None] * num_columns + columns[None, :]
    tl.store(codes + out_at, scaled.to(codes.dtype.element_ty), mask=inside)


def quantize_tiles(
    x_RK: Tensor, dtype: torch.dtype, *, is_square: bool, block: int, largest: float, smallest: float
) -> tuple[Tensor, Tensor]:
    """`quantize` in groups of `block` columns of one row, or of `block` rows, too (is_square): codes [R, K] of an FP8
    format, contiguous whatever the layout of x, and FP32 scales. A group with a non-finite value has the scale
    infinity. largest: of the format's numbers; smallest: scale.
    """
    (num_rows, num_columns), tiles = x_RK.shape, tuple(-(-size // block) for size in x_RK.shape)
    codes_RK = torch.empty(x_RK.shape, dtype=dtype, device=x_RK.device)
    scales = x_RK.new_empty((tiles[0] if is_square else num_rows, tiles[1]), dtype=torch.float32)
    if x_RK.numel():
        quantize_tile_kernel[tiles](  # pyright: ignore[reportIndexIssue]
            x_RK, codes_RK, scales, num_rows, num_columns, x_RK.stride(0), x_RK.stride(1), largest,
            smallest, is_square, block, num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
    return codes_RK, scales
