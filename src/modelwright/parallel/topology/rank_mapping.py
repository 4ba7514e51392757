"""Maps ranks to positions on the mesh so that the ranks that communicate most have the fastest links.

`place` is a pure function: costs of the links and sizes of the axes in, a permutation of the ranks out; the same input
gives the same answer on every rank. `take_places` applies it by renumbering the processes, before anything was built on
the old numbers. An axis consists of lines of ranks (the other coordinates fixed) that work at the same time: the
slowest hop of the slowest line determines the cost of the axis. All axes but the pipeline close to rings.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from modelwright.parallel.mesh import World
from modelwright.parallel.topology.link_costs import Links, LinksConfig, measure_links

OPEN_AXES = ("pipeline",)
MAX_EVALUATIONS = 20_000
"""Limit of the search; counted, not timed, so that all ranks stop at the same answer."""


@dataclass(frozen=True, kw_only=True)
class AxisTraffic:
    """Traffic on each hop of an axis in one step: number of sequential messages, and bytes in each."""

    num_messages: float
    num_bytes: float


DEFAULT_TRAFFIC = {
    "pipeline": AxisTraffic(num_messages=16, num_bytes=2**20),
    "replicate": AxisTraffic(num_messages=2, num_bytes=2**24),
    "shard": AxisTraffic(num_messages=96, num_bytes=2**20),
    "context": AxisTraffic(num_messages=64, num_bytes=2**20),
    "tensor": AxisTraffic(num_messages=256, num_bytes=2**20),
}
"""Default where the traffic was not measured: the order in which a transformer's axes depend on their links (tensor:
several messages per layer and microbatch; context: per layer; shard: weights of each layer; pipeline: per microbatch;
replicate: once a step)."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The chosen mapping: position i of the mesh is held by the process with rank order[i] at the start.
    seconds_before, seconds_after: cost of one step's messages in the given order and in this one.
    """

    links: Links
    order: tuple[int, ...]
    seconds_before: float
    seconds_after: float


def find_places(
    world: World,
    axes: Mapping[str, int],
    config: LinksConfig,
    traffic: Mapping[str, AxisTraffic] = DEFAULT_TRAFFIC,
    *,
    host: str = "",
) -> Placement:
    """Measures the links (or takes them from the cache) and chooses the order; the same on all ranks. Collective. host:
    this rank's host, "" for its network name.
    """
    links = measure_links(world, config, host=host)
    given, order = tuple(range(world.size)), place(links, axes, traffic)
    before, after = (step_seconds(links, axes, numbers, traffic) for numbers in (given, order))
    return Placement(links=links, order=order, seconds_before=before, seconds_after=after)


def place(
    links: Links,
    axes: Mapping[str, int],
    traffic: Mapping[str, AxisTraffic] = DEFAULT_TRAFFIC,
    *,
    max_evaluations: int = MAX_EVALUATIONS,
) -> tuple[int, ...]:
    """Assigns position i of the mesh (row-major over `axes`, slowest first) to rank place(...)[i].

    Local search (swaps of two ranks, then of aligned blocks of ranks) from the given order, from orders that grow along
    the fastest links, and from shuffles until the evaluations are spent. The given order is kept when nothing is
    cheaper.
    """
    size = math.prod(axes.values())
    assert size == links.num_ranks, "the axes must make up the ranks"
    # Swaps (first, second, length) of aligned blocks: single ranks, then whole lines of the fastest axes.
    lengths = {1, *itertools.accumulate(reversed(list(axes.values())), operator.mul)} - {size}
    moves = [
        (first, second, length)
        for length in sorted(lengths)
        for first, second in itertools.combinations(range(0, size, length), 2)
    ]
    cost = _Cost(links, axes, traffic)
    best, best_cost = tuple(range(size)), cost(range(size))
    evaluations = 1
    for start in _starts(links, size):
        if best_cost[0] <= cost.bound or evaluations >= max_evaluations:
            break
        result, found_cost, spent = _improve(start, cost, moves, max_evaluations - evaluations)
        evaluations += spent
        if found_cost < best_cost:
            best, best_cost = result, found_cost
    return best


def step_seconds(
    links: Links, axes: Mapping[str, int], order: Sequence[int], traffic: Mapping[str, AxisTraffic] = DEFAULT_TRAFFIC
) -> float:
    """Seconds of one step's messages if position i is held by rank order[i]."""
    return _Cost(links, axes, traffic)(order)[0]


