"""Shared weights: sub-networks against stand-alone models with copied weights, and the sandwich rule in the loop."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from torch import Tensor
from torch.func import functional_call

from modelwright.core.rundir import StageDir
from modelwright.data.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.config import AttentionConfig, FeedForwardConfig, ModelConfig, NormConfig
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.search.rank_agreement import rank_agreement
from modelwright.search.sandwich import Sandwich, Turn, sub_networks
from modelwright.search.subnetwork import containing_shape, subnetwork
from modelwright.train.build import train
from modelwright.train.job import TrainJob
from modelwright.train.objective import forward
from search_runs import copied, search_in, wish
from tolerances import TOLERANCES

LARGE = replace(tiny_run.SHAPE, num_layers=3, num_heads=4, num_kv_heads=4, attention_gate="element", ffn_dim=80)
SMALL = replace(LARGE, num_layers=2, model_dim=16, num_heads=2, num_kv_heads=2, ffn_dim=48, attention_gate="none")
GROUPED = replace(LARGE, model_dim=24, num_kv_heads=2, attention_gate="head")
SINGLE = replace(LARGE, num_layers=1, num_kv_heads=1, ffn_dim=16)
BIASED: dict[str, Any] = {
    "attention": AttentionConfig(qkv_bias=True, output_bias=True),
    "feed_forward": FeedForwardConfig(bias=True),
    "norms": NormConfig(post_norms=True),
    "tie_embeddings": False,
}


def copied_weights(model: Decoder, shape: ModelConfig) -> dict[str, Tensor]:
    """The weights of a stand-alone model of this shape, gathered head by head, with gradients."""
    large, d = model.config, shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    copies: dict[str, Tensor] = {}
    for name, parameter in Decoder(shape).named_parameters():
        whole = model.get_parameter(name)
        if "k_proj" in name or "v_proj" in name:
            heads = [whole[head * d : (head + 1) * d] for head in range(shape.num_heads)]
            means = [sum(heads[first : first + group]) / group for first in range(0, shape.num_heads, group)]
            whole = torch.cat(means)  # pyright: ignore
        elif "output_gate" in name and shape.attention_gate == "head" and large.attention_gate == "element":
            whole = torch.stack([whole[head * d] for head in range(shape.num_heads)])
        for dim, size in enumerate(parameter.shape):
            whole = whole.narrow(dim, 0, size)
        copies[name] = whole
    return copies


def loss_alone(model: Decoder, shape: ModelConfig, batch: TokenBatch) -> Tensor:
    """The mean loss of a stand-alone model with the copied weights."""
    alone, weights = Decoder(shape), copied_weights(model, shape)
    attend = packed_attend(batch.segments_BT, shape.windows)
    hidden = functional_call(alone, weights, (batch.input_ids_BT, batch.positions_BT, attend))
    head = weights["embedding.weight" if shape.tie_embeddings else "head.weight"]
    logits, labels = hidden @ head.T, batch.labels_BT.flatten()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100)


def gradients(loss: Tensor, model: Decoder) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    named = zip(model.named_parameters(), found, strict=True)
    return {name: torch.zeros_like(parameter) if one is None else one for (name, parameter), one in named}


@pytest.mark.parametrize("shape", [LARGE, SMALL, GROUPED, SINGLE], ids=["all", "small", "grouped", "single"])
@pytest.mark.parametrize("more", [{}, BIASED], ids=["plain", "biased"])
def test_a_sub_network_is_a_stand_alone_model_with_copied_weights(shape: ModelConfig, more: dict[str, Any]) -> None:
    model, shape = Decoder(replace(LARGE, **more)), replace(shape, **more)
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    batch = tiny_run.Rows().batch(3)
    network = subnetwork(model, shape)
    loss = network.cross_entropy(forward(network, batch), batch.labels_BT, chunk_tokens=64) / batch.num_targets
    expected = loss_alone(model, shape, batch)
    torch.testing.assert_close(loss, expected, **TOLERANCES["fp32_loss"])
    naive = gradients(expected, model)
    for name, gradient in gradients(loss, model).items():
        torch.testing.assert_close(gradient, naive[name], **TOLERANCES["fp32_gradient"], msg=name)


def sandwich_job(folder: Path, model: Decoder, *, microbatches: int, **changes: Any) -> TrainJob:
    sandwich = Sandwich(
        inner=NextToken(tiny_run.Rows()),
        shapes=lambda step: [LARGE, SMALL, (GROUPED, SINGLE)[step % 2]],
        num_networks=3,
        turn=Turn(microbatches=microbatches),
    )
    settings = {"batch_tokens": 3 * tiny_run.ROWS * tiny_run.LENGTH, "gradient_accumulation_steps": 3 * microbatches}
    settings |= {"optimizer": "sgd", "learning_rate": 0.5, "weight_decay": 0.0, "max_grad_norm": 0.0}
    settings |= {"schedule": {"kind": "constant", "warmup_fraction": 0.0}, **changes}
    return TrainJob(
        model=model,
        objective=sandwich,
        config=tiny_run.settings(**{**settings, "num_steps": 2}),
        num_steps=2,
        stage=StageDir(folder),
        heldout=[tiny_run.Rows().batch(900)],
        input_digest="sandwich",
        techniques=[sub_networks(sandwich)],
    )


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_of_the_loop_is_the_mean_gradient_of_its_sub_networks(microbatches: int, tmp_path: Path) -> None:
    model, naive = Decoder(LARGE), Decoder(LARGE)
    model.init_weights(1)
    naive.init_weights(1)
    result = train(sandwich_job(tmp_path, model, microbatches=microbatches))
    losses: list[Tensor] = []
    for step in range(2):
        batch = tiny_run.Rows().batch(step)
        third = (GROUPED, SINGLE)[step % 2]
        losses.append(sum(loss_alone(naive, shape, batch) for shape in (LARGE, SMALL, third)) / 3)  # pyright: ignore
        with torch.no_grad():
            for name, gradient in gradients(losses[-1], naive).items():
                naive.get_parameter(name).sub_(0.5 * gradient)
    assert result.loss == pytest.approx(losses[-1].item(), rel=1e-5)
    for name, parameter in naive.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, **TOLERANCES["fp32_trained"], msg=name)
    assert "forward" not in vars(model), "the model is plain again"
    heldout = tiny_run.Rows().batch(900)
    with torch.no_grad():
        assert result.heldout_loss == pytest.approx(float(loss_alone(model, LARGE, heldout)), rel=1e-5)


def test_number_formats_apply_to_sub_networks(tmp_path: Path) -> None:
    exact, rounded = Decoder(LARGE), Decoder(LARGE)
    exact.init_weights(1)
    rounded.init_weights(1)
    losses = [
        train(sandwich_job(tmp_path / policy, model, microbatches=1, precision={"policy": policy})).loss
        for policy, model in (("fp32", exact), ("bf16_mixed", rounded))
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_the_container_holds_every_kind_of_gate() -> None:
    assert containing_shape(SINGLE, ("none", "head", "element")).attention_gate == "element"
    assert containing_shape(SINGLE, ("none", "head")).attention_gate == "head"
    assert containing_shape(SMALL, ("none",)).attention_gate == "none"
    assert containing_shape(SINGLE, ()).num_kv_heads == SINGLE.num_heads


def test_kendalls_tau_with_its_interval() -> None:
    alone = [3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.0, 6.0]
    same = rank_agreement([2 * loss for loss in alone], alone)
    assert (same.tau, same.high) == pytest.approx((1.0, 1.0))
    assert 0.0 < same.low < 0.1  # eight candidates in one order do not make it certain
    assert rank_agreement([-loss for loss in alone], alone).tau == pytest.approx(-1.0)
    swapped = rank_agreement([3.0, 1.5, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], alone)
    assert swapped.tau == pytest.approx(1 - 2 / 28)  # one of 28 pairs stands the other way round
    assert swapped.low < swapped.tau <= swapped.high  # pyright: ignore
    assert rank_agreement([1.0], [2.0]).tau is None
    assert rank_agreement([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).tau is None
    few = rank_agreement([1.0, 2.0], [1.0, 2.0])
    assert (few.tau, few.low, few.high) == pytest.approx((1.0, -1.0, 1.0))


@pytest.mark.parametrize("correlation", [0.0, 0.6, 0.95])
def test_the_interval_of_kendalls_tau_has_the_true_value_as_often_as_it_says(correlation: float) -> None:
    """Normal losses have the tau 2 / pi arcsin(correlation) (Greiner 1909)."""
    draw, truth, num_held = np.random.default_rng(4), 2 / math.pi * math.asin(correlation), 0
    for _ in range(300):
        shared = draw.normal(size=6)
        alone = correlation * shared + math.sqrt(1 - correlation**2) * draw.normal(size=6)
        agreement = rank_agreement(shared.tolist(), alone.tolist())
        num_held += agreement.low <= truth <= agreement.high
    assert num_held >= 0.95 * 300 - 10


def test_a_search_charges_the_shared_weights_and_reports_their_agreement(packed: Path, tmp_path: Path) -> None:
    run = copied(packed, tmp_path)
    wishes = wish(packed, strategies=("supernet", "random"), budget=6.0)
    result = search_in(run, wishes)
    contender = next(one for one in result.contenders if one.strategy.name == "supernet")
    trained = [trial for trial in result.trials if trial.strategy == "supernet" and trial.cost]
    extra = contender.spent - sum(trial.cost for trial in trained)
    assert 0.3 * 6.0 < extra < 0.8 * 6.0
    assert contender.spent <= 6.0 + 1e-6
    (finding,) = result.findings
    full = {tuple(sorted(trial.choices.items())) for trial in result.trials if trial.is_full}
    assert finding.figures["num_candidates"] in (len(full), len(full) - 1)  # the run's own may be off the grid
    assert -1.0 <= finding.figures["low"] <= finding.figures["tau"] <= finding.figures["high"] <= 1.0
    assert "Kendall's tau" in (run / "search" / "report.txt").read_text()
    journal = (run / "search" / "journal.jsonl").read_text()
    assert search_in(run, wishes).findings == result.findings
    assert (run / "search" / "journal.jsonl").read_text() == journal
