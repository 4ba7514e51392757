"""The split is the best there is."""

import itertools
import random

import pytest

from modelwright.model.decoder import ModelConfig
from modelwright.parallel.pipeline.balance import LayerCosts, flop_costs, split_layers
from refusals import config_error

SHAPE = ModelConfig(
    vocab_size=64, num_layers=3, model_dim=16, num_heads=2, num_kv_heads=1, ffn_dim=32, head_dim=8, max_seq_len=32
)


def naive(costs: LayerCosts, num_stages: int, slowness, min_layers: int) -> tuple[float, float]:
    """The least slowest stage, and the least sum of squares that goes with it, over all splits."""
    outcomes = []
    for sizes in itertools.product(range(min_layers, len(costs.layers) + 1), repeat=num_stages):
        if sum(sizes) == len(costs.layers):
            stages = [cost * slow for cost, slow in zip(costs.of_stages(sizes), slowness, strict=True)]
            outcomes.append((max(stages), sum(x * x for x in stages)))
    least = min(slowest for slowest, _ in outcomes)
    return least, min(squares for slowest, squares in outcomes if slowest <= least * (1 + 1e-12))


@pytest.mark.parametrize("seed", range(60))
def test_split_is_as_good_as_trying_all(seed):
    draw = random.Random(seed)
    num_stages, min_layers = draw.randint(1, 4), draw.randint(0, 1)
    layers = tuple(draw.choice([1.0, draw.uniform(0.1, 3)]) for _ in range(draw.randint(num_stages, 8)))
    costs = LayerCosts(embedding=draw.choice([0.0, 0.5]), layers=layers, head=draw.choice([0.0, 4.0, draw.random()]))
    slowness = [draw.choice([1.0, draw.uniform(0.5, 2)]) for _ in range(num_stages)]
    sizes = split_layers(costs, num_stages, slowness=slowness, min_layers=min_layers)
    assert sum(sizes) == len(layers)
    assert min(sizes) >= min_layers
    stages = [cost * slow for cost, slow in zip(costs.of_stages(sizes), slowness, strict=True)]
    least, squares = naive(costs, num_stages, slowness, min_layers)
    assert max(stages) == pytest.approx(least)
    assert sum(x * x for x in stages) == pytest.approx(squares)


def test_expensive_head_gives_the_last_stage_fewer_layers():
    costs = LayerCosts(embedding=0.0, layers=(1.0,) * 10, head=4.0)
    assert split_layers(costs, 2) == (7, 3)
    assert split_layers(costs, 4) == (3, 3, 3, 1)


def test_flops_count_the_head_and_not_the_embedding():
    costs = flop_costs(SHAPE, mean_context=8.0)
    assert costs.head == 2 * 64 * 16
    assert costs.embedding == 0
    assert sum(costs.layers) + costs.head == pytest.approx(SHAPE.flops_per_token(8.0))


def test_too_many_stages_are_refused():
    with config_error("pipeline"):
        split_layers(LayerCosts(embedding=0, layers=(1.0, 1.0), head=0), 3)
