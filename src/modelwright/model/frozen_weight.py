"""Frozen weight of a projection in four or eight bits, dequantized on every use.

Forward and backward dequantize a few rows at a time, so that the whole weight never exists in a wider format (QLoRA,
Dettmers et al. 2023). No gradient reaches the weight.

Legend: I inputs, O outputs, P stored columns of codes.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from modelwright.ops.nf4 import RUN_LEN, RUNS, dequantize_nf4, quantize_nf4
from modelwright.ops.packed_product import Product, packed_product
from modelwright.ops.quantize import dequantize, quantize

PackedFormat = Literal["int8", "nf4"]
CHUNK_ELEMENTS = 2**22
"""Number of elements that are dequantized at once, 16 MiB in FP32."""
CODES, SCALES = "codes", "scales"


class FrozenWeight(nn.Module):
    """Weight [O, I] as codes and the scales of runs of 64 along each row."""

    def __init__(
        self, num_outputs: int, num_inputs: int, packed_format: PackedFormat, *, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.packed_format: PackedFormat = packed_format
        self.chunk_elements = CHUNK_ELEMENTS
        # Parameters, though without gradient: layouts divide them by rows and by whole runs of columns
        is_nf4 = packed_format == "nf4"
        columns, kind = (-(-num_inputs // 2), torch.uint8) if is_nf4 else (num_inputs, torch.int8)
        self.codes = nn.Parameter(torch.empty(num_outputs, columns, dtype=kind), requires_grad=False)
        runs = -(-num_inputs // RUN_LEN)
        self.scales = nn.Parameter(torch.empty(num_outputs, runs, dtype=dtype), requires_grad=False)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Codes and scales, under tensor parallelism this rank's parts."""
        return self.codes, self.scales

    def forward(self, x: Tensor, product: Product) -> Tensor:
        """Returns product(x, W) for x [..., I]; backward uses the same product with W transposed."""
        codes, scales = self.tensors()
        return packed_product(x, codes, scales, self.row_blocks, product)

    def row_blocks(self, codes_OP: Tensor, scales: Tensor) -> Iterator[Tensor]:
        """Dequantizes the weight, some rows at a time."""
        num_inputs = min(self.num_inputs, scales.shape[1] * RUN_LEN)
        num_rows = max(1, self.chunk_elements // num_inputs)
        for start in range(0, len(codes_OP), num_rows):
            rows = slice(start, start + num_rows)
            yield unpack(codes_OP[rows], scales[rows], num_inputs, self.packed_format)

    @property
    def num_row_blocks(self) -> int:
        """Number of blocks that `row_blocks` yields for this process's part."""
        codes_OP, scales = self.tensors()
        num_rows = max(1, self.chunk_elements // min(self.num_inputs, scales.shape[1] * RUN_LEN))
        return -(-len(codes_OP) // num_rows)

    @torch.no_grad()
    def dense(self) -> Tensor:
        """Returns the whole weight, dequantized."""
        return torch.cat(list(self.row_blocks(*self.tensors())))


def pack(weight_OI: Tensor, packed_format: PackedFormat) -> tuple[Tensor, Tensor]:
    """Quantizes a weight to codes and scales."""
    return quantize_nf4(weight_OI) if packed_format == "nf4" else quantize(weight_OI, RUNS, torch.int8)


def unpack(codes_OP: Tensor, scales: Tensor, num_inputs: int, packed_format: PackedFormat) -> Tensor:
    """Dequantizes a weight [O, I] to the format of the scales."""
    if packed_format == "nf4":
        return dequantize_nf4(codes_OP, scales, num_inputs)
    return dequantize(codes_OP, scales, RUNS)
