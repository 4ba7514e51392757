"""What the ranks of an update tell each other once in every step, in one message."""

# PyTorch leaves the type of tolist open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import signal
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelwright.core.errors import ModelwrightError
from modelwright.parallel.mesh import World

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The first that any rank has received is the one for all of them."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What a rank, or any of them, asks for between two steps."""

    stop: int = 0
    """The number of the signal that asked to stop; 0: none."""
    minutes_due: bool = False
    """A checkpoint is due by the clock."""
    writer_failed: bool = False
    """The last checkpoint could not be written."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """The outcome, the same on all ranks."""

    sums: Sequence[float]
    """The given sums, over all ranks."""
    out_of_memory: bool
    """Whether the batch did not fit into some rank's memory, so that the step is repeated."""
    requests: Requests


def vote(world: World, sums: Tensor, *, out_of_memory: bool, skipped_last: bool, own: Requests) -> Vote:
    """One all-reduce with a few numbers for each rank; on an accelerator the only wait for the host in a step that
    clips by a norm known to all ranks.

    sums: this rank's share of what is added up over the ranks, such as the loss terms, FP64 [N]. skipped_last: whether
    this rank skipped the last update; ranks that disagree have different weights, which raises `ModelwrightError`.
    """
    flags = [
        out_of_memory,
        skipped_last,
        own.minutes_due,
        own.writer_failed,
        *(own.stop == one for one in STOP_SIGNALS),
    ]
    numbers = [float(flag) for flag in flags]
    if world.size == 1:
        totals: list[float] = [*sums.tolist(), *numbers]  # pyright: ignore[reportUnknownMemberType]
    else:
        message = torch.cat([sums, torch.tensor(numbers, dtype=sums.dtype, device=sums.device)])
        totals = world.all_reduce_sum(message).tolist()  # pyright: ignore[reportUnknownMemberType]
    full, skipped, minutes, failed, *counts = totals[len(sums) :]
    if skipped not in (0.0, world.size):
        raise ModelwrightError(
            f"{skipped:.0f} of {world.size} ranks skipped the last update and the others did not: memory or network "
            "corruption; run again to resume from the last checkpoint"
        )
    stop = next((int(number) for number, count in zip(STOP_SIGNALS, counts, strict=True) if count), 0)
    requests = Requests(stop=stop, minutes_due=minutes > 0, writer_failed=failed > 0)
    return Vote(sums=totals[: len(sums)], out_of_memory=full > 0, requests=requests)
