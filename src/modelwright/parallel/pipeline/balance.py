"""Balance of a pipeline: assigns consecutive layers to stages so that the slowest stage is as fast as possible.

It also measures when stages compute and wait, proposes a better split when they drift apart, and forms microbatches
with equal numbers of real tokens. A new split is only proposed; the owner of the run lays the model out again, at a
checkpoint.
"""

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any

import torch

from modelwright.core.compatibility import LASTING_LAYOUT, SEVERAL_STAGES, Feature, feature
from modelwright.core.config import ConfigError, constant
from modelwright.data.rows.batch import TokenBatch, part_sizes
from modelwright.model.decoder import ModelConfig
from modelwright.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """The cost of one microbatch in each part of a model, forward and backward, in one unit (FLOPs or seconds).
    embedding: before the first layer; head: final norm, head and loss, after the last.
    """

    embedding: float
    layers: tuple[float, ...]
    head: float

    def of_stages(self, layers_per_stage: Sequence[int]) -> list[float]:
        """Returns the cost of each stage, including embedding and head."""
        bounds = pairwise([0, *accumulate(layers_per_stage)])
        stages = [math.fsum(self.layers[first:end]) for first, end in bounds]
        stages[0] += self.embedding
        stages[-1] += self.head
        return stages


def flop_costs(config: ModelConfig, *, mean_context: float) -> LayerCosts:
    """Returns the costs in FLOPs of one token's forward pass. The embedding is a lookup and costs nothing; the head is
    a product over the whole vocabulary. mean_context: mean number of tokens that a token attends to.
    """
    head = 2.0 * config.vocab_size * config.model_dim
    layer = (config.flops_per_token(mean_context) - head) / config.num_layers
    return LayerCosts(embedding=0.0, layers=(layer,) * config.num_layers, head=head)


def split_layers(
    costs: LayerCosts, num_stages: int, *, slowness: Sequence[float] = (), min_layers: int = 1
) -> tuple[int, ...]:
    """Returns the layers per stage that minimize the cost of the slowest stage, and among those the sum of squared
    costs.

    slowness: the factor by which each stage's device multiplies a cost, 1 for all if empty; min_layers: least layers of
    a stage. Exact, by dynamic programming over (stages, layers): O(stages * layers^2). Raises `ConfigError` if there
    are too few layers.
    """
    slowness = tuple(slowness) or (1.0,) * num_stages
    num_layers = len(costs.layers)
    if num_layers < num_stages * min_layers:
        raise ConfigError(
            f"pipeline: {num_layers} layers cannot form {num_stages} stages of at least {min_layers}; use fewer "
            "ranks or stages_per_rank"
        )
    before = [0.0, *accumulate(costs.layers)]

    def cost(stage: int, first: int, end: int) -> float:
        ends = costs.embedding * (stage == 0) + costs.head * (stage == num_stages - 1)
        return slowness[stage] * (before[end] - before[first] + ends)

    slowest = _best_cuts(num_stages, num_layers, min_layers, cost, max, math.inf)[0]
    # The same sums in another order must not count as slower.
    bound = slowest * (1 + 1e-12)
    # Squares level the stages below the slowest, which `max` alone leaves to chance.
    return _best_cuts(num_stages, num_layers, min_layers, cost, lambda total, x: total + x * x, bound)[1]


def _best_cuts(
    num_stages: int,
    num_layers: int,
    min_layers: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    bound: float,
) -> tuple[float, tuple[int, ...]]:
    """Minimizes `join` over the stages' costs, none above `bound`; returns the minimum and the layers per stage."""
    # The best split of the first n layers into the stages so far, by n. A tie goes to the shorter early stages.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (total, sizes) in best.items():
            for end in range(first + min_layers, num_layers + 1):
                price = cost(stage, first, end)
                if price <= bound:
                    candidate = (join(total, price), (*sizes, end - first))
                    longer[end] = min(longer.get(end, candidate), candidate)
        best = longer
    return best[num_layers]


