"""Topology-aware all-reduce: the cheapest algorithm per message size, small messages coalesced, and new plans when a
link's speed changes during the run.

`Collectives.all_reduce(tensor)` sums in place over the ranks of a world and leaves the same bits on all of them, by the
backend's own algorithm ("backend"; gloo's and NCCL's rings finish every chunk on one rank and copy it from there) or by
one of `algorithms.py`, whose docstring explains why the bits are equal.

Decisions (algorithm, new measurements, new plans) are made from numbers that all ranks share to the last bit, at the
same call on all of them. Collective calls come in the same order on every rank, as with any backend.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from modelwright.core.config import ConfigError, constant
from modelwright.ops.microbenchmark import repeated, seconds_of
from modelwright.parallel.gradient_sync import ring_bytes
from modelwright.parallel.mesh import World
from modelwright.parallel.topology import algorithms
from modelwright.parallel.topology.links import AxisTraffic, Links, LinksConfig, measure_links, place

Algorithm = Literal[
    "auto", "backend", "ring", "doubling", "tree", "hierarchical_ring", "hierarchical_doubling", "sharded"
]
"""Names of algorithms. Where the links show no groups of near ranks, the hierarchical and sharded ones are a ring."""

FLAT_PROBE_BYTES = (64, 2**18)
FLAT_REPEATS = 4
RING_EVALUATIONS = 1000
"""Limit of the search for a ring's order, which starts from orders along the fastest links: nearly always the best."""
AHEAD_BYTES = 2**20
"""Largest message for which all receives of an all-reduce are posted before its first send: gloo's sender otherwise
waits one trip until the receiver is ready. On NCCL receives ahead of sends would wait for each other."""
MIN_COALESCE_BYTES, MAX_COALESCE_BYTES = 2**16, 25 * 2**20


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """Settings of all-reduce algorithms for the measured links (`gradient_sync.kind: topology_aware`)."""

    algorithm: Algorithm = constant("auto")
    """`auto` chooses by message size; `backend` is the backend's own all-reduce."""
    coalesce_bytes: int = constant(0)
    """Size of the messages into which tensors are joined; 0 derives it from the links."""
    window_all_reduces: int = constant(64)
    """All-reduces between comparisons of measured with expected time; 0 for never."""
    degraded_ratio: float = constant(2.0)
    """Slowdown at which the links are measured again."""
    changed_ratio: float = constant(1.5)
    """Change of a link at which algorithms are chosen again."""
    recheck_windows: int = constant(16)
    """Windows between measurements while links are degraded, to notice their recovery."""
    measure_s: float = constant(0.5)
    """Longest time in seconds that measuring the links may take."""

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            raise ConfigError(f"algorithm: must be one of {', '.join(get_args(Algorithm))}, got {self.algorithm!r}")
        for name in ("coalesce_bytes", "window_all_reduces"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)}")
        for name in ("degraded_ratio", "changed_ratio"):
            if getattr(self, name) <= 1:
                raise ConfigError(f"{name}: must be above 1, got {getattr(self, name)}")
        if self.recheck_windows < 1:
            raise ConfigError(f"recheck_windows: must be at least 1, got {self.recheck_windows}")
        if self.measure_s <= 0:
            raise ConfigError(f"measure_s: must be positive, got {self.measure_s}")


@dataclass(frozen=True, kw_only=True)
class FlatCost:
    """The cost of the backend's own all-reduce: latency_s + bytes * s_per_byte."""

    latency_s: float
    s_per_byte: float


class Planner:
    """Candidates and choice for one set of links; pure, so that equal links give equal plans on every rank."""

    def __init__(self, links: Links, flat: FlatCost) -> None:
        self.links = links
        self.flat = flat
        traffic = {"ring": AxisTraffic(num_messages=1, num_bytes=2**16)}
        self.order = place(links, {"ring": links.num_ranks}, traffic, max_evaluations=RING_EVALUATIONS)
        at = {rank: number for number, rank in enumerate(self.order)}
        by_place = [sorted(group, key=at.__getitem__) for group in links.groups()]
        self.groups = sorted(by_place, key=lambda group: at[group[0]])

    def candidates(self, num_bytes: float) -> dict[str, algorithms.AllReducePlan]:
        """Returns all algorithms that these links allow, by name."""
        num_ranks = self.links.num_ranks
        plans = [
            algorithms.AllReducePlan("backend", num_ranks, 1, ()),
            algorithms.ring(self.order),
            algorithms.doubling(self.order),
            algorithms.tree(algorithms.fastest_tree(self.links, num_bytes), num_ranks),
        ]
        if 1 < len(self.groups) < num_ranks:
            plans += [algorithms.hierarchical(self.groups, "ring"), algorithms.hierarchical(self.groups, "doubling")]
            if len({len(group) for group in self.groups}) == 1:
                plans.append(algorithms.sharded(self.groups))
        return {plan.name: plan for plan in plans}

    def seconds(self, plan: algorithms.AllReducePlan, num_bytes: float) -> float:
        if plan.name == "backend":
            return self.flat.latency_s + num_bytes * self.flat.s_per_byte
        return algorithms.plan_seconds(plan, self.links, num_bytes)

    def choose(self, num_bytes: float) -> algorithms.AllReducePlan:
        """The cheapest plan for a message of this size; on a tie the first, so the backend's own before all others."""
        return min(self.candidates(num_bytes).values(), key=lambda plan: self.seconds(plan, num_bytes))

    def coalesce_bytes(self) -> int:
        """The size from which bandwidth dominates: eight times the bytes that fit into the longest latency."""
        latencies, rates = sum(self.links.latency_s, ()), sum(self.links.bytes_per_s, ())
        useful = 8 * max(latency * rate for latency, rate in zip(latencies, rates, strict=True))
        return int(min(max(useful, MIN_COALESCE_BYTES), MAX_COALESCE_BYTES))


