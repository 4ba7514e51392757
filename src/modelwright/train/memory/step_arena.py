"""Plans an arena for all tensors of a step: an offset for each, such that no two tensors alive together overlap.

Offsets by size: the largest tensor first, each into the smallest gap between those that live when it does (Pisarchyk
and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference", section 4.3: greedy by size, best fit), and
by birth, as an allocator would have to; the smaller arena wins. No arena can be smaller than the bytes alive at the
peak.

Lifetimes of the tensors of a step, the bytes alive over time, and the peak.

Time counts operators. A tensor is alive from its birth up to and including the moment before its death.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import numpy as np

Kind = Literal["weights", "optimizer", "gradients", "activations", "temporary"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""activations: born in forward and still there when backward begins; temporary: all else that comes and goes."""
Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """Lifetime of a block of memory, which any number of tensors may view. birth: number of the operator that allocated
    it; death: that of the operator before which it was freed, or the end of the step; operator and place: name of the
    allocating operator, and its place in the model.
    """

    num_bytes: int
    birth: int
    death: int
    kind: Kind
    operator: str = ""
    place: str = ""

    def __post_init__(self) -> None:
        assert 0 <= self.birth < self.death
        assert self.num_bytes >= 0


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """The lifetimes of one step, from operator 0 up to `length`; phases: (first operator, phase), in order."""

    lifetimes: tuple[Lifetime, ...]
    length: int
    phases: tuple[tuple[int, Phase], ...] = ()

    def live_bytes(self, kind: Kind | None = None) -> list[int]:
        """Bytes alive at each operator, of one kind or of all."""
        # Differences at births and deaths, whose running sum is the bytes alive: linear in blocks and operators.
        changes = [0] * (self.length + 1)
        for one in self.lifetimes:
            if kind is None or one.kind == kind:
                changes[one.birth] += one.num_bytes
                changes[min(one.death, self.length)] -= one.num_bytes
        return list(accumulate(changes[: self.length]))

    @property
    def peak_time(self) -> int:
        """The first operator at which the most bytes are alive."""
        live = self.live_bytes()
        return max(range(len(live)), key=lambda time: live[time]) if live else 0

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes(), default=0)

    def alive(self, time: int) -> list[Lifetime]:
        """The largest blocks alive, largest first."""
        result = [one for one in self.lifetimes if one.birth <= time < one.death]
        return sorted(result, key=lambda one: (-one.num_bytes, one.birth))

    def by_kind(self, time: int) -> Mapping[Kind, int]:
        """Returns the bytes alive of every kind."""
        alive = self.alive(time)
        return {kind: sum(one.num_bytes for one in alive if one.kind == kind) for kind in KINDS}

    def phase_at(self, time: int) -> Phase:
        result: Phase = "forward"
        for start, phase in self.phases:
            result = phase if start <= time else result
        return result

    @property
    def of_step(self) -> tuple[Lifetime, ...]:
        """Blocks allocated and freed within the step: all but weights and optimizer states."""
        return tuple(one for one in self.lifetimes if one.kind not in ("weights", "optimizer"))


ALIGNMENT = 64
"""Alignment of tensors in bytes, that of PyTorch's allocator on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Arena:
    """The offset of each of `lifetimes`, in order, and the arena's size. live_bytes: the lower bound, which is the
    bytes alive at the peak, each tensor rounded up to the alignment.
    """

    lifetimes: tuple[Lifetime, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    live_bytes: int

    @property
    def reuse_share(self) -> float:
        """Memory saved relative to an arena in which no two tensors share space, in [0, 1]."""
        total = sum(one.num_bytes for one in self.lifetimes)
        return 1.0 - self.num_bytes / total if total else 0.0

    @property
    def fragmentation(self) -> float:
        """The arena's share above the lower bound."""
        return 1.0 - self.live_bytes / self.num_bytes if self.num_bytes else 0.0


def plan_arena(lifetimes: Sequence[Lifetime], *, alignment: int = ALIGNMENT) -> Arena:
    """The smaller of the arenas planned by size and by birth."""
    sizes = np.array([-(-one.num_bytes // alignment) * alignment for one in lifetimes], dtype=np.int64)
    births, deaths = (np.array([getattr(one, name) for one in lifetimes], np.int64) for name in ("birth", "death"))
    orders = (np.lexsort((births, -sizes)), np.lexsort((-sizes, births)))
    result = [_place(sizes, births, deaths, order) for order in orders]
    offsets = min(result, key=lambda offsets: int((offsets + sizes).max(initial=0)))
    changes = np.zeros(int(deaths.max(initial=0)) + 1, dtype=np.int64)
    np.add.at(changes, births, sizes)
    np.subtract.at(changes, deaths, sizes)
    return Arena(
        lifetimes=tuple(lifetimes),
        offsets=tuple(offsets.tolist()),
        num_bytes=int((offsets + sizes).max(initial=0)),
        live_bytes=int(changes.cumsum().max(initial=0)),
    )


def _place(sizes: np.ndarray, births: np.ndarray, deaths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Place each block into the smallest gap that it fits into among those placed before it, else on top."""
    offsets, placed = np.zeros_like(sizes), np.zeros(len(sizes), dtype=bool)
    for number in order:
        if not sizes[number]:
            continue
        near = placed & (births < deaths[number]) & (births[number] < deaths)
        placed[number] = True
        if not near.any():
            continue
        by_start = np.argsort(offsets[near], kind="stable")
        starts, ends = offsets[near][by_start], (offsets[near] + sizes[near])[by_start]
        # Blocks that live with this one may overlap each other, so a gap begins where all before it have ended.
        reached = np.maximum.accumulate(ends)
        before = np.concatenate(([0], reached[:-1]))
        gaps = starts - before
        fitting = np.flatnonzero(gaps >= sizes[number])
        offsets[number] = before[fitting[np.argmin(gaps[fitting])]] if len(fitting) else reached[-1]
    return offsets
