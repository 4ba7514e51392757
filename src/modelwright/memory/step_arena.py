"""One arena for all tensors of a step: an offset for each, such that no two tensors alive at the same time overlap.

Offsets by size: the largest tensor first, each into the smallest gap between those that live when it does (Pisarchyk
and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference", section 4.3: greedy by size, best fit), and
by birth, as an allocator would have to; the smaller arena wins. No arena can be smaller than the bytes alive at the
peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from modelwright.memory.lifetimes import Lifetime

ALIGNMENT = 64
"""Bytes: where PyTorch's allocator on the CPU lets tensors begin."""


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
    return Arena(
        lifetimes=tuple(lifetimes),
        offsets=tuple(offsets.tolist()),
        num_bytes=int((offsets + sizes).max(initial=0)),
        live_bytes=_most_alive(sizes, births, deaths),
    )


def _place(sizes: np.ndarray, births: np.ndarray, deaths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Place each block into the smallest gap that it fits into among those placed before it, else on top."""
    offsets, placed = np.zeros_like(sizes), np.zeros(len(sizes), dtype=bool)
    for number in order:
        if sizes[number]:
            near = placed & (births < deaths[number]) & (births[number] < deaths)
            offsets[number] = _best_gap(offsets[near], offsets[near] + sizes[near], int(sizes[number]))
            placed[number] = True
    return offsets


def _best_gap(starts: np.ndarray, ends: np.ndarray, size: int) -> int:
    """Offset of the smallest gap of at least `size`; the end if there is none."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    before = np.concatenate(([0], reached[:-1]))
    gaps = starts - before
    fitting = np.flatnonzero(gaps >= size)
    return int(before[fitting[np.argmin(gaps[fitting])]]) if len(fitting) else int(reached[-1])


def _most_alive(sizes: np.ndarray, births: np.ndarray, deaths: np.ndarray) -> int:
    changes = np.zeros(int(deaths.max(initial=0)) + 1, dtype=np.int64)
    np.add.at(changes, births, sizes)
    np.subtract.at(changes, deaths, sizes)
    return int(changes.cumsum().max(initial=0))
