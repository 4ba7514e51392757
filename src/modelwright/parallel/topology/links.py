"""Speed of the links between ranks, and a mapping of ranks to positions on the mesh that gives the fastest links to the
ranks that communicate most.

A message of n bytes between two ranks takes latency + n / bandwidth (the alpha-beta model). Ranks on one host share its
figures, and every pair of hosts is measured once, at the start, so that the cost depends on the number of hosts.
`measure_links` is a collective call: every rank of the world makes it and gets the same numbers to the last bit, so
that plans derived from them are the same everywhere.

`place` is a pure function: costs of the links and sizes of the axes in, a permutation of the ranks out. `take_places`
applies it by renumbering the processes, before anything was built on the old numbers. An axis consists of lines of
ranks (the other coordinates fixed) that work at the same time: the slowest hop of the slowest line determines the cost
of the axis. All axes but the pipeline close to rings.
"""

import datetime
import hashlib
import itertools
import json
import math
import operator
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import ConfigError
from modelwright.ops.microbenchmark import seconds_of
from modelwright.parallel.mesh import World, backends

Matrix = tuple[tuple[float, ...], ...]

MIN_PAIR_S = 0.02
"""Shortest useful measurement of one pair; below it the pairs of a round are measured at the same time."""
NUM_PASSES = 2
FIRST_PROBE_BYTES = 4096
LAST_PROBE_BYTES = 64 * 2**20
GAP = 2.0
"""Links that differ by less than this factor are of one kind."""
OPEN_AXES = ("pipeline",)
MAX_EVALUATIONS = 20_000
"""Limit of the search for places; counted, not timed, so that all ranks stop at the same answer."""


@dataclass(frozen=True, kw_only=True)
class LinksConfig:
    """budget_s: approximate total time of the measurement; cache: a JSON file with the figures per set of hosts, "" for
    none; max_age_days: figures older than this are measured again.
    """

    budget_s: float = 2.0
    cache: str = ""
    max_age_days: float = 7.0

    def __post_init__(self) -> None:
        for name in ("budget_s", "max_age_days"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Links:
    """Cost model of the links. hosts: each rank's host; latency_s, bytes_per_s: by two hosts, in the order of
    `host_names`.

    The diagonal holds the figures between two ranks of one host; where each host has one rank it is zero and unused.
    A link is the same both ways.
    """

    hosts: tuple[str, ...]
    latency_s: Matrix
    bytes_per_s: Matrix

    def __post_init__(self) -> None:
        num_hosts = len(self.host_names)
        for matrix in (self.latency_s, self.bytes_per_s):
            assert len(matrix) == num_hosts
            assert all(len(row) == num_hosts for row in matrix)

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.hosts)))

    @property
    def num_ranks(self) -> int:
        return len(self.hosts)

    def seconds(self, a: int, b: int, num_bytes: float, *, sharing: int = 1) -> float:
        """Time of a message from rank a to rank b while `sharing` such messages use the link at once."""
        host_a, host_b = (self.host_names.index(self.hosts[rank]) for rank in (a, b))
        rate = self.bytes_per_s[host_a][host_b]
        return self.latency_s[host_a][host_b] + (num_bytes * sharing / rate if num_bytes else 0.0)

    def costs(self, num_bytes: float) -> Matrix:
        """Seconds of a message of that size by two ranks; zero on the diagonal."""
        ranks = range(self.num_ranks)
        return tuple(tuple(0.0 if a == b else self.seconds(a, b, num_bytes) for b in ranks) for a in ranks)

    def groups(self, num_bytes: float = 2**16) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that reach each other much faster than the rest, for messages of this size; one group if no
        gap between the costs of all pairs is `GAP` wide.
        """
        costs = self.costs(num_bytes)
        ranks = range(self.num_ranks)
        # Split at the widest gap: costs spread over orders of magnitude, so no fixed threshold would fit.
        different = sorted({costs[a][b] for a in ranks for b in ranks if a < b})
        steps = [(slow / fast, fast) for fast, slow in itertools.pairwise(different) if fast > 0]
        if not steps or max(steps)[0] < GAP:
            return (tuple(ranks),)
        near = max(steps)[1]
        # Single linkage: whoever is near to one rank of a group joins it.
        group_of = list(ranks)
        for a in ranks:
            for b in range(a):
                if costs[a][b] <= near and group_of[a] != group_of[b]:
                    old, new = max(group_of[a], group_of[b]), min(group_of[a], group_of[b])
                    group_of = [new if group == old else group for group in group_of]
        return tuple(tuple(rank for rank in ranks if group_of[rank] == group) for group in sorted(set(group_of)))

    def worst_change(self, other: "Links", num_bytes: float = 2**16) -> float:
        """The largest factor, at least 1, by which a pair's cost differs between two measurements."""
        pairs = zip(sum(self.costs(num_bytes), ()), sum(other.costs(num_bytes), ()), strict=True)
        return max([max(a / b, b / a) for a, b in pairs if a and b], default=1.0)


