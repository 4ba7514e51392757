"""Layers shared by three ranks against the same layers on one, in float64: outputs, losses and every gradient."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distributed import run_distributed
from modelwright.core.config import ConfigError
from modelwright.data.rows.batch import IGNORED
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import ParallelConfig, World, build_mesh
from modelwright.parallel.strategy import redistribute_like
from modelwright.parallel.tensor_parallel import check_shape, stage_tokens
from parallel.axis_cases import RANKS, Results, model, rows, shard
from refusals import config_error
from tiny_decoder import make_config

EXACT = {"rtol": 1e-11, "atol": 1e-12}
MODELS = {
    "sp": {},
    "whole": {},
    "untied": {"tied": False},
    "one_kv": {"num_kv_heads": 1},
    "one_kv_whole": {"num_kv_heads": 1},
}


def forward_backward(model: Decoder) -> Results:
    """Output, loss and gradients of two microbatches, of which the second one adds to the first one's gradients."""
    results: Results = {}
    for batch in rows().split(2):
        output = model(batch.input_ids_BT, batch.positions_BT, packed_attend(batch.segments_BT))
        loss = whole_loss(model, output, batch.labels_BT)
        loss.backward()
        results |= {"output": output.detach(), "loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = redistribute_like(parameter.grad, parameter)
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        results[f"gradient/{name}"] = whole.contiguous()
    return results


def whole_loss(model: Decoder, output: Tensor, labels: Tensor) -> Tensor:
    """A term of the logits and one of the hidden states, both in float64."""
    picked = model.logits(output).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * (labels != IGNORED)).sum() + 0.1 * output.square().sum()


def shared_layers(world: World) -> dict[str, Results]:
    """By model, outputs, losses and gradients; and the pieces of the untied model that this rank holds."""
    mesh = build_mesh(world, ParallelConfig(tensor=world.size))
    results = {
        name: forward_backward(shard(model(**changes), mesh, sequence_parallel="whole" not in name))
        for name, changes in MODELS.items()
    }
    laid_out = shard(model(tied=False), mesh)
    pieces = {name: parameter.to_local().detach() for name, parameter in laid_out.named_parameters()}
    return {**results, "piece": pieces}


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(shared_layers, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("check", MODELS)
def test_outputs_losses_and_gradients_are_those_of_one_process(ranks, check):
    expected = forward_backward(model(**MODELS[check]))
    found = ranks[0][check]
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("check", MODELS)
def test_all_ranks_have_the_same_bits(ranks, check):
    first, *others = (rank[check] for rank in ranks)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_every_rank_keeps_its_piece_only(ranks):
    whole = dict(model(tied=False).named_parameters())
    pieces = [rank["piece"] for rank in ranks]
    for name, weight in whole.items():
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        if weight.dim() == 1:
            assert all(torch.equal(piece[name], weight) for piece in pieces)
        else:
            assert torch.equal(torch.cat([piece[name] for piece in pieces], dim), weight)
            assert max(piece[name].numel() for piece in pieces) <= weight.numel() / RANKS * 1.02


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, "num_heads"),
        ({"ffn_dim": 50}, "ffn_dim"),
        ({"num_heads": 12, "num_kv_heads": 3}, "num_kv_heads"),
        ({"vocab_size": 5}, "vocab_size"),
    ],
)
def test_shapes_that_do_not_divide_are_refused(changes, field):
    with pytest.raises(ConfigError, match=rf"^{field}:"):
        check_shape(make_config(**changes), 4)


def test_tokens_of_a_stage():
    assert stage_tokens(36, 4, sequence_parallel=True) == 9
    assert stage_tokens(34, 4, sequence_parallel=False) == 34
    with config_error("sequence_parallel"):
        stage_tokens(34, 4, sequence_parallel=True)
