"""All-reduce algorithms as plans: rounds of point-to-point steps, which are not executed here.

A plan states for every round which rank sends which chunks of the vector to whom, and whether the receiver adds them to
its own or replaces its own. The same plan is executed by `collectives.py`, priced by `plan_seconds` and verified by the
tests, which run it on symbols.

Why all ranks end with the same bits. Ring, tree and hierarchical: every chunk's sum is finished on one rank and copied
from there. Doubling: both partners of an exchange hold a and b and compute a + b and b + a, which IEEE addition makes
equal; by induction all ranks of a block hold equal bits. The tests verify it: each rank's result is the same
expression, up to swapping the two sides of an addition, with every rank's value in it once.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelwright.parallel.topology.links import Links


@dataclass(frozen=True)
class TransferStep:
    """Rank `source` sends chunks first, ..., last - 1 to rank `target`, which adds or stores them."""

    source: int
    target: int
    first: int
    last: int
    adds: bool


Round = tuple[TransferStep, ...]


@dataclass(frozen=True)
class AllReducePlan:
    """name: the algorithm; num_chunks: equal parts of the vector; rounds: steps that read the values before each."""

    name: str
    num_ranks: int
    num_chunks: int
    rounds: tuple[Round, ...]


def chunk_bounds(length: int, num_chunks: int) -> list[int]:
    """Returns the bounds of `num_chunks` nearly equal parts of `length` elements; parts may be empty."""
    return [length * chunk // num_chunks for chunk in range(num_chunks + 1)]


def ring(order: Sequence[int]) -> AllReducePlan:
    """Reduce-scatter, then all-gather around a ring: 2 (n - 1) rounds of 1/n of the vector. Best for long vectors."""
    return AllReducePlan("ring", len(order), len(order), tuple(_ring_rounds(order, len(order))))


def doubling(order: Sequence[int]) -> AllReducePlan:
    """Recursive doubling: partners at distance 1, 2, 4, ... exchange everything in log2 n rounds, the minimum latency.
    Ranks beyond the largest power of two first send their values to a partner and get the sum from it at the end.
    """
    return AllReducePlan("doubling", len(order), 1, tuple(_doubling_rounds(order, 1)))


def tree(parents: Sequence[tuple[int, int]], num_ranks: int) -> AllReducePlan:
    """Sums toward the root of a tree, then copies outward. parents: (parent, child) in the order of the copying."""
    return AllReducePlan("tree", num_ranks, 1, (*_towards_root(parents, 1), *_outwards(parents, 1)))


def hierarchical(groups: Sequence[Sequence[int]], across: str) -> AllReducePlan:
    """Sums inside each group to its first rank, among those by "ring" or "doubling", then copies inside the groups."""
    leaders = [group[0] for group in groups]
    # A ring across the groups divides the vector by their number; all parts of a plan count in the same chunks.
    num_chunks = len(groups) if across == "ring" else 1
    inside = [binomial(group) for group in groups]
    between = (_ring_rounds if across == "ring" else _doubling_rounds)(leaders, num_chunks)
    rounds = (
        *_side_by_side([_towards_root(parents, num_chunks) for parents in inside]),
        *between,
        *_side_by_side([_outwards(parents, num_chunks) for parents in inside]),
    )
    return AllReducePlan(f"hierarchical_{across}", sum(map(len, groups)), num_chunks, rounds)


def sharded(groups: Sequence[Sequence[int]]) -> AllReducePlan:
    """Hierarchical for long vectors and groups of one size: reduce-scatter inside each group, rings across, all-gather.

    Every rank sends one part of the vector across, so that the links inside a group carry less than two vectors.
    """
    size, num_groups = len(groups[0]), len(groups)
    num_chunks = size * num_groups
    inside = [_ring_rounds(group, num_chunks) for group in groups]
    # After the reduce-scatter the rank at place p holds part p + 1 of its group's sum.
    across = []
    for place in range(size):
        first = (place + 1) % size * num_groups
        rounds = _ring_rounds([group[place] for group in groups], num_groups)
        across.append(
            [tuple(replace(one, first=one.first + first, last=one.last + first) for one in steps) for steps in rounds]
        )
    rounds = (
        *_side_by_side([rounds[: size - 1] for rounds in inside]),
        *_side_by_side(across),
        *_side_by_side([rounds[size - 1 :] for rounds in inside]),
    )
    return AllReducePlan("sharded", num_chunks, num_chunks, rounds)


def binomial(order: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the binomial tree over ranks in that order, as (parent, child) in the order of copying from order[0]."""
    pairs, informed = [], 1
    while informed < len(order):
        pairs += [(order[place], order[place + informed]) for place in range(informed) if place + informed < len(order)]
        informed *= 2
    return pairs


