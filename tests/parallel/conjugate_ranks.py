"""One of the ranks that sum narrow numbers: conjugate_ranks.py DTYPE FOLDER; what it found goes to its own file."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from modelwright.parallel.conjugates import enter, leave, scatter_sum
from modelwright.parallel.mesh import join_world


def part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """In BF16 the small parts would vanish beside the first, one after the other."""
    return torch.full((8, 3), 256.0 if rank == 0 else 0.75, dtype=dtype)


if __name__ == "__main__":
    with join_world(torch.device("cpu")) as world:
        narrow = getattr(torch, sys.argv[1])
        mine, x = part(world.rank, narrow), torch.zeros(8, 3, dtype=narrow, requires_grad=True)
        enter(x, world).backward(mine)
        assert x.grad is not None
        found = {"leave": leave(mine, world), "scatter_sum": scatter_sum(mine, world, 0), "gradient of enter": x.grad}
        save_file(found, Path(sys.argv[2]) / f"{world.rank}.safetensors")
