"""Slow references for `modelwright.memory`: what lifetimes, arenas, budgets and replays are by their definitions."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from modelwright.memory.budget import Budget, SegmentChoice, peak, total_cost
from modelwright.memory.lifetimes import Lifetime
from modelwright.memory.step_arena import Arena
from modelwright.memory.step_arena_runtime import OUTLIVES, Planned

WINDOW = 64
"""How far back a block of equal size is looked for, counted in blocks that do not vary."""
NEAR = 4
"""How far one that varies."""
SKIP = 2
"""Bytes of the plan that may be passed over, for each byte that has come without a place."""


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
class ReplayNaive:
    """Replays steps by one plan: its allocations in their order.

    Steps need not be alike. Sizes that come equally often in steps say where in the plan a step stands: each takes the
    next planned block of its size, unless more of the plan would be passed over than has come without a place; else one
    that was passed over. What varies in number or size (attention tiles of packed rows, say) is planned with some room;
    it takes a block of that kind nearby which fits and is free, and moves nothing else. A place is given out only while
    nothing alive overlaps it. All else comes from the usual allocator.

    living: where blocks in the arena begin and end; due: the number of the next block that does not vary, counted
    among those; refused_bytes: of blocks that do not vary and had no place since the last one that had.
    """

    planned: Sequence[Planned]
    living: dict[int, int] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    due: int = 0
    refused_bytes: int = 0
    num_served: int = 0
    num_missed: int = 0
    num_outliving: int = 0

    def begin(self) -> None:
        """A new step; what earlier ones have left in the arena keeps its place."""
        self.taken = set()
        self.due = self.refused_bytes = self.num_served = self.num_missed = self.num_outliving = 0

    def allocate(self, num_bytes: int) -> int | None:
        """An offset in the arena, or None for the usual allocator."""
        number = self._following(num_bytes)
        if number is not None:
            self.due, self.refused_bytes = self._position(number) + 1, 0
        else:
            number = self._passed_over(num_bytes)
        if number is None:
            number = self._of_those_that_vary(num_bytes)
        if number is None:
            self.num_missed += 1
            return None
        self.taken.add(number)
        offset = self.planned[number].offset
        if offset == OUTLIVES:
            self.num_outliving += 1
            return None
        if not self._is_free(offset, num_bytes):
            self.num_missed += 1
            return None
        self.living[offset] = offset + num_bytes
        self.num_served += 1
        return offset

    def free(self, offset: int) -> None:
        del self.living[offset]

    def _following(self, num_bytes: int) -> int | None:
        fixed = [(number, one.num_bytes) for number, one in enumerate(self.planned) if not one.varies]
        sizes = [size for _, size in fixed]
        if num_bytes not in sizes:
            return None
        if num_bytes in sizes[self.due :]:
            position = sizes.index(num_bytes, self.due)
            if sum(sizes[self.due : position]) <= SKIP * (self.refused_bytes + num_bytes):
                return fixed[position][0]
        self.refused_bytes += num_bytes
        return None

    def _passed_over(self, num_bytes: int) -> int | None:
        found = [
            number
            for number, one in self._left(varies=False)
            if one.num_bytes == num_bytes and self.due - WINDOW <= self._position(number) < self.due
        ]
        return max(found, default=None)

    def _of_those_that_vary(self, num_bytes: int) -> int | None:
        """The nearest one; the earlier of two that are equally near."""
        near = [
            (self._distance(number), number)
            for number, one in self._left(varies=True)
            if one.num_bytes // 2 <= num_bytes <= one.num_bytes and self._is_free(one.offset, num_bytes)
        ]
        return min(near)[1] if near and min(near)[0] <= NEAR else None

    def _left(self, *, varies: bool) -> list[tuple[int, Planned]]:
        kind = [(number, one) for number, one in enumerate(self.planned) if one.varies == varies]
        return [(number, one) for number, one in kind if number not in self.taken]

    def _position(self, number: int) -> int:
        return sum(not one.varies for one in self.planned[:number])

    def _distance(self, number: int) -> int:
        return abs(self._position(number) - self.due)

    def _is_free(self, offset: int, num_bytes: int) -> bool:
        return not any(start < offset + num_bytes and offset < end for start, end in self.living.items())
