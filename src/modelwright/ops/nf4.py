"""Weights in four bits: NormalFloat (QLoRA, Dettmers et al. 2023, section 3), two codes in a byte.

Each run of 64 weights of a row has one FP32 scale, its largest magnitude; a code is the number of the nearest of 16
levels, quantiles of a normal distribution scaled to [-1, 1]. Together 0.56 bytes per weight.

Legend: O outputs, I inputs, P bytes of a row.
"""

import torch
from torch import Tensor

from modelwright.ops.quantize import Grid, group_maxima, spread

RUN_LEN = 64
RUNS: Grid = (1, RUN_LEN)
"""The groups of weights that share a scale."""
# Runs of zeros divide by it.
_TINY = 2.0**-100
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
    scales = group_maxima(weight_OI, RUNS).clamp_min_(_TINY)
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
