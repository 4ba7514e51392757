"""Counters of the updates that were drawn and applied, and their reports, in memory that all processes of a host map.

The kernel's record locks guard the counters, and show which processes are alive: it releases those of a process that
has ended, for any reason.
"""

import fcntl
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from modelwright.core.errors import ModelwrightError
from modelwright.parallel.mesh import World
from modelwright.parallel.shared_memory import share, shared_file

SLOTS = 256
"""Most updates between two meetings, and reports that are kept for processes that have not read them."""
SLOT_BYTES = 16 * 2**10
POLL_S = 0.0005
POLLS_PER_CHECK = 100
"""Polls of a waiting process between two checks that the others are alive."""
_DRAWN, _MADE, _STOPPED_PERIOD, _STOPPED_AT = range(4)
"""Places of the counters: updates drawn, updates made, the last period in which drawing was stopped, and where."""


class SharedCounters:
    """One process's view. `num_heard`: updates whose reports it has read, and the number of the next one in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        numbers = torch.zeros(4 + 2 * SLOTS, dtype=torch.int64)
        shared, texts = share(world, [numbers, torch.zeros(SLOTS, SLOT_BYTES, dtype=torch.uint8)])
        self._counters, self._written, self._lengths = (part.numpy() for part in shared.split([4, SLOTS, SLOTS]))
        self._texts = texts.numpy()
        # Byte 0 guards the counters; byte 1 + r is locked by process r as long as it lives.
        with shared_file(world, 1 + world.size) as path:
            self._file = os.open(path, os.O_RDWR)
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 1 + world.rank)
        self._period = self._limit = self.num_heard = 0

    @property
    def num_made(self) -> int:
        return int(self._counters[_MADE])

    def close(self) -> None:
        os.close(self._file)

    def begin(self, step: int) -> None:
        """Makes `step` the next number."""
        self.num_heard = step
        if self.world.is_first:
            self._counters[_DRAWN] = self._counters[_MADE] = step
            self._written[:] = -1
        self.meet()

    def open(self, first: int, last: int) -> None:
        """Starts a period in which the numbers from `first` to below `last` are drawn; the same on all processes."""
        assert first == self.num_heard, "the trainer and the counters disagree about how many updates were made"
        self._period += 1
        self._limit = last

    def draw(self) -> int | None:
        """Draws the next number; None if the period's numbers are used up or drawing was stopped."""
        with self._locked():
            number = int(self._counters[_DRAWN])
            if number >= self._end():
                return None
            self._counters[_DRAWN] = number + 1
        return number

    def stop_drawing(self) -> None:
        """Stops drawing in this period on all processes."""
        with self._locked():
            if self._counters[_STOPPED_PERIOD] != self._period:
                self._counters[_STOPPED_AT] = self._counters[_DRAWN]
                self._counters[_STOPPED_PERIOD] = self._period

    def publish(self, number: int, report: object) -> None:
        """Counts an update as applied and publishes its report."""
        text = json.dumps(report).encode()
        if len(text) > SLOT_BYTES:
            raise ValueError(f"the report of update {number} has {len(text)} bytes; the limit is {SLOT_BYTES}")
        slot = number % SLOTS
        self._texts[slot, : len(text)] = memoryview(text)
        with self._locked():
            self._lengths[slot] = len(text)
            self._written[slot] = number
            self._counters[_MADE] += 1

    def news(self) -> Iterator[Any]:
        """Yields the reports that this process has not read yet, in order, up to the first gap."""
        while True:
            slot = self.num_heard % SLOTS
            with self._locked():
                if self._written[slot] != self.num_heard:
                    return
                text = self._texts[slot, : self._lengths[slot]].tobytes()
            self.num_heard += 1
            yield json.loads(text)

    def wait_for_all(self) -> Iterator[Any]:
        """Yields `news` until all updates of this period are applied. Raises `ModelwrightError` if a process ended."""
        for attempt in itertools.count(1):
            yield from self.news()
            with self._locked():
                end = self._end()
            if self.num_heard >= end:
                return
            if attempt % POLLS_PER_CHECK == 0 and (lost := self._lost()):
                raise self._loss(lost)
            time.sleep(POLL_S)

    def meet(self) -> None:
        """Waits until all processes have arrived."""
        try:
            self.world.barrier()
        except RuntimeError as error:
            raise self._loss(self._lost()) from error

    def _end(self) -> int:
        stopped = self._counters[_STOPPED_PERIOD] == self._period
        return min(self._limit, int(self._counters[_STOPPED_AT])) if stopped else self._limit

    def _lost(self) -> list[int]:
        """Ranks of the processes that have ended: their locks can be taken."""
        lost = []
        for rank in range(self.world.size):
            if rank == self.world.rank:
                continue
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + rank)
            except OSError:
                continue
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 1 + rank)
            lost.append(rank)
        return lost

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)

    def _loss(self, lost: list[int]) -> ModelwrightError:
        ranks = ", ".join(map(str, lost)) or "unknown"
        return ModelwrightError(
            f"a process that trains on the shared weights has ended (rank {ranks}); updates are complete up to "
            f"{self.num_heard}; run the same command again to resume from the last checkpoint"
        )