class Collectives:
    """All-reduce over a world by plans made from its links. Construction is collective: it measures the backend."""

    def __init__(self, world: World, links: Links, config: TopologyConfig | None = None) -> None:
        self.world = world
        self.config = config or TopologyConfig()
        self.bytes_sent = 0
        """Payload bytes that this rank sent; for the backend's algorithm those of a ring (`ring_bytes`)."""
        self.num_plannings = 0
        """Number of times that plans were made: once, and again whenever the links had changed."""
        self._first_links = links
        self._watch = _Watch(self.config)
        self._adopt(links)

    @property
    def links(self) -> Links:
        return self._planner.links

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums over the ranks, in place; the same bits everywhere. Same shape and dtype on all ranks."""
        if self.world.size == 1 or tensor.numel() == 0:
            return tensor
        vector = tensor.contiguous().view(-1)
        message_plan = self.plan_for(vector.numel() * vector.element_size())
        start = time.perf_counter()
        self._carry_out(message_plan, vector)
        if self._watch.add(time.perf_counter() - start, message_plan.predicted_s):
            if self.world.device.type != "cpu":
                torch.accelerator.synchronize()
            # Times of early ranks include their wait for late ones; the last to arrive has measured the links alone.
            shortest = [-value for value in self.world.maxima(*[-value for value in self._watch.elapsed_s])]
            is_as_at_first = self.links.worst_change(self._first_links) < self.config.changed_ratio
            if self._watch.is_suspicious(shortest, is_as_at_first):
                limits = LinksConfig(budget_s=self.config.measure_s)
                fresh = measure_links(self.world, limits, host=self.links.hosts[self.world.rank])
                if fresh.worst_change(self.links) >= self.config.changed_ratio:
                    self._adopt(fresh)
                self._watch.forget()
        if not tensor.is_contiguous():
            tensor.copy_(vector.view_as(tensor))
        return tensor

    def all_reduce_many(self, tensors: Sequence[Tensor]) -> None:
        """Sums each tensor in place; small neighbors of one dtype share a message."""
        limit = self.config.coalesce_bytes or self._planner.coalesce_bytes()
        messages: list[list[Tensor]] = []
        size = 0
        for tensor in tensors:
            num_bytes = tensor.numel() * tensor.element_size()
            if not messages or size + num_bytes > limit or tensor.dtype != messages[-1][0].dtype:
                messages.append([])
                size = 0
            messages[-1].append(tensor)
            size += num_bytes
        for message in messages:
            if len(message) == 1:
                self.all_reduce(message[0])
                continue
            vector = self.all_reduce(torch.cat([tensor.reshape(-1) for tensor in message]))
            parts = vector.split([tensor.numel() for tensor in message])
            for tensor, part in zip(message, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def plan_for(self, num_bytes: int) -> "MessagePlan":
        """Returns the present plan for a message of this size."""
        if num_bytes not in self._plans:
            plan = self._planner.choose(num_bytes)
            if self.config.algorithm != "auto":
                allowed = self._planner.candidates(num_bytes)
                plan = allowed.get(self.config.algorithm, allowed["ring"])
            rank = self.world.rank
            own = [tuple(step for step in steps if rank in (step.source, step.target)) for steps in plan.rounds]
            seconds = self._planner.seconds(plan, num_bytes)
            self._plans[num_bytes] = MessagePlan(plan, [steps for steps in own if steps], seconds)
        return self._plans[num_bytes]

    def _carry_out(self, message_plan: "MessagePlan", vector: Tensor) -> None:
        num_bytes, group = vector.numel() * vector.element_size(), self.world.group
        if message_plan.plan.name == "backend":
            self.world.all_reduce_sum(vector)
            self.bytes_sent += ring_bytes(num_bytes, self.world.size)
            return
        bounds = algorithms.chunk_bounds(vector.numel(), message_plan.plan.num_chunks)
        exchanges = []
        for steps in message_plan.own_rounds:
            exchange = _Exchange()
            exchanges.append(exchange)
            for step in steps:
                part = vector[bounds[step.first] : bounds[step.last]]
                if not part.numel():
                    continue
                if step.source == self.world.rank:
                    exchange.sends.append(dist.P2POp(dist.isend, part, group=group, group_peer=step.target))
                    self.bytes_sent += part.numel() * part.element_size()
                    continue
                arriving = torch.empty_like(part) if step.adds else part
                exchange.receives.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=step.source))
                if step.adds:
                    exchange.additions.append((part, arriving))
        # A copy that is awaited from the start cannot come too early: it carries a finished sum, of which this rank's
        # own value, sent before, is a part.
        ahead = self.world.device.type == "cpu" and num_bytes <= AHEAD_BYTES
        awaited = [_post(exchange.receives if ahead else []) for exchange in exchanges]
        for exchange, early in zip(exchanges, awaited, strict=True):
            works = _post(exchange.sends if ahead else exchange.sends + exchange.receives)
            for work in works + early:
                work.wait()
            # Only now: a part may still be on its way to a partner, who needs the value from before the round.
            for part, arriving in exchange.additions:
                part.add_(arriving)

    def _adopt(self, links: Links) -> None:
        self._plans: dict[int, MessagePlan] = {}
        self._planner = Planner(links, measure_flat(self.world))
        self.num_plannings += 1


@dataclass(frozen=True)
class MessagePlan:
    """This rank's part of the plan for messages of one size."""

    plan: algorithms.AllReducePlan
    own_rounds: Sequence[Sequence[algorithms.TransferStep]]
    predicted_s: float


