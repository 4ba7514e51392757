"""The budget solver against all possibilities."""

import random

import pytest

from memory_references import solve_naive
from modelwright.core.config import ConfigError
from modelwright.model.decoder import ModelConfig
from modelwright.train.memory.activations import (
    Budget,
    Segment,
    SegmentChoice,
    block_choices,
    block_shape,
    least_budget,
    peak,
    peak_bytes,
    solve,
    total_cost,
    total_recomputed_flops,
)

STEP = 1000
"""Bytes in the random problems are multiples of the solver's rounding, so that its answer is exact."""


def random_choices(draw: random.Random) -> list[SegmentChoice]:
    found = [
        SegmentChoice(
            segment=Segment(num_layers=draw.choice((1, 1, 2, 3)), recompute=True),
            kept_bytes=STEP * draw.randrange(1, 40),
            moment_bytes=STEP * draw.randrange(0, 60),
            cost=draw.randrange(0, 50),
        )
        for _ in range(4)
    ]
    return [
        *found,
        SegmentChoice(segment=Segment(num_layers=1, recompute=False), kept_bytes=60 * STEP, moment_bytes=0, cost=0),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_cheapest_of_all_ways(seed):
    draw = random.Random(seed)
    choices, num_layers = random_choices(draw), draw.randrange(1, 6)
    budget = Budget(num_bytes=8192 * STEP // 64 * draw.randrange(1, 3), end_bytes=STEP * draw.randrange(0, 30))
    expected = solve_naive(choices, num_layers, budget)
    if expected is None:
        with pytest.raises(ConfigError, match=r"^budget_bytes: "):
            solve(choices, num_layers, budget)
        return
    found = solve(choices, num_layers, budget)
    assert sum(choice.segment.num_layers for choice in found) == num_layers
    assert peak(found, budget) <= budget.num_bytes
    assert total_cost(found) == total_cost(expected)


@pytest.mark.parametrize("in_flight", [2, 4])
def test_microbatches_in_flight_share_the_budget(in_flight):
    """Within the budget always, and near the best: the total is capped in steps."""
    draw = random.Random(in_flight)
    for _ in range(10):
        choices = random_choices(draw)
        budget = Budget(num_bytes=STEP * 300 * in_flight, in_flight=in_flight)
        expected = solve_naive(choices, 4, budget)
        if expected is None:
            continue
        found = solve(choices, 4, budget)
        assert peak(found, budget) <= budget.num_bytes
        assert total_cost(expected) <= total_cost(found) <= 1.25 * total_cost(expected) + 1


def test_a_deep_model_is_solved_from_keeping_all_to_keeping_least():
    model = ModelConfig(
        vocab_size=64, num_layers=96, model_dim=64, num_heads=4, num_kv_heads=2, ffn_dim=176, head_dim=16,
        max_seq_len=64,
    )  # fmt: skip
    shape = block_shape(model, compute="bf16", mean_context=512)
    choices = block_choices(shape, 1000, 96)
    whole = 1000 * peak_bytes(shape, [Segment(num_layers=1, recompute=False)] * 96)
    least = least_budget(choices, 96, Budget(num_bytes=whole))
    assert least < 0.1 * whole
    costs = []
    for share in (1.01, 0.7, 0.4, 0.2):
        found = [choice.segment for choice in solve(choices, 96, Budget(num_bytes=int(share * whole)))]
        assert 1000 * peak_bytes(shape, found) <= share * whole
        costs.append(total_recomputed_flops(shape, found))
    assert costs[0] == 0
    assert costs == sorted(costs)
    assert costs[-1] < 96 * shape.forward_flops
