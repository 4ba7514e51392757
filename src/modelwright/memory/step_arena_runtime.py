"""A training step's memory in one arena: the larger tensors of a step are recorded, planned, and placed as planned.

The first step creates the optimizer's states, the next two are recorded and the last one is planned (`plan_arena`),
with some slack where the two differ. From then on the same pages serve every step, without heap fragmentation at the
peak and without page faults. While steps are recorded every larger tensor has its own mapping, so that recording does
not grow the heap either.

A step that differs from the plan misses in part: those tensors come from PyTorch's own allocator. If much is missed for
several steps, steps are recorded anew; if that does not help, the arena is given up. Results are bit-identical. Nothing
of it is in a checkpoint: a resumed run records anew.
"""

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from modelwright.memory.glibc_malloc import give_back_freed_memory
from modelwright.memory.lifetimes import Lifetime
from modelwright.memory.step_arena import plan_arena
from modelwright.memory.step_arena_build import allocator, check_machine

LEAST_BYTES = 2**16
"""Smaller tensors stay in the heap: they are most of the number and next to nothing of the bytes."""
MOST_MISSED = 0.2
"""Most of a step's bytes that may miss the arena; above it the step does not count as served."""
PATIENCE = 3
"""Such steps in a row, and new records are made."""
NUM_RECORDS = 2
"""Steps that are compared before one is planned."""
ROOM = 1.125
"""What is planned for a block that varies, as a multiple of its size."""
MOST_PLANS = 4
"""Plans in a row that did not hold for `HELD_STEPS` steps, and the arena is given up."""
HELD_STEPS = 50

OUTLIVES = -1
"""The offset of a block that was still alive when its step ended: it comes from PyTorch's own allocator."""


class Planned(NamedTuple):
    """One allocation of a step. A varying one, whose size differs from step to step, is served in blocks of half its
    bytes and never outlives the step.
    """

    num_bytes: int
    offset: int
    varies: bool = False


