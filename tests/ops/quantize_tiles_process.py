"""Compares the Triton kernel that quantizes blocks with its reference, to the bit, on the device that is named. On a
CPU Triton's interpreter has to be switched on before Triton is imported, so this is a process of its own.

    TRITON_INTERPRET=1 python quantize_tiles_process.py cpu
"""

import sys

import numpy as np
import torch
from triton import language
from triton.runtime import interpreter

from modelwright.ops.quantize import BLOCK, ROW_BLOCKS, SMALLEST_SCALE, SQUARE_BLOCKS, largest, quantize_naive
from modelwright.ops.triton_quantize import quantize_tiles

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {language.float8e4nv: E4M3, language.float8e5: E5M2}
converts = interpreter._convert_float


def convert(values, own, wanted, mode):
    """The interpreter of Triton 3.9 loses the carry where a mantissa rounds up to the next power of two (1.95 is 1 in
    E5M2); devices and PyTorch do not.
    """
    if own != language.float32 or wanted not in FORMATS:
        return converts(values, own, wanted, mode)
    numbers = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
    return numbers.to(FORMATS[wanted]).view(torch.uint8).numpy()


def quantized(x: torch.Tensor, grid: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_tiles(
        x, dtype, is_square=grid == SQUARE_BLOCKS, block=BLOCK, largest=largest(dtype), smallest=SMALLEST_SCALE
    )


def main(device: str) -> int:
    interpreter._convert_float = convert
    draw, num_compared = torch.Generator().manual_seed(0), 0
    for shape in ((130, 140), (1, 128)):
        x = torch.randn(shape, generator=draw) * torch.randn(shape, generator=draw).mul(4).exp()
        x[0, :5] = 0.0
        x[-1] = 0.0 if len(x) > 1 else x[-1]
        for dtype in (torch.float32, torch.bfloat16):
            # A transposed view is read as it lies.
            for factor in (x.to(device, dtype), x.to(device, dtype).T):
                for grid in (ROW_BLOCKS, SQUARE_BLOCKS):
                    for format in (E4M3, E5M2):
                        codes, scales = quantized(factor, grid, format)
                        expected_codes, expected_scales = quantize_naive(factor, grid, format)
                        assert torch.equal(scales, expected_scales), (shape, dtype, grid, format)
                        same = codes.view(torch.uint8) == expected_codes.contiguous().view(torch.uint8)
                        assert same.all(), (shape, dtype, grid, format)
                        assert codes.is_contiguous()
                        num_compared += codes.numel()
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(128, 256, device=device)
        x[3, 7] = bad
        scales = quantized(x, ROW_BLOCKS, E4M3)[1]
        assert not scales[3, 0].isfinite()
        assert scales.isfinite().sum() == scales.numel() - 1
    return num_compared


if __name__ == "__main__":
    print(main(sys.argv[1]))