def hops(axes: Mapping[str, int]) -> dict[str, list[tuple[int, int]]]:
    """Pairs of positions that communicate along each axis of more than one rank."""
    positions = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    result = {}
    for number, (name, size) in enumerate(axes.items()):
        if size == 1:
            continue
        lines = np.moveaxis(positions, number, -1).reshape(-1, size)
        # Between two ranks the way back is the same link.
        closed = name not in OPEN_AXES and size > 2
        result[name] = [
            (int(line[place]), int(line[(place + 1) % size]))
            for line in lines
            for place in range(size if closed else size - 1)
        ]
    return result


def take_places(world: World, order: Sequence[int]) -> World:
    """Renumbers the processes: rank order[i] becomes rank i. Collective; `world` must be all processes.

    The old process group is destroyed, so nothing may have been built on it. The store through which the processes
    found each other is kept, wherever its server runs.
    """
    assert world.group is None, "only the whole world can be numbered anew"
    if list(order) == list(range(world.size)):
        return world
    store = PrefixStore("placed", dist.distributed_c10d._get_default_store())
    backend, rank = dist.get_backend(), list(order).index(world.rank)
    world.barrier()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world.size)
    return World(rank=rank, size=world.size, device=world.device)


class _Cost:
    """Seconds per step of an order: the sum over axes of their slowest hop; then the mean hop, as a tie-breaker."""

    def __init__(self, links: Links, axes: Mapping[str, int], traffic: Mapping[str, AxisTraffic]) -> None:
        self._axes = []
        for name, pairs in hops(axes).items():
            of_axis = traffic[name]
            costs_RR = np.array(links.costs(of_axis.num_bytes)) * of_axis.num_messages
            firsts, seconds = np.array(pairs).T
            self._axes.append((costs_RR, firsts, seconds))
        apart = ~np.eye(links.num_ranks, dtype=bool)
        # No order can be cheaper: every axis on the fastest of all links.
        self.bound = _rounded(sum(float(costs_RR[apart].min()) for costs_RR, _, _ in self._axes))

    def __call__(self, order: Sequence[int]) -> tuple[float, float]:
        places = np.asarray(order)
        slowest = mean = 0.0
        for costs_RR, firsts, seconds in self._axes:
            costs = costs_RR[places[firsts], places[seconds]]
            slowest += float(costs.max())
            mean += float(costs.mean())
        return _rounded(slowest), _rounded(mean)


def _rounded(seconds: float) -> float:
    """Rounds to 12 digits, so that sums in another order do not pass for an improvement."""
    return float(f"{seconds:.12g}")


def _starts(links: Links, size: int) -> Iterator[tuple[int, ...]]:
    yield tuple(range(size))
    costs = links.costs(2**20)
    for first in range(size):
        order, left = [first], set(range(size)) - {first}
        while left:
            order.append(min(left, key=lambda rank: (costs[order[-1]][rank], rank)))
            left.remove(order[-1])
        yield tuple(order)
    draw = np.random.default_rng(0)
    while True:
        yield tuple(int(rank) for rank in draw.permutation(size))


def _improve(
    start: tuple[int, ...], cost: _Cost, moves: Sequence[tuple[int, int, int]], allowed: int
) -> tuple[tuple[int, ...], tuple[float, float], int]:
    """Applies moves that make the order cheaper while there are any; returns the number of evaluations, too."""
    best, best_cost, moved, spent = start, cost(start), True, 1
    while moved and spent < allowed:
        moved = False
        for first, second, length in moves:
            order = list(best)
            a, b = slice(first, first + length), slice(second, second + length)
            order[a], order[b] = order[b], order[a]
            spent += 1
            order_cost = cost(order)
            if order_cost < best_cost:
                best, best_cost, moved = tuple(order), order_cost, True
    return best, best_cost, spent
