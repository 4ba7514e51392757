"""Who takes part: this process's rank, the number of processes, its device, and the collectives among them.

`torchrun` starts processes and sets the environment; `join_world` reads it. One process alone is a world of size 1
whose collectives do nothing. Knows nothing about models or gradients.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class World:
    """The data-parallel processes. Collectives work in place and on every rank, in the same order."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place; the same bits everywhere."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Maximum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def start_sum(self, tensor: Tensor) -> Callable[[], object]:
        """Begin a sum over all ranks, in place; the returned function waits for it."""
        if self.size == 1:
            return lambda: None
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.wait

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over the ranks, in one message."""
        if self.size == 1:
            return list(values)
        return self.all_reduce_sum(self._tensor(values)).tolist()

    def maxima(self, *values: float) -> list[float]:
        """The largest of each value over the ranks, in one message."""
        if self.size == 1:
            return list(values)
        return self.all_reduce_max(self._tensor(values)).tolist()

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first rank's values on all ranks, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier()


def single(device: torch.device | str = "cpu") -> World:
    """A world of this process alone."""
    return World(rank=0, size=1, device=torch.device(device))


def default_device() -> torch.device:
    """CUDA (the process's own card under torchrun) where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def join_world(device: torch.device | None = None) -> Iterator[World]:
    """The world that `torchrun` set up in the environment (RANK, WORLD_SIZE, MASTER_*), or this process alone.

    gloo on CPU, NCCL on CUDA. The process group is taken down on the way out.
    """
    device = default_device() if device is None else device
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield single(device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(rank=dist.get_rank(), size=size, device=device)
    finally:
        dist.destroy_process_group()
