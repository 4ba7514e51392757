"""Chooses what to save, recompute and offload under a memory budget at the least cost.

Blocks run backward from the last to the first. While a segment runs, everything saved by the segments before it is
still there, so the budget must hold at every such moment. Solved by dynamic programming over (blocks done, bytes saved
so far), after the knapsack form of Beaumont et al. 2021, "Efficient Combination of Rematerialization and Offloading"
and of PyTorch's memory-budget partitioner.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from modelwright.core.errors import ConfigError
from modelwright.train.memory.activations import BlockShape, Segment
from modelwright.train.memory.config import OPERATORS

_QUANTA = 2**13
"""Steps into which the budget is divided; saved bytes are rounded up to whole steps, so the budget always holds."""
_MAX_UNIT_LAYERS = 16
"""Longest segment that is tried: longer ones save few inputs more, for much more memory while they are recomputed."""
_CAPS = 24
"""Caps on the saved bytes that are tried where several microbatches are in flight."""


@dataclass(frozen=True, kw_only=True)
class SegmentChoice:
    """A treatment of a segment's blocks: bytes saved until backward, extra bytes during it, and cost in FLOPs."""

    segment: Segment
    kept_bytes: int
    moment_bytes: int
    cost: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limit of the activations of one rank.

    in_flight: microbatches whose activations are held at once (a pipeline's stages hold several); end_bytes: needed
    between the last block's forward and its backward (the head's chunk of logits).
    """

    num_bytes: int
    in_flight: int = 1
    end_bytes: int = 0


def block_choices(
    shape: BlockShape, num_tokens: int, num_layers: int, *, flops_per_byte: float = 0.0
) -> list[SegmentChoice]:
    """The choices for homogeneous blocks: save everything; save the outputs that cost most per byte; segments of
    blocks. flops_per_byte: cost in FLOPs of each byte that leaves or returns if saved tensors may also be offloaded;
    0 disables offloading.
    """
    by_cost = sorted(OPERATORS, key=lambda name: shape.flops(name) / shape.output_bytes(name), reverse=True)
    segments = [Segment(num_layers=1, recompute=False)]
    for count in range(1, len(by_cost) + 1):
        keep = tuple(sorted(by_cost[:count], key=OPERATORS.index))
        segments.append(Segment(num_layers=1, recompute=True, keep=keep))
    units = range(1, min(_MAX_UNIT_LAYERS, num_layers) + 1)
    segments += [Segment(num_layers=n, recompute=True) for n in units]
    if flops_per_byte:
        segments += [replace(segment, offload=True) for segment in segments]
    return [
        SegmentChoice(
            segment=segment,
            kept_bytes=num_tokens * shape.kept_bytes(segment),
            moment_bytes=num_tokens * shape.moment_bytes(segment),
            cost=num_tokens * (shape.recomputed_flops(segment) + flops_per_byte * shape.moved_bytes(segment)),
        )
        for segment in segments
    ]


def solve(choices: Sequence[SegmentChoice], num_layers: int, budget: Budget) -> list[SegmentChoice]:
    """The cheapest sequence of choices for `num_layers` blocks within the budget.

    Exact up to rounding saved bytes to 1/8192 of the budget. With several microbatches in flight the others hold all
    that the blocks save, so the solver tries caps on that total. Raises `ConfigError` that names the least budget.
    """
    best = _best(choices, num_layers, budget)
    if best is not None:
        return best
    raise ConfigError(
        f"budget_bytes: {budget.num_bytes} is not enough for the activations of {num_layers} blocks; the minimum "
        f"is about {least_budget(choices, num_layers, budget)}; use smaller microbatches or more ranks"
    )


def peak(way: Sequence[SegmentChoice], budget: Budget) -> int:
    """The most bytes held at once."""
    kept = itertools.accumulate(choice.kept_bytes for choice in way)
    moments = [before + choice.moment_bytes for before, choice in zip(kept, way, strict=True)]
    total = sum(choice.kept_bytes for choice in way)
    return (budget.in_flight - 1) * total + max(*moments, total + budget.end_bytes)


def total_cost(way: Sequence[SegmentChoice]) -> float:
    return math.fsum(choice.cost for choice in way)


def least_budget(choices: Sequence[SegmentChoice], num_layers: int, budget: Budget) -> int:
    """The smallest budget that has a solution, to about a percent."""
    # Doubled until it suffices, then bisected: solutions do not get worse with more bytes.
    low, high = 1, max(1, budget.num_bytes)
    while _best(choices, num_layers, replace(budget, num_bytes=high)) is None:
        high *= 2
    while high - low > high // 100:
        middle = (low + high) // 2
        result = _best(choices, num_layers, replace(budget, num_bytes=middle))
        low, high = (low, middle) if result else (middle, high)
    return high


def _best(choices: Sequence[SegmentChoice], num_layers: int, budget: Budget) -> list[SegmentChoice] | None:
    others = budget.in_flight - 1
    if not others:
        return _solve_capped(choices, num_layers, budget, budget.num_bytes)
    # The other microbatches hold `others` times the saved total, which is unknown before a solution: caps are tried.
    caps = [budget.num_bytes * step // (_CAPS * budget.in_flight) for step in range(1, _CAPS + 1)]
    ways = [
        _solve_capped(choices, num_layers, replace(budget, num_bytes=budget.num_bytes - others * c), c) for c in caps
    ]
    return min((way for way in ways if way), key=total_cost, default=None)


def _solve_capped(
    choices: Sequence[SegmentChoice], num_layers: int, budget: Budget, cap: int
) -> list[SegmentChoice] | None:
    """The cheapest sequence for one microbatch in flight that saves at most `cap` bytes in total."""
    quantum = max(1, budget.num_bytes // _QUANTA)
    steps = budget.num_bytes // quantum
    # costs[n, b]: least cost of the first n layers with b quanta saved; taken[n, b]: the choice that ends there.
    costs = np.full((num_layers + 1, steps + 1), np.inf)
    taken = np.full((num_layers + 1, steps + 1), -1, dtype=np.int16)
    costs[0, 0] = 0.0
    sizes = [-(-choice.kept_bytes // quantum) for choice in choices]
    for layer in range(num_layers):
        for index, choice in enumerate(choices):
            end = layer + choice.segment.num_layers
            # Above what is saved before and by the segment, its backward needs room for the moment's bytes.
            highest = steps - sizes[index] - -(-choice.moment_bytes // quantum)
            if end > num_layers or highest < 0:
                continue
            reached = costs[layer, : highest + 1] + choice.cost
            target = slice(sizes[index], sizes[index] + highest + 1)
            better = reached < costs[end, target]
            costs[end, target][better] = reached[better]
            taken[end, target][better] = index
    last = min(cap, budget.num_bytes - budget.end_bytes) // quantum
    if last < 0 or not np.isfinite(costs[num_layers, : last + 1]).any():
        return None
    way: list[SegmentChoice] = []
    layer, kept = num_layers, int(np.argmin(costs[num_layers, : last + 1]))
    while layer:
        index = int(taken[layer, kept])
        way.append(choices[index])
        layer, kept = layer - choices[index].segment.num_layers, kept - sizes[index]
    return way[::-1]