def measure_links(world: World, config: LinksConfig | None = None, *, host: str = "") -> Links:
    """Returns the links among the ranks of a world, from the cache if it has these hosts. host: this rank's host, ""
    for its network name. Collective.

    Only the first rank needs the cache file. A file that cannot be read is replaced by a new measurement.
    """
    config = config or LinksConfig()
    hosts = tuple(world.gather_json(host or socket.gethostname()))
    if world.size == 1:
        return Links(hosts=hosts, latency_s=((0.0,),), bytes_per_s=((0.0,),))
    # The first rank broadcasts the links from its cache; zeros tell the others to measure.
    cached = _read_cache(Path(config.cache), hosts, config.max_age_days) if config.cache and world.is_first else None
    num_hosts = len(set(hosts))
    figures_2HH = torch.zeros(2, num_hosts, num_hosts, dtype=torch.float64, device=world.device)
    if cached is not None:
        figures_2HH.copy_(torch.tensor([cached.latency_s, cached.bytes_per_s], dtype=torch.float64))
    world.broadcast(figures_2HH)
    if figures_2HH.any():
        return _from_figures(hosts, figures_2HH)
    names = sorted(set(hosts))
    members = [[rank for rank in range(world.size) if hosts[rank] == name] for name in names]
    # Rounds of disjoint pairs: the first ranks of two hosts, and at last two ranks of each host that has them.
    pairs = [[(a, b, members[a][0], members[b][0]) for a, b in of] for of in _tournament(num_hosts)]
    pairs.append([(number, number, ranks[0], ranks[1]) for number, ranks in enumerate(members) if len(ranks) > 1])
    # One pair at a time while the budget allows, because pairs that are measured at once may share a link.
    if sum(map(len, pairs)) * MIN_PAIR_S * NUM_PASSES <= config.budget_s:
        pairs = [[pair] for of in pairs for pair in of]
    # Everything is measured twice, some time apart, and the better figure counts: other load only makes links slower.
    passes: list[torch.Tensor] = []
    for _ in range(NUM_PASSES):
        figures_2HH = torch.zeros(2, num_hosts, num_hosts, dtype=torch.float64, device=world.device)
        for at_once in pairs:
            world.barrier()  # nobody starts while the pair before is still measuring
            for a, b, first, second in at_once:
                if world.rank == first:
                    latency, rate = _probe(world, second, config.budget_s / NUM_PASSES / len(pairs))
                    figures_2HH[0, a, b] = figures_2HH[0, b, a] = latency
                    figures_2HH[1, a, b] = figures_2HH[1, b, a] = rate
                elif world.rank == second:
                    _answer(world, first)
        # Each figure was measured by one rank: the sum copies it.
        passes.append(world.all_reduce_sum(figures_2HH))
    latency_PHH, rate_PHH = torch.stack(passes, dim=1)
    links = _from_figures(hosts, torch.stack([latency_PHH.amin(0), rate_PHH.amax(0)]))
    if config.cache and world.is_first:
        _write_cache(Path(config.cache), links)
    return links


def _from_figures(hosts: tuple[str, ...], figures_2HH: torch.Tensor) -> Links:
    latency, rate = (tuple(tuple(row) for row in matrix) for matrix in figures_2HH.tolist())
    return Links(hosts=hosts, latency_s=latency, bytes_per_s=rate)


