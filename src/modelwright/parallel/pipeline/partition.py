"""Assigns consecutive layers to pipeline stages so that the slowest stage is as fast as possible. Costs come from the
model's FLOPs or from measured times.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from modelwright.core.errors import ConfigError
from modelwright.model.config import ModelConfig


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
