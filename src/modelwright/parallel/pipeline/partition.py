"""Which layers make up which pipeline stage: consecutive layers, so that the slowest stage is as fast as can be.

Costs come from the model's FLOPs or from measured times. Knows nothing about schedules or processes.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from modelwright.core.errors import ConfigError
from modelwright.data.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.ops.microbenchmark import repeated, seconds_of
from modelwright.parallel.mesh import World


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """What one microbatch costs in each part of a model, forward and backward, in one unit (FLOPs or seconds).

    embedding: before the first layer; head: final norm, head and loss, after the last.
    """

    embedding: float
    layers: tuple[float, ...]
    head: float

    def of_stages(self, layers_per_stage: Sequence[int]) -> list[float]:
        """What each stage costs, embedding and head counted."""
        bounds = [0, *accumulate(layers_per_stage)]
        stages = [math.fsum(self.layers[first:end]) for first, end in pairwise(bounds)]
        stages[0] += self.embedding
        stages[-1] += self.head
        return stages


def flop_costs(config: ModelConfig, *, mean_context: float) -> LayerCosts:
    """Costs in FLOPs of one token's forward pass. The embedding is a lookup and costs nothing; the head is a product
    over the whole vocabulary. mean_context: how many tokens a token attends to on average."""
    head = 2.0 * config.vocab_size * config.model_dim
    layer = (config.flops_per_token(mean_context) - head) / config.num_layers
    return LayerCosts(embedding=0.0, layers=(layer,) * config.num_layers, head=head)


def split_layers(
    costs: LayerCosts, num_stages: int, *, slowness: Sequence[float] = (), min_layers: int = 1
) -> tuple[int, ...]:
    """Layers per stage that minimise the cost of the slowest stage, and among those the sum of squared costs.

    slowness: what each stage's device makes of a cost, 1 for all when empty; min_layers: of every stage. Exact, by
    dynamic programming over (stages, layers): O(stages * layers^2). Raises `ConfigError` when there are too few
    layers.
    """
    slowness = tuple(slowness) or (1.0,) * num_stages
    num_layers = len(costs.layers)
    if num_layers < num_stages * min_layers:
        raise ConfigError(
            f"pipeline: {num_layers} layers cannot make {num_stages} stages of at least {min_layers}; take fewer ranks "
            "or stages_per_rank"
        )
    before = [0.0, *accumulate(costs.layers)]

    def cost(stage: int, first: int, end: int) -> float:
        ends = costs.embedding * (stage == 0) + costs.head * (stage == num_stages - 1)
        return slowness[stage] * (before[end] - before[first] + ends)

    slowest = _best_cuts(num_stages, num_layers, min_layers, cost, max, math.inf)[0]
    bound = slowest * (1 + 1e-12)  # the same sums in another order must not count as slower
    return _best_cuts(num_stages, num_layers, min_layers, cost, lambda total, x: total + x * x, bound)[1]


def _best_cuts(
    num_stages: int,
    num_layers: int,
    min_layers: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    bound: float,
) -> tuple[float, tuple[int, ...]]:
    """The cut of all layers that minimises `join` over the stages' costs, none of which is above `bound`."""
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


def measure_layer_times(
    model: Decoder,
    batch: TokenBatch,
    *,
    num_repeats: int = 3,
    chunk_tokens: int = 512,
    clock: Callable[[], float] = time.perf_counter,
) -> LayerCosts:
    """Seconds of forward and backward of each part of a plain model on `batch`, the median of the repeats.

    One layer is in memory at a time. Parameters' gradients are taken away again. The first run of every part is not
    counted. A rank's own figures; `agree` makes one of all ranks'.
    """
    attend = packed_attend(batch.segments_BT)
    hidden_BTD = model.embedding(batch.input_ids_BT).detach()
    blocks = dict(model.blocks.items())
    table = model.embedding.weight.requires_grad
    parts: list[Callable[[Tensor], Tensor]] = [lambda _: model.embedding(batch.input_ids_BT)] if table else []
    for block in blocks.values():
        lone = _alone(model, block)
        parts.append(lambda hidden, lone=lone: lone.run_blocks(hidden, batch.positions_BT, attend))
    parts.append(lambda hidden: model.cross_entropy(model.norm(hidden), batch.labels_BT, chunk_tokens=chunk_tokens))
    kept = [parameter.grad for parameter in model.parameters()]
    times = [_median_time(part, hidden_BTD, num_repeats, clock) for part in parts]
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    return LayerCosts(embedding=times[0] if table else 0.0, layers=tuple(times[-1 - len(blocks) : -1]), head=times[-1])


def _alone(model: Decoder, block: torch.nn.Module) -> Decoder:
    """The model with one block, which `run_blocks` gives its rotary tables."""
    lone = Decoder.__new__(Decoder)
    torch.nn.Module.__init__(lone)
    lone.config = model.config
    lone.blocks = torch.nn.ModuleDict({"0": block})
    return lone


def _median_time(
    part: Callable[[Tensor], Tensor], hidden_BTD: Tensor, repeats: int, clock: Callable[[], float]
) -> float:
    def forward_and_backward(leaf: Tensor) -> None:
        output = part(leaf)
        output.backward(torch.ones_like(output))

    def seconds() -> float:
        leaf = hidden_BTD.clone().requires_grad_()
        return seconds_of(lambda: forward_and_backward(leaf), leaf.device, clock=clock)

    return statistics.median(repeated(seconds, num_rounds=repeats, num_warmups=1))


def agree(costs: LayerCosts, world: World) -> LayerCosts:
    """The mean of all ranks' costs, the same on all of them: a split must not differ from rank to rank."""
    values = world.sums([costs.embedding, *costs.layers, costs.head])
    embedding, *layers, head = (value / world.size for value in values)
    return LayerCosts(embedding=embedding, layers=tuple(layers), head=cast(float, head))
