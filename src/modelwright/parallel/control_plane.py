"""A communication channel between the processes of a run that is separate from training, for background threads.

A collective of a background thread must not mix with those of training, so it has its own process group, over gloo
whatever the device. No rank waits forever: a process that has died or is late becomes one clear error on the others.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from modelwright.core.errors import ModelwrightError, StorageError
from modelwright.parallel.mesh import World

T = TypeVar("T")

TIMEOUT_S = 600.0


class LostRankError(ModelwrightError):
    """Another process of the run has ended or did not answer in time."""

    exit_code = 3


class ControlPlane:
    """Channel among all ranks of a world; every rank creates one and calls the same methods in the same order, from one
    thread at a time. With one process nothing is sent.
    """

    def __init__(self, world: World, *, timeout_s: float = TIMEOUT_S) -> None:
        self.rank = world.rank
        self.size = world.size
        self.timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        if world.size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._world = World(rank=world.rank, size=world.size, device=torch.device("cpu"), group=self._group)

    def exchange(self, value: Any, *, what: str = "agreement") -> list[Any]:
        """Returns the values of all ranks, in rank order, like `World.gather_json`. Raises `LostRankError`."""
        return self._guard(lambda: self._world.gather_json(value), what)

    def any(self, flag: bool, *, what: str = "agreement") -> bool:
        """Returns whether the flag is set on any rank, by one small message."""
        if self._group is None:
            return flag
        result = torch.tensor([int(flag)])
        self._guard(lambda: dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self._group), what)
        return bool(result)

    def attempt(self, action: Callable[[], T], *, what: str) -> T:
        """Runs `action` on every rank; if it raises on any, raises on every rank. `action` itself must not communicate.
        A rank's own error is raised unchanged, another rank's as `StorageError` with its rank and text.
        """
        if self._group is None:
            return action()
        problem: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as error:
            problem = error
        texts = self.exchange(None if problem is None else str(problem) or repr(problem), what=what)
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text is not None:
                raise StorageError(f"{what}: rank {rank} failed: {text}")
        return result

    def move(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[int, int]], *, what: str
    ) -> list[Tensor]:
        """Sends byte tensors to ranks and receives others, (number of bytes, rank) each; ordered between two ranks."""
        received = [torch.empty(size, dtype=torch.uint8) for size, _ in receives]
        if self._group is None:
            return received
        group = self._group

        def run() -> None:
            works = [dist.isend(tensor, group=group, group_dst=to) for tensor, to in sends]
            works += [
                dist.irecv(tensor, group=group, group_src=source)
                for tensor, (_, source) in zip(received, receives, strict=True)
            ]
            for work in works:
                assert work is not None
                work.wait()

        self._guard(run, what)
        return received

    def broadcast(self, tensor: Tensor, *, source: int, what: str) -> Tensor:
        """Broadcasts one rank's bytes, in place (uint8, on the CPU)."""
        if self._group is not None:
            self._guard(lambda: dist.broadcast(tensor, group_src=source, group=self._group), what)
        return tensor

    def _guard(self, action: Callable[[], T], what: str) -> T:
        try:
            return action()
        except RuntimeError as error:  # gloo's connection errors and timeouts, PyTorch's own
            text = str(error).splitlines()[0][:200]
            raise LostRankError(
                f"{what}: another process of the run has exited or did not answer within {self.timeout_s:.0f} s "
                f"({text})"
            ) from error
