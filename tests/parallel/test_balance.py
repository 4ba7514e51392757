"""Layers move when stages have drifted and not before; microbatches get equal numbers of tokens."""

import itertools
import random
import time

import pytest
import torch

from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.parallel.mesh import ParallelConfig, build_mesh, single
from modelwright.parallel.pipeline.balance import (
    LayerCosts,
    LoadBalanceConfig,
    StageBalance,
    StageSpan,
    StageTimeline,
    balance_tokens,
    balanced_order,
    better_split,
)
from modelwright.train.objective import forward
from refusals import config_error

EVEN = LayerCosts(embedding=0.0, layers=(1.0,) * 8, head=0.0)
CONFIG = LoadBalanceConfig(max_imbalance=0.15, min_improvement=0.05, window_steps=3)


def test_slow_device_gives_layers_away():
    assert better_split(EVEN, (4, 4), [4.0, 12.0], CONFIG) == (6, 2)


def test_small_drift_moves_nothing():
    assert better_split(EVEN, (4, 4), [4.0, 5.0], CONFIG) == (4, 4)


def test_drift_without_a_better_split_moves_nothing():
    two = LayerCosts(embedding=0.0, layers=(1.0, 1.0), head=0.0)
    assert better_split(two, (1, 1), [1.0, 3.0], CONFIG) == (1, 1)


@pytest.mark.parametrize("cause", ["device", "layers"])
def test_proposals_settle_on_the_best_split_whatever_the_cause(cause):
    def times(sizes):
        if cause == "device":
            return [sizes[0] * 1.0, sizes[1] * 3.0]
        cheap = min(sizes[0], 4) * 0.25 + max(0, sizes[0] - 4)
        return [cheap, 8 - 3.0 - cheap]

    sizes, seen = (4, 4), []
    for _ in range(6):
        sizes = better_split(EVEN, sizes, times(sizes), CONFIG)
        seen.append(sizes)
    best = min(max(times((first, 8 - first))) for first in range(1, 8))
    assert max(times(sizes)) <= (1 + CONFIG.max_imbalance) * best
    assert seen[-1] == seen[-2]


def test_balance_waits_for_a_full_window_and_takes_the_median():
    mesh = build_mesh(single(), ParallelConfig())
    balance = StageBalance(EVEN, (4, 4), CONFIG)
    for seconds in (100.0, 6.0):
        balance.observe([span(0, 2.0), span(1, seconds), span(0, 2.0), span(1, 6.0)])
    assert balance.agreed_times(mesh) == []
    assert balance.propose(mesh) == (4, 4)
    balance.observe([span(0, 4.0), span(1, 12.0)])
    assert balance.agreed_times(mesh) == [4.0, 12.0]
    assert balance.propose(mesh) == (6, 2)


def span(stage: int, seconds: float) -> StageSpan:
    return StageSpan(stage=stage, kind="forward", start_s=0.0, end_s=seconds)


def test_bad_limits_are_refused():
    with config_error("max_imbalance"):
        LoadBalanceConfig(max_imbalance=0.0)
    with config_error("window_steps", match=r"^window_steps: "):
        LoadBalanceConfig(window_steps=1)


def test_timeline_keeps_the_newest_step():
    timeline = StageTimeline(torch.device("cpu"))
    work = timeline.timed(lambda x: x + 1, 3, "forward")
    timeline.begin()
    work(1)
    before = time.perf_counter()
    timeline.begin()
    assert work(1) == 2
    (only,) = timeline.spans()
    assert (only.stage, only.kind) == (3, "forward")
    assert 0 <= only.start_s <= only.end_s <= time.perf_counter() - before


@pytest.mark.parametrize("seed", range(40))
def test_parts_are_nearly_as_even_as_can_be(seed):
    draw = random.Random(seed)
    num_parts, size = draw.choice([(2, 2), (2, 3), (2, 4), (3, 2)])
    tokens = [draw.randint(1, 64) for _ in range(num_parts * size)]
    order = balanced_order(tokens, num_parts)
    assert sorted(order) == list(range(len(tokens)))
    fullest = max(sums(tokens, order, num_parts))
    best = min(max(sums(tokens, permutation, num_parts)) for permutation in itertools.permutations(range(len(tokens))))
    assert fullest <= best * 4 / 3
    assert fullest <= max(sums(tokens, range(len(tokens)), num_parts))


def sums(tokens, order, num_parts):
    size = len(tokens) // num_parts
    return [sum(tokens[row] for row in list(order)[i * size : (i + 1) * size]) for i in range(num_parts)]


def test_batch_keeps_its_rows():
    segments = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, -1, -1, -1], [0, 0, -1, -1]], dtype=torch.int32)
    tokens = torch.arange(16).reshape(4, 4)
    batch = TokenBatch(input_ids_BT=tokens, labels_BT=tokens + 1, positions_BT=tokens * 0, segments_BT=segments)
    balanced = balance_tokens(batch, 2)
    assert sorted(int((part.segments_BT >= 0).sum()) for part in balanced.split(2)) == [5, 6]
    assert sorted(balanced.input_ids_BT[:, 0].tolist()) == [0, 4, 8, 12]
    assert torch.equal(balanced.labels_BT, balanced.input_ids_BT + 1)
    parts = balance_tokens(batch, 3).split(3)
    assert [part.num_rows for part in parts] == [2, 1, 1]
    assert [int((part.segments_BT >= 0).sum()) for part in parts] == [3, 4, 4]
    with pytest.raises(ValueError, match="4 groups of rows cannot be divided into 5"):
        balance_tokens(batch, 5)


def test_training_sees_the_same_batch():
    shape = ModelConfig(
        vocab_size=32, num_layers=2, model_dim=16, num_heads=2, num_kv_heads=1, ffn_dim=32, head_dim=8, max_seq_len=8
    )
    model = Decoder(shape)
    model.init_weights(0)
    model.double()
    tokens = torch.arange(64).reshape(8, 8) % 32
    real = torch.arange(8)[None] < torch.tensor([8, 1, 7, 2, 3, 6, 4, 5])[:, None]
    batch = TokenBatch(
        input_ids_BT=tokens, labels_BT=torch.where(real, tokens, -100), positions_BT=torch.arange(8).repeat(8, 1),
        segments_BT=torch.where(real, 0, -1).int(),
    )  # fmt: skip
    found = []
    for rows in (batch, balance_tokens(batch, 4)):
        for part in rows.split(4):
            logits = model.logits(forward(model, part)).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, part.labels_BT.flatten(), reduction="sum").backward()
        found.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    for before, after in zip(*found, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-12)
