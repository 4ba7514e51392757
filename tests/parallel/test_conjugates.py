"""Sums of narrow numbers over an axis: added in FP32, rounded once, forward and backward."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel.conjugate_ranks import part
from rank_processes import run_ranks

SIZE = 4
RANKS = Path(__file__).with_name("conjugate_ranks.py")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_are_those_of_fp32_rounded_once(tmp_path, dtype):
    run_ranks(RANKS, dtype, tmp_path, size=SIZE)
    narrow = getattr(torch, dtype)
    total = torch.stack([part(rank, torch.float64) for rank in range(SIZE)]).sum(dim=0).to(narrow)
    assert total[0, 0] != 256.0
    for rank in range(SIZE):
        found = load_file(tmp_path / f"{rank}.safetensors")
        assert {one.dtype for one in found.values()} == {narrow}
        assert torch.equal(found["leave"], total)
        assert torch.equal(found["scatter_sum"], total.chunk(SIZE)[rank])
        assert torch.equal(found["gradient of enter"], total)