def _tournament(num_players: int) -> Iterator[list[tuple[int, int]]]:
    """Yields a round-robin schedule: every two players meet once, each at most once per round (the circle method)."""
    players = list(range(num_players + num_players % 2))
    half = len(players) // 2
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < num_players]
        players = [players[0], players[-1], *players[1:-1]]


def _probe(world: World, peer: int, allowed_s: float) -> tuple[float, float]:
    """Measures latency in seconds and bandwidth in bytes per second to a peer that runs `_answer`."""
    # Half of the shortest round trip, because noise only adds.
    end = time.perf_counter() + allowed_s / 4
    round_trip = min(_timed(world, peer, 0) for _ in range(3))
    while time.perf_counter() < end:
        round_trip = min(round_trip, _timed(world, peer, 0))
    # Messages are doubled until one takes a fifth of the time; the last is repeated and the faster of both counts.
    num_bytes = FIRST_PROBE_BYTES
    while (taken := _timed(world, peer, num_bytes)) < allowed_s / 5 and num_bytes < LAST_PROBE_BYTES:
        num_bytes *= 2
    taken = min(taken, _timed(world, peer, num_bytes))
    dist.send(torch.tensor([-1], device=world.device), group=world.group, group_dst=peer)
    # A message can come back faster than the least round trip only by noise; a twentieth keeps the rate finite.
    return round_trip / 2, num_bytes / max(taken - round_trip, taken / 20)


def _timed(world: World, peer: int, num_bytes: int) -> float:
    """Seconds from sending `num_bytes`, after a header that announces them, until the peer's answer arrives."""
    header, answer = torch.tensor([num_bytes], device=world.device), torch.zeros(1, device=world.device)
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)

    def round_trip() -> None:
        dist.send(header, group=world.group, group_dst=peer)
        if num_bytes:
            dist.send(payload, group=world.group, group_dst=peer)
        dist.recv(answer, group=world.group, group_src=peer)

    return seconds_of(round_trip, world.device)


def _answer(world: World, peer: int) -> None:
    header, answer = torch.tensor([0], device=world.device), torch.zeros(1, device=world.device)
    while True:
        dist.recv(header, group=world.group, group_src=peer)
        num_bytes = int(header)
        if num_bytes < 0:
            return
        if num_bytes:
            payload = torch.empty(num_bytes, dtype=torch.uint8, device=world.device)
            dist.recv(payload, group=world.group, group_src=peer)
        dist.send(answer, group=world.group, group_dst=peer)


def _key(hosts: Sequence[str]) -> str:
    """Hashes the set of hosts and the number of ranks on each; rank numbers do not matter."""
    return hashlib.sha256("\n".join(sorted(hosts)).encode()).hexdigest()[:16]


def _read_cache(path: Path, hosts: tuple[str, ...], max_age_days: float) -> Links | None:
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))[_key(hosts)]
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(entry["measured"])
        if age > datetime.timedelta(days=max_age_days):
            return None
        num_hosts = len(set(hosts))
        figures_2HH = torch.tensor([entry["latency_s"], entry["bytes_per_s"]], dtype=torch.float64)
        whole = figures_2HH.shape == (2, num_hosts, num_hosts) and bool(figures_2HH.isfinite().all())
        return _from_figures(hosts, figures_2HH) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(path: Path, links: Links) -> None:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    entry = {
        "hosts": links.host_names,
        "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "latency_s": links.latency_s,
        "bytes_per_s": links.bytes_per_s,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({**(known if isinstance(known, dict) else {}), _key(links.hosts): entry}, indent=1))


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
        order, order_cost, moved = start, cost(start), True
        evaluations += 1
        # Moves that make the order cheaper, while there are any.
        while moved and evaluations < max_evaluations:
            moved = False
            for first, second, length in moves:
                swapped = list(order)
                a, b = slice(first, first + length), slice(second, second + length)
                swapped[a], swapped[b] = swapped[b], swapped[a]
                evaluations += 1
                if (swapped_cost := cost(swapped)) < order_cost:
                    order, order_cost, moved = tuple(swapped), swapped_cost, True
        if order_cost < best_cost:
            best, best_cost = order, order_cost
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
    rank = list(order).index(world.rank)
    world.barrier()
    dist.destroy_process_group()
    dist.init_process_group(backends(world.device), store=store, rank=rank, world_size=world.size)
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