@dataclass(frozen=True, kw_only=True)
class StageSpan:
    """Uninterrupted work for one microbatch. kind: `forward`, `loss`, `backward`, `backward_input` or
    `backward_weight`; start_s and end_s are relative to the step's start on this rank.
    """

    stage: int
    kind: str
    start_s: float
    end_s: float

    @property
    def busy_s(self) -> float:
        return self.end_s - self.start_s


class StageTimeline:
    """Records the spans of the newest step. On CUDA, events mark the stream, so nothing waits before `spans`."""

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self._began: Any = self._mark()
        self._marks: list[tuple[int, str, Any, Any]] = []

    def begin(self) -> None:
        """Starts a new step and discards the spans of the previous one."""
        self._marks = []
        self._began = self._mark()

    def timed(self, work: Callable[..., Any], stage: int, kind: str) -> Callable[..., Any]:
        """Wraps `work` so that every call records a span."""

        @wraps(work)
        def timed_work(*args: Any, **kwargs: Any) -> Any:
            start = self._mark()
            result = work(*args, **kwargs)
            self._marks.append((stage, kind, start, self._mark()))
            return result

        return timed_work

    def spans(self) -> list[StageSpan]:
        """Returns the spans in the order in which they ended."""
        # Events complete in the order of the stream: the last end stands for all before it.
        if self._uses_events and self._marks:
            self._marks[-1][3].synchronize()
        spans = []
        for stage, kind, *marks in self._marks:
            start_s, end_s = (
                self._began.elapsed_time(mark) / 1000 if self._uses_events else mark - self._began for mark in marks
            )
            spans.append(StageSpan(stage=stage, kind=kind, start_s=start_s, end_s=end_s))
        return spans

    def _mark(self) -> Any:
        if not self._uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True, kw_only=True)
class LoadBalanceConfig:
    """Settings of moving work between ranks during a run."""

    pipeline: bool = False
    """Move layers between pipeline stages that have drifted apart, after a checkpoint."""
    tokens: bool = False
    """Pack the rows of each step into microbatches with nearly equal numbers of real tokens."""
    max_imbalance: float = constant(0.15)
    """Largest excess of the slowest stage over the mean, as a fraction of the mean, before layers move."""
    min_improvement: float = constant(0.05)
    """Least fraction by which a new split must shorten the slowest stage."""
    window_steps: int = constant(20)
    """Steps whose median counts, and least steps between two moves."""

    def __post_init__(self) -> None:
        for name in ("max_imbalance", "min_improvement"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be between 0 and 1, got {getattr(self, name)}")
        if self.window_steps < 3:
            raise ConfigError(f"window_steps: must be at least 3 steps, got {self.window_steps}")

    def features(self) -> list[Feature]:
        """Returns the features that are on, with the properties of a run that each requires and breaks."""
        if not self.pipeline:
            return []
        return [feature("pipeline", "true", breaks=[LASTING_LAYOUT], only_with=[SEVERAL_STAGES])]


class StageBalance:
    """Measures how long each stage computes, excluding waiting, and proposes a split when the stages drift apart.
    costs: cost of each layer by the model's own measure. Time beyond that is attributed to the stage's device
    (`slowness`); if its cause moves with the layers instead, the next proposal corrects it.
    """

    def __init__(self, costs: LayerCosts, layers_per_stage: Sequence[int], config: LoadBalanceConfig) -> None:
        self.costs = costs
        self.layers_per_stage = tuple(layers_per_stage)
        self.config = config
        self._recent: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=config.window_steps))

    def observe(self, spans: Sequence[StageSpan]) -> None:
        """Records one training step of this rank's stages (`Executor.stage_spans`)."""
        busy: dict[int, float] = defaultdict(float)
        for span in spans:
            busy[span.stage] += span.busy_s
        for stage, seconds in busy.items():
            self._recent[stage].append(seconds)

    def agreed_times(self, mesh: Mesh) -> list[float]:
        """Returns the seconds of every stage in a step, the median of the window and the mean over replicas; the same
        on all ranks. Empty until every rank has seen a full window of steps.
        """
        full = all(len(times) == self.config.window_steps for times in self._recent.values()) and self._recent
        if mesh.world.sums([float(not full)])[0]:
            return []
        # Stages of other ranks count 0 here, so that the sum over the world is one over each stage's replicas.
        local = [statistics.median(self._recent.get(stage, [0.0])) for stage in range(len(self.layers_per_stage))]
        num_copies = mesh.world.size / mesh.pipeline.size
        return [seconds / num_copies for seconds in mesh.world.sums(local)]

    def propose(self, mesh: Mesh) -> tuple[int, ...]:
        """Returns a better split, or the present one. Every rank calls it at the same step and gets the same answer."""
        times = self.agreed_times(mesh)
        return better_split(self.costs, self.layers_per_stage, times, self.config) if times else self.layers_per_stage


