"""Seconds of each layer of a model, measured, from which a pipeline is split into stages that are equally slow."""

import statistics
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder
from modelwright.ops.microbenchmark import repeated, seconds_of
from modelwright.parallel.mesh import World
from modelwright.parallel.pipeline.balance import LayerCosts


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