@dataclass(frozen=True)
class _Exchange:
    """Messages of one rank in one round, and the additions after all of them have arrived."""

    sends: list[dist.P2POp] = field(default_factory=list)
    receives: list[dist.P2POp] = field(default_factory=list)
    additions: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def _post(messages: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(messages) if messages else []


class _Watch:
    """Compares windows of all-reduces with the first window after planning.

    It compares the ratio of measured to predicted time, so that windows may mix sizes, and takes its median, so that a
    few slow calls do not matter. Equal inputs give equal results on all ranks.
    """

    def __init__(self, config: TopologyConfig) -> None:
        self._config = config
        self.elapsed_s: list[float] = []
        self._predicted_s: list[float] = []
        self.forget()

    def add(self, elapsed_s: float, predicted_s: float) -> bool:
        """Records one all-reduce; returns whether the window is full."""
        if not self._config.window_all_reduces:
            return False
        self.elapsed_s.append(elapsed_s)
        self._predicted_s.append(predicted_s)
        return len(self.elapsed_s) >= self._config.window_all_reduces

    def is_suspicious(self, shortest_s: Sequence[float], is_as_at_first: bool) -> bool:
        """Ends the window; returns whether it was much slower than the first, or it is time to check for a recovery."""
        ratio = statistics.median(taken / said for taken, said in zip(shortest_s, self._predicted_s, strict=True))
        self.elapsed_s.clear()
        self._predicted_s.clear()
        self._num_windows += 1
        if self._usual is None:
            self._usual = ratio
            return False
        if ratio > self._config.degraded_ratio * self._usual:
            return True
        return not is_as_at_first and self._num_windows >= self._config.recheck_windows

    def forget(self) -> None:
        """Takes the next window as the reference."""
        self._usual: float | None = None
        self._num_windows = 0


def measure_flat(world: World) -> FlatCost:
    """Measures the cost of the backend's own all-reduce among these ranks. Collective; equal numbers on all ranks."""
    if world.size == 1:
        return FlatCost(latency_s=0.0, s_per_byte=0.0)
    # The shortest of a few repeats on the rank that waited least, at a small and at a larger size.
    taken = []
    for num_bytes in FLAT_PROBE_BYTES:
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
        once = partial(seconds_of, partial(world.all_reduce_sum, message), world.device)
        repeats = repeated(once, num_rounds=FLAT_REPEATS, num_warmups=1)
        taken.append(min(-value for value in world.maxima(*[-value for value in repeats])))
    (small, large), (few, many) = taken, FLAT_PROBE_BYTES
    s_per_byte = max(large - small, 0.0) / (many - few)
    return FlatCost(latency_s=max(small - few * s_per_byte, 0.0), s_per_byte=s_per_byte)


class TopologyAwareSync:
    """Gradient sync by `Collectives`, created on all ranks alike. `bytes_sent` excludes measuring the links."""

    def __init__(self, world: World, config: TopologyConfig) -> None:
        self.collectives: Collectives | None = None
        if world.size > 1:
            links = measure_links(world, LinksConfig(budget_s=config.measure_s))
            self.collectives = Collectives(world, links, config)

    @property
    def bytes_sent(self) -> int:
        return self.collectives.bytes_sent if self.collectives else 0

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        if self.collectives:
            self.collectives.all_reduce_many(gradients)

    def state_dict(self) -> dict[str, Any]:
        """Empty: links and ranks may differ after a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
