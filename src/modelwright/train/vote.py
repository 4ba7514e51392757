"""The vote: one message in which the ranks of an update exchange sums and requests, once in every step."""

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
"""The first of these that any rank has received is the one for all of them."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests of a rank, or of any of them, to be handled between two steps."""

    stop: int = 0
    """Number of the signal that asked to stop; 0 for none."""
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
    """True if some rank ran out of memory, so that all repeat the step."""
    requests: Requests


def vote(world: World, sums: Tensor, *, out_of_memory: bool, skipped_last: bool, own: Requests) -> Vote:
    """Exchange sums and requests in one small all-reduce. On an accelerator it is the only point where the host waits
    in a step that clips by a norm known to all ranks.

    sums: this rank's share of the figures to add up over the ranks, such as the loss terms, FP64 [N]. skipped_last:
    true if this rank skipped the last update; ranks that disagree have different weights, which raises
    `ModelwrightError`.
    """
    stops = [own.stop == one for one in STOP_SIGNALS]
    numbers = [float(flag) for flag in (out_of_memory, skipped_last, own.minutes_due, own.writer_failed, *stops)]
    if world.size == 1:
        totals: list[float] = [*sums.tolist(), *numbers]  # pyright: ignore[reportUnknownMemberType]
    else:
        message = torch.cat([sums, torch.tensor(numbers, dtype=sums.dtype, device=sums.device)])
        totals = world.all_reduce_sum(message).tolist()  # pyright: ignore[reportUnknownMemberType]
    # Flags are summed along: a total above 0 means that some rank raised the flag.
    full, skipped, minutes, failed, *counts = totals[len(sums) :]
    if skipped not in (0.0, world.size):
        raise ModelwrightError(
            f"{skipped:.0f} of {world.size} ranks skipped the last update and the others did not: memory or network "
            "corruption; run again to resume from the last checkpoint"
        )
    stop = next((int(number) for number, count in zip(STOP_SIGNALS, counts, strict=True) if count), 0)
    requests = Requests(stop=stop, minutes_due=minutes > 0, writer_failed=failed > 0)
    return Vote(sums=totals[: len(sums)], out_of_memory=full > 0, requests=requests)
