"""Slow references for `modelwright.train.memory`: lifetimes, arenas, budgets and heaps by their definitions."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from modelwright.train.memory.activations import Budget, SegmentChoice, peak, total_cost
from modelwright.train.memory.trace import Arena, Lifetime


def live_bytes_naive(lifetimes: Sequence[Lifetime], time: int) -> int:
    """The bytes alive at one operator, by the definition; the reference for `MemoryTimeline.live_bytes`."""
    return sum(one.num_bytes for one in lifetimes if one.birth <= time < one.death)


def check_arena(arena: Arena) -> None:
    """Assert that no two tensors that are alive at once share a byte."""
    for (left, at), (right, there) in itertools.combinations(zip(arena.lifetimes, arena.offsets, strict=True), 2):
        apart = at + left.num_bytes <= there or there + right.num_bytes <= at
        assert apart or not _together(left, right), (left, at, right, there)


def least_arena_naive(lifetimes: Sequence[Lifetime]) -> int:
    """The size of the smallest arena there is: every order, each tensor as low as it can be. For up to eight or so."""
    return min((_lowest_first(order) for order in itertools.permutations(lifetimes)), default=0)


def _lowest_first(order: Sequence[Lifetime]) -> int:
    placed: list[tuple[Lifetime, int]] = []
    for one in order:
        near = [(at, at + other.num_bytes) for other, at in placed if _together(one, other)]
        places = sorted({0, *(end for _, end in near)})
        lowest = next(p for p in places if all(p + one.num_bytes <= start or p >= end for start, end in near))
        placed.append((one, lowest))
    return max(at + one.num_bytes for one, at in placed)


def _together(left: Lifetime, right: Lifetime) -> bool:
    return left.birth < right.death and right.birth < left.death


def solve_naive(choices: Sequence[SegmentChoice], num_layers: int, budget: Budget) -> list[SegmentChoice] | None:
    """All sequences, the cheapest that fits (the one that keeps least, among equals); the reference for `solve`."""
    fitting = [way for way in _all_ways(choices, num_layers) if peak(way, budget) <= budget.num_bytes]
    return min(fitting, key=lambda way: (total_cost(way), peak(way, budget)), default=None)


def _all_ways(choices: Sequence[SegmentChoice], num_layers: int) -> Iterator[list[SegmentChoice]]:
    if num_layers == 0:
        yield []
    for choice in choices:
        if choice.segment.num_layers <= num_layers:
            for rest in _all_ways(choices, num_layers - choice.segment.num_layers):
                yield [choice, *rest]


@dataclass
class NaiveHeap:
    """What `tensor_heap.cpp` does in a heap of one piece: the smallest free range that fits, the lowest of equal ones,
    else the end. free: [start, end) in order; every size is a multiple of the alignment.
    """

    grow_bytes: int
    end: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)

    def allocate(self, size: int) -> int:
        """The offset of the block."""
        fitting = [(end - start, start) for start, end in self.free if end - start >= size]
        if not fitting:
            tail = next((end - start for start, end in self.free if end == self.end), 0)
            grown = self.end + -(-(size - tail) // self.grow_bytes) * self.grow_bytes
            self._add(self.end, grown)
            self.end = grown
            return self.allocate(size)
        _, start = min(fitting)
        whole = next(one for one in self.free if one[0] == start)
        self.free.remove(whole)
        if whole[1] > start + size:
            self._add(start + size, whole[1])
        return start

    def give(self, start: int, size: int) -> None:
        self._add(start, start + size)

    def _add(self, start: int, end: int) -> None:
        self.free.append((start, end))
        merged: list[tuple[int, int]] = []
        for start, end in sorted(self.free):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self.free = merged
