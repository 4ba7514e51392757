"""Layers shared by three ranks against the same layers on one, in float64: outputs, losses and every gradient."""

import pytest
import torch

from modelwright.core.errors import ConfigError
from modelwright.parallel.tensor import check_shape, stage_tokens
from parallel import axis_run
from tiny_decoder import make_config

EXACT = {"rtol": 1e-11, "atol": 1e-12}
MODELS = {
    "sp": {},
    "whole": {},
    "untied": {"tied": False},
    "one_kv": {"num_kv_heads": 1},
    "one_kv_whole": {"num_kv_heads": 1},
}


@pytest.mark.parametrize("check", MODELS)
def test_outputs_losses_and_gradients_are_those_of_one_process(check):
    expected = axis_run.forward_backward(axis_run.model(**MODELS[check]))
    found = axis_run.of_check(check)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("check", MODELS)
def test_all_ranks_have_the_same_bits(check):
    first, *others = (axis_run.of_check(check, rank) for rank in range(axis_run.RANKS))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_every_rank_keeps_its_piece_only():
    whole = dict(axis_run.model(tied=False).named_parameters())
    pieces = [axis_run.of_check("piece", rank) for rank in range(axis_run.RANKS)]
    for name, weight in whole.items():
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        if weight.dim() == 1:
            assert all(torch.equal(piece[name], weight) for piece in pieces)
        else:
            assert torch.equal(torch.cat([piece[name] for piece in pieces], dim), weight)
            assert max(piece[name].numel() for piece in pieces) <= weight.numel() / axis_run.RANKS * 1.02


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
    with pytest.raises(ConfigError, match=r"^sequence_parallel: rows of 34 tokens"):
        stage_tokens(34, 4, sequence_parallel=True)