def better_split(
    costs: LayerCosts, layers_per_stage: Sequence[int], times_s: Sequence[float], config: LoadBalanceConfig
) -> tuple[int, ...]:
    """The split for stages that took `times_s`, or the present one if they are balanced or little can be gained."""
    present = tuple(layers_per_stage)
    slowest = max(times_s)
    if slowest <= (1 + config.max_imbalance) * statistics.fmean(times_s):
        return present
    slowness = [time_s / cost if cost else 1.0 for time_s, cost in zip(times_s, costs.of_stages(present), strict=True)]
    # Stages without layers stay possible only where there is one now: adapters may need a layer in each.
    proposed = split_layers(costs, len(present), slowness=slowness, min_layers=min(1, *present))
    stages = zip(costs.of_stages(proposed), slowness, strict=True)
    return proposed if max(cost * slow for cost, slow in stages) <= (1 - config.min_improvement) * slowest else present


def balance_tokens(batch: TokenBatch, num_parts: int) -> TokenBatch:
    """Reorders groups of rows so that `split(num_parts)` makes parts with nearly equal numbers of real tokens. Sums
    over the batch are unchanged up to rounding. Raises `ValueError` if there are fewer groups than parts.
    """
    tokens_G = (batch.segments_BT >= 0).sum(dim=1).view(-1, batch.group_size).sum(dim=1)
    order = balanced_order(tokens_G.tolist(), num_parts)
    return batch.take(torch.tensor(order, device=batch.segments_BT.device))


def balanced_order(num_tokens: Sequence[int], num_parts: int) -> list[int]:
    """Returns an order of groups whose consecutive `num_parts` parts (`part_sizes`) have nearly equal sums."""
    sizes = part_sizes(len(num_tokens), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [0] * num_parts
    # The longest group first, each to the part with the fewest tokens that still has room (Graham's rule with a limit
    # on rows); then rows are exchanged between the fullest part and another as long as that lowers the fullest.
    for row in sorted(range(len(num_tokens)), key=lambda row: -num_tokens[row]):
        part = min((part for part in range(num_parts) if len(parts[part]) < sizes[part]), key=lambda part: sums[part])
        parts[part].append(row)
        sums[part] += num_tokens[row]
    while _swap_out_of_the_fullest(parts, sums, num_tokens):
        pass
    return [row for part in parts for row in sorted(part)]


def _swap_out_of_the_fullest(parts: list[list[int]], sums: list[int], num_tokens: Sequence[int]) -> bool:
    """Exchanges two rows so that the larger of two parts' sums gets smaller; False if no exchange does."""
    fullest = max(range(len(parts)), key=lambda part: sums[part])
    for other in sorted(range(len(parts)), key=lambda part: sums[part]):
        for i, local in enumerate(parts[fullest]):
            for j, theirs in enumerate(parts[other]):
                moved = num_tokens[local] - num_tokens[theirs]
                if 0 < moved < sums[fullest] - sums[other]:
                    parts[fullest][i], parts[other][j] = theirs, local
                    sums[fullest] -= moved
                    sums[other] += moved
                    return True
    return False
