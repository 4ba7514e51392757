"""Sums of narrow numbers over an axis: added in FP32, rounded once, forward and backward."""

import pytest
import torch

from distributed import run_distributed
from modelwright.parallel.mesh import World, enter, leave, reduce_scatter

SIZE = 4


def part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """In BF16 the small parts would vanish beside the first, one after the other."""
    return torch.full((8, 3), 256.0 if rank == 0 else 0.75, dtype=dtype)


def sums(world: World, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    mine, x = part(world.rank, dtype), torch.zeros(8, 3, dtype=dtype, requires_grad=True)
    enter(x, world).backward(mine)
    assert x.grad is not None
    return {"leave": leave(mine, world), "reduce_scatter": reduce_scatter(mine, world, 0), "gradient of enter": x.grad}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_are_those_of_fp32_rounded_once(dtype):
    total = torch.stack([part(rank, torch.float64) for rank in range(SIZE)]).sum(dim=0).to(dtype)
    assert total[0, 0] != 256.0
    for rank, found in enumerate(run_distributed(sums, SIZE, dtype)):
        assert {one.dtype for one in found.values()} == {dtype}
        assert torch.equal(found["leave"], total)
        assert torch.equal(found["reduce_scatter"], total.chunk(SIZE)[rank])
        assert torch.equal(found["gradient of enter"], total)