class Mode(IntEnum):
    """Modes of `arena_allocator.cpp`."""

    PASS_THROUGH = 0
    RECORD = 1
    REPLAY = 2


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one replayed step: allocations and their bytes from the arena, from the usual allocator by mistake,
    and from it as planned; and the peak bytes alive in the arena.
    """

    num_served: int
    served_bytes: int
    num_missed: int
    missed_bytes: int
    num_outliving: int
    outliving_bytes: int
    peak_bytes: int

    @property
    def served_share(self) -> float:
        """Fraction of the bytes that do not outlive the step that came from the arena, in [0, 1]."""
        total = self.served_bytes + self.missed_bytes
        return self.served_bytes / total if total else 1.0


class StepAllocator:
    """Python wrapper of the allocator library. A process has at most one allocator."""

    def __init__(self) -> None:
        self._library = allocator()

    def begin(self, mode: Mode, least_bytes: int) -> None:
        """From now on, allocations of the calling thread of at least this many bytes belong to the step."""
        self._library.arena_begin(mode, least_bytes)

    def end(self) -> None:
        self._library.arena_end()

    def lifetimes(self) -> tuple[list[Lifetime], list[bool]]:
        """Lifetimes of the recorded step's allocations, in order, and which of them are still alive. Time counts
        allocations and frees.
        """
        result, length = np.empty((self._library.arena_num_recorded(), 3), np.int64), self._library.arena_time()
        self._library.arena_copy_recorded(_pointer(result))
        lives = [death == OUTLIVES for death in result[:, 2].tolist()]
        lifetimes = [
            Lifetime(num_bytes=size, birth=birth, death=length if alive else death, kind="temporary")
            for (size, birth, death), alive in zip(result.tolist(), lives, strict=True)
        ]
        return lifetimes, lives

    def plan(self, planned: Sequence[Planned], arena_bytes: int) -> None:
        """Replace the plan. Raises `OSError` if the arena cannot be allocated."""
        numbers = [np.array(values, np.int64) for values in zip(*planned, strict=True)] or [np.empty(0, np.int64)] * 3
        self._check(self._library.arena_plan(len(planned), *map(_pointer, numbers), arena_bytes))

    def drop(self) -> None:
        """Forget the plan; the arena is freed with the last tensor in it."""
        self._library.arena_drop()

    def give_back(self) -> None:
        """Release the pages of the arena that hold no tensor. They return, zeroed, when touched."""
        self._check(self._library.arena_give_back())

    def figures(self) -> Figures:
        result = np.empty(7, np.int64)
        self._library.arena_figures(_pointer(result))
        return Figures(**dict(zip(Figures.__dataclass_fields__, result.tolist(), strict=True)))

    def living_bytes(self) -> int:
        """Bytes in all arenas, including those being retired."""
        return self._library.arena_living_bytes()

    def _check(self, error: int) -> None:
        if error:
            raise OSError(error, "the arena's memory")


def plan_replay(
    lifetimes: Sequence[Lifetime], lives: Sequence[bool], before: Counter[int]
) -> tuple[list[Planned], int]:
    """The plan of a recorded step, and its arena's size. lives: which blocks outlive the step; before: how often each
    size occurred in the previous step, which shows what varies.
    """
    sizes = Counter(one.num_bytes for one in lifetimes)
    varies = [
        sizes[one.num_bytes] != before[one.num_bytes] and not alive for one, alive in zip(lifetimes, lives, strict=True)
    ]
    roomy = [
        replace(one, num_bytes=math.ceil(one.num_bytes * ROOM)) if varied else one
        for one, varied in zip(lifetimes, varies, strict=True)
    ]
    arena = plan_arena([one for one, alive in zip(roomy, lives, strict=True) if not alive])
    places = iter(arena.offsets)
    offsets = [OUTLIVES if alive else next(places) for alive in lives]
    planned = [Planned(one.num_bytes, place, varied) for one, place, varied in zip(roomy, offsets, varies, strict=True)]
    return planned, arena.num_bytes


class StepArena:
    """The arena of one training run. note: reports when it is given up. Without an allocator it does nothing."""

    def __init__(self, used: StepAllocator | None = None, note: Callable[[str], None] = print) -> None:
        self._used = used
        self._note = note
        self._mode = Mode.RECORD if used else Mode.PASS_THROUGH
        self._to_record = 1 + NUM_RECORDS
        self._sizes: Counter[int] = Counter()
        self._num_plans = self._num_poor = self._num_good = self._arena_bytes = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """The block is one step of the calling thread."""
        if self._used is None or self._mode == Mode.PASS_THROUGH:
            yield
            return
        self._used.begin(self._mode, LEAST_BYTES)
        try:
            yield
        finally:
            self._used.end()
        if self._mode == Mode.RECORD:
            self._recorded(self._used)
        else:
            self._replayed(self._used)

    def abandon(self) -> None:
        """In the middle of a step that restarts in another form: drop the arena and record the new form."""
        if self._used is None or self._mode == Mode.PASS_THROUGH:
            return
        self._used.end()
        self._forget(self._used, to_record=1 + NUM_RECORDS)
        self._num_plans = 0
        self._used.begin(self._mode, LEAST_BYTES)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Between steps, around other work that needs much memory: that work may use the arena's memory, and leaves
        none behind.
        """
        if self._used is None or self._mode == Mode.PASS_THROUGH:
            yield
            return
        self._used.give_back()
        yield
        give_back_freed_memory()

    def figures(self) -> dict[str, float]:
        """Metrics of the step that has just ended; empty while none is replayed."""
        if self._used is None or self._mode != Mode.REPLAY or not self._num_good + self._num_poor:
            return {}
        result = self._used.figures()
        return {
            "arena_bytes": float(self._arena_bytes),
            "arena_peak_bytes": float(result.peak_bytes),
            "arena_hit_rate": result.served_share,
        }

    def close(self) -> None:
        if self._used is not None:
            self._used.drop()
        self._mode = Mode.PASS_THROUGH

    def _recorded(self, used: StepAllocator) -> None:
        self._to_record -= 1
        before = self._sizes
        lifetimes, lives = used.lifetimes()
        self._sizes = Counter(one.num_bytes for one in lifetimes)
        if self._to_record:
            return
        planned, arena_bytes = plan_replay(lifetimes, lives, before)
        try:
            used.plan(planned, arena_bytes)
        except OSError as error:
            self._give_up(f"an arena of {arena_bytes / 2**20:.0f} MiB cannot be had ({error.strerror})")
            return
        self._mode, self._arena_bytes = Mode.REPLAY, arena_bytes
        self._num_plans += 1

    def _replayed(self, used: StepAllocator) -> None:
        is_poor = used.figures().served_share < 1 - MOST_MISSED
        self._num_poor = self._num_poor + 1 if is_poor else 0
        self._num_good += not is_poor
        if self._num_good >= HELD_STEPS:
            self._num_plans = 1
        if self._num_poor < PATIENCE:
            return
        if self._num_plans >= MOST_PLANS:
            self._give_up(
                f"after {self._num_plans} plans steps still differ in more than {MOST_MISSED:.0%} of the bytes"
            )
        else:
            self._forget(used, to_record=NUM_RECORDS)

    def _forget(self, used: StepAllocator, *, to_record: int) -> None:
        used.drop()
        self._mode, self._to_record = Mode.RECORD, to_record
        self._num_poor = self._num_good = self._arena_bytes = 0

    def _give_up(self, why: str) -> None:
        self._note(f"step_arena is off from here on: {why}")
        self.close()


@contextmanager
def step_arena(is_wanted: bool, device: torch.device, note: Callable[[str], None]) -> Iterator[StepArena]:
    """The arena for a run on `device`. Raises `ConfigError` if it is impossible."""
    if is_wanted:
        check_machine(on_cpu=device.type == "cpu")
    arena = StepArena(StepAllocator() if is_wanted else None, note)
    try:
        yield arena
    finally:
        arena.close()


def _pointer(numbers: np.ndarray) -> "ctypes._Pointer[ctypes.c_int64]":
    return numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