def fastest_tree(links: Links, num_bytes: float) -> list[tuple[int, int]]:
    """Returns a tree for these links: repeatedly adds the edge over which the next rank can be reached first. "Earliest
    completing edge first" of Bhat, Raghavendra, Prasanna, Efficient collective communication in distributed
    heterogeneous systems (ICDCS 1999). The root is the rank from which the tree completes first.
    """
    costs, ranks = links.costs(num_bytes), range(links.num_ranks)
    trees: list[tuple[float, list[tuple[int, int]]]] = []
    for root in ranks:
        free_at, pairs, done = {root: 0.0}, [], 0.0
        reach = [(costs[root][rank], root, rank) for rank in ranks if rank != root]
        heapq.heapify(reach)
        while len(free_at) < len(costs):
            at, parent, child = heapq.heappop(reach)
            if child in free_at:
                continue
            now = free_at[parent] + costs[parent][child]
            # The parent has sent something since this entry was made.
            if now > at:
                heapq.heappush(reach, (now, parent, child))
                continue
            free_at[parent] = free_at[child] = done = at
            pairs.append((parent, child))
            for rank in ranks:
                if rank not in free_at:
                    heapq.heappush(reach, (at + costs[child][rank], child, rank))
        trees.append((done, pairs))
    return min(trees, key=lambda tree: tree[0])[1]


def _ring_rounds(order: Sequence[int], num_chunks: int) -> list[Round]:
    size = len(order)
    width = num_chunks // size
    turns = [(shift, True) for shift in range(size - 1)] + [(shift - 1, False) for shift in range(size - 1)]
    rounds: list[Round] = []
    for shift, adds in turns:
        steps = []
        for place in range(size):
            first = (place - shift) % size * width
            steps.append(TransferStep(order[place], order[(place + 1) % size], first, first + width, adds))
        rounds.append(tuple(steps))
    return rounds


def _doubling_rounds(order: Sequence[int], num_chunks: int) -> list[Round]:
    power = 1 << (len(order).bit_length() - 1)
    extra = list(zip(order[power:], order, strict=False))
    rounds = [tuple(TransferStep(late, partner, 0, num_chunks, True) for late, partner in extra)]
    distance = 1
    while distance < power:
        pairs = ((place, place ^ distance) for place in range(power))
        rounds.append(tuple(TransferStep(order[a], order[b], 0, num_chunks, True) for a, b in pairs))
        distance *= 2
    rounds.append(tuple(TransferStep(partner, late, 0, num_chunks, False) for late, partner in extra))
    return [steps for steps in rounds if steps]


def _outwards(parents: Sequence[tuple[int, int]], num_chunks: int) -> list[Round]:
    """Copies down a tree; a rank sends one message per round."""
    rounds: list[list[TransferStep]] = []
    next_round: dict[int, int] = {}
    for parent, child in parents:
        number = next_round.get(parent, 0)
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number].append(TransferStep(parent, child, 0, num_chunks, False))
        next_round[parent] = next_round[child] = number + 1
    return [tuple(steps) for steps in rounds]


def _towards_root(parents: Sequence[tuple[int, int]], num_chunks: int) -> list[Round]:
    """The copies of `_outwards` reversed in time, as additions."""
    backwards = reversed(_outwards(parents, num_chunks))
    return [tuple(TransferStep(step.target, step.source, 0, num_chunks, True) for step in steps) for steps in backwards]


def _side_by_side(parts: Sequence[Sequence[Round]]) -> list[Round]:
    """Joins the rounds of several groups, which run at the same time, aligned at their ends."""
    longest = max(map(len, parts))
    padded = [[()] * (longest - len(part)) + list(part) for part in parts]
    return [tuple(step for steps in together for step in steps) for together in zip(*padded, strict=True)]


def plan_seconds(plan: AllReducePlan, links: Links, num_bytes: float) -> float:
    """Predicts the time of a plan for a vector of this size.

    Every rank has a clock; a step ends one message's time after both of its ranks are free. Messages of one round
    between the same two hosts, or between the same two groups of `Links.groups`, share the bandwidth of the network
    card and the uplink.
    """
    group_of = {rank: number for number, group in enumerate(links.groups()) for rank in group}
    clocks = [0.0] * plan.num_ranks
    for steps in plan.rounds:
        users: dict[Any, int] = {}
        for step in steps:
            for path in _paths(step, links.hosts, group_of):
                users[path] = users.get(path, 0) + 1
        # Clocks advance after the round: all its steps start from the values before it.
        ends: dict[int, float] = {}
        for step in steps:
            sharing = max((users[path] for path in _paths(step, links.hosts, group_of)), default=1)
            part = num_bytes * (step.last - step.first) / plan.num_chunks
            end = max(clocks[step.source], clocks[step.target])
            end += links.seconds(step.source, step.target, part, sharing=sharing)
            for rank in (step.source, step.target):
                ends[rank] = max(ends.get(rank, 0.0), end)
        for rank, end in ends.items():
            clocks[rank] = end
    return max(clocks)


def _paths(step: TransferStep, hosts: Sequence[str], group_of: dict[int, int]) -> list[tuple[Any, ...]]:
    """Lists the shared resources of a message, each direction separately."""
    a, b = hosts[step.source], hosts[step.target]
    if a == b:
        return []
    paths: list[tuple[Any, ...]] = [("out", a), ("in", b)]
    if group_of[step.source] != group_of[step.target]:
        paths += [("up", group_of[step.source]), ("down", group_of[step.target])]
    return paths
