"""What ends a run: a signal between two steps (`StopRequest`), a hang (`Watchdog`), and the vote of all ranks."""

# PyTorch leaves the type of tolist open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import faulthandler
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from modelwright.core.artifacts import writing
from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.parallel.mesh import World

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The first of these that any rank has received is the one for all of them."""


@dataclass(eq=False)
class StopRequest:
    """A context in which a signal sets `requested` from 0 to its number. A second signal acts as it would before the
    block (usually: ends the process at once), and so does a first one that nothing in the block has acted on. Outside
    the main thread, where Python delivers no signals, only `ask` sets it.
    """

    requested: int = 0
    active: ClassVar["StopRequest | None"] = None
    """The innermost block that is open in this process."""
    _before: dict[int, Any] = field(default_factory=dict[int, Any])
    _outer: "StopRequest | None" = None

    @classmethod
    def ask(cls) -> None:
        """Stop the training of this process after the present step, as a signal would; from any thread."""
        if cls.active is not None:
            cls.active.requested = cls.active.requested or STOP_SIGNALS[0]

    def __enter__(self) -> "StopRequest":
        self._outer, StopRequest.active = StopRequest.active, self
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        StopRequest.active = self._outer
        handled = self._before
        self._restore()
        if self.requested and kind is None:  # it came too late to stop between two steps: what encloses the block does
            if handled:
                signal.raise_signal(self.requested)
            elif self._outer is not None:
                self._outer.requested = self._outer.requested or self.requested

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:  # the second signal goes to the handlers from before the block
            self._restore()
            os.kill(os.getpid(), number)
        self.requested = number

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class Watchdog:
    """Context that ends the process (exit status 1) if `alive` was not called for `limit_s` seconds; 0 disables it. The
    stacks are appended to `log`, which is removed afterwards if it is empty.
    """

    def __init__(self, log: Path, *, limit_s: float) -> None:
        if limit_s < 0:
            raise ConfigError(f"hang_after_s: must not be negative, got {limit_s}; 0 disables it")
        self.log = log
        self.limit_s = limit_s

    def __enter__(self) -> Self:
        if self.limit_s:
            with writing(self.log):
                self.log.parent.mkdir(parents=True, exist_ok=True)
                # Unbuffered and kept open, because faulthandler writes to the descriptor without Python's help.
                self._file = open(self.log, "ab", buffering=0)
            self.alive()
        return self

    def alive(self) -> None:
        """Reset the timer (some tens of microseconds)."""
        if self.limit_s:
            faulthandler.dump_traceback_later(self.limit_s, exit=True, file=self._file)

    def __exit__(self, *exception: object) -> None:
        if self.limit_s:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            if not self.log.stat().st_size:
                self.log.unlink()


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

    sums: Tensor
    """The given sums, over all ranks, where they were."""
    out_of_memory: bool
    """True if some rank ran out of memory, so that all repeat the step."""
    requests: Requests


def vote(world: World, sums: Tensor, *, out_of_memory: bool, skipped_last: bool, own: Requests) -> Vote:
    """Exchange sums and requests. The host does not wait for an accelerator here: requests go from host to host.

    sums: this rank's share of the figures to add up over the ranks, such as the loss terms, FP64 [N]. skipped_last:
    true if this rank skipped the last update; ranks that disagree have different weights, which raises
    `ModelwrightError`.
    """
    stops = [own.stop == one for one in STOP_SIGNALS]
    numbers = [float(flag) for flag in (out_of_memory, skipped_last, own.minutes_due, own.writer_failed, *stops)]
    if sums.device.type == "cpu" and world.size > 1:  # one message for both
        figures: list[float] = sums.tolist()
        totals = world.sums([*figures, *numbers])
        numbers = totals[len(sums) :]
        sums = torch.tensor(totals[: len(sums)], dtype=sums.dtype)
    else:
        sums, numbers = world.all_reduce_sum(sums), world.sums(numbers)
    # Flags are summed along: a total above 0 means that some rank raised the flag.
    full, skipped, minutes, failed, *counts = numbers
    if skipped not in (0.0, world.size):
        raise ModelwrightError(
            f"{skipped:.0f} of {world.size} ranks skipped the last update and the others did not: memory or network "
            "corruption; run again to resume from the last checkpoint"
        )
    stop = next((int(number) for number, count in zip(STOP_SIGNALS, counts, strict=True) if count), 0)
    requests = Requests(stop=stop, minutes_due=minutes > 0, writer_failed=failed > 0)
    return Vote(sums=sums, out_of_memory=full > 0, requests=requests)
