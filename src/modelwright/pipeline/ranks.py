"""The processes of a run, with the patience that a pipeline needs.

While rank 0 prepares data the others wait at a barrier, perhaps for hours; the training collectives keep their short
timeout, so that a hang there is noticed. Hence a second process group that only waits.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from modelwright.core.errors import ModelwrightError
from modelwright.parallel.mesh import World, join_world

PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class PatientRanks:
    """`world` for training; `barrier` waits as long as it takes."""

    world: World
    waiting_group: Any = None

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def barrier(self) -> None:
        """Wait until all processes are here. Raises `ModelwrightError` when one of them has gone."""
        if self.size == 1:
            return
        try:
            dist.barrier(group=self.waiting_group)
        except RuntimeError as error:
            raise ModelwrightError("another process of this run has ended; its own message says why") from error


@contextmanager
def join_ranks(device: str) -> Iterator[PatientRanks]:
    """All processes that `torchrun` started, or this one alone; `device` is "cpu" or "cuda"."""
    local = os.environ.get("LOCAL_RANK", "0")
    chosen = torch.device(device, int(local)) if device == "cuda" else torch.device(device)
    with join_world(chosen) as world:
        waiting = dist.new_group(backend="gloo", timeout=PATIENCE) if world.size > 1 else None
        yield PatientRanks(world, waiting)


def use_threads(num_threads: int) -> int:
    """Share `num_threads` among the processes of this machine and return this process's part (at least 1)."""
    share = max(1, num_threads // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(share)
    return share
