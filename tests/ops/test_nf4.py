"""Four-bit weights: every code is the nearest level, at odd shapes too."""

import pytest
import torch

from modelwright.ops.quantize import LEVELS, RUN_LEN, dequantize_nf4, quantize_nf4


@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (5, 130), (7, 63)])
def test_every_weight_becomes_the_nearest_level_of_its_run(shape: tuple[int, int]) -> None:
    weight_OI = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_nf4(weight_OI)
    num_runs = -(-shape[1] // RUN_LEN)
    assert codes.shape == (shape[0], -(-shape[1] // 2))
    assert codes.dtype == torch.uint8
    assert scales.shape == (shape[0], num_runs)
    levels = torch.tensor(LEVELS)
    wanted = torch.empty(shape)
    for row in range(shape[0]):
        for start in range(0, shape[1], RUN_LEN):
            run = weight_OI[row, start : start + RUN_LEN]
            nearest = (run[:, None] / run.abs().max() - levels).abs().argmin(dim=1)
            wanted[row, start : start + RUN_LEN] = levels[nearest] * run.abs().max()
    torch.testing.assert_close(dequantize_nf4(codes, scales, shape[1]), wanted, rtol=1e-6, atol=1e-7)


def test_packing_twice_changes_nothing_more() -> None:
    weight_OI = torch.randn(8, 200, generator=torch.Generator().manual_seed(1))
    once = dequantize_nf4(*quantize_nf4(weight_OI), 200)
    assert torch.equal(dequantize_nf4(*quantize_nf4(once), 200), once)
    # what NF4 loses of normally distributed weights: QLoRA reports about 0.1 of their size
    assert 0.05 < (once - weight_OI).norm() / weight_OI.norm() < 0.12


def test_zeros_stay_zeros() -> None:
    assert not dequantize_nf4(*quantize_nf4(torch.zeros(2, 64)), 64).any()
