"""Pruned models: exact where nothing is lost, the important parts, shapes that are no part of the teacher's."""

from dataclasses import replace

import pytest
import tiny_run
import torch

from modelwright.compress.prune import check_part, even_layers, input_moments, prune
from modelwright.core.config import ConfigError
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import AttentionConfig, Decoder, FeedForwardConfig, ModelConfig

TEACHER = replace(
    tiny_run.SHAPE,
    num_layers=4,
    attention=AttentionConfig(
        qkv_bias=True, output_bias=True, window=8, window_layers=(1, 3), layers_without_rope=(3,)
    ),
    feed_forward=FeedForwardConfig(bias=True),
)


def teacher(config: ModelConfig = TEACHER) -> Decoder:
    model = Decoder(config)
    model.init_weights(3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


def hidden(model: Decoder) -> torch.Tensor:
    batch = tiny_run.Rows().batch(0)
    attend = packed_attend(batch.segments_BT, model.config.windows)
    return model(batch.input_ids_BT, batch.positions_BT, attend).detach()


def silence(model: Decoder, *, heads: list[int], channels: list[int]) -> None:
    """Take away all influence of query heads and feed-forward channels, in every layer, in different ways."""
    with torch.no_grad():
        for block in model.blocks.values():
            for head in heads:
                block.attention.o_proj.weight[:, 8 * head : 8 * head + 8] = 0
            block.ffn.up_proj.weight[channels] = 0
            block.ffn.up_proj.bias[channels] = 0


@pytest.mark.parametrize("by_activations", [True, False])
def test_what_contributes_nothing_goes_and_the_rest_stays_exact(by_activations: bool) -> None:
    model = teacher()
    silence(model, heads=[2, 3], channels=[0, 5, 63])  # the query heads of the second key/value head
    moments = input_moments(model, [tiny_run.Rows().batch(1)]) if by_activations else {}
    smaller = prune(model, replace(TEACHER, num_heads=2, num_kv_heads=1, ffn_dim=61), moments)
    torch.testing.assert_close(hidden(smaller), hidden(model))
    assert smaller.config.num_parameters < model.config.num_parameters


def test_query_heads_go_from_every_group() -> None:
    model = teacher()
    silence(model, heads=[0, 3], channels=[])
    smaller = prune(model, replace(TEACHER, num_heads=2), input_moments(model, [tiny_run.Rows().batch(1)]))
    torch.testing.assert_close(hidden(smaller), hidden(model))


@pytest.mark.slow
def test_activations_see_what_weights_do_not() -> None:
    """Large weights behind a channel that is never active."""
    model = teacher()
    with torch.no_grad():
        for block in model.blocks.values():
            block.ffn.down_proj.weight[:, 7] *= 50
            block.ffn.gate_proj.bias[7] = -1e4
    moments = input_moments(model, [tiny_run.Rows().batch(1)])
    torch.testing.assert_close(hidden(prune(model, replace(TEACHER, ffn_dim=63), moments)), hidden(model))
    assert not torch.allclose(hidden(prune(model, replace(TEACHER, ffn_dim=63), {})), hidden(model))


def test_layers_go_with_what_is_special_about_them() -> None:
    model = teacher()
    with torch.no_grad():
        for layer in (1, 2):
            for linear in (model.blocks[str(layer)].attention.o_proj, model.blocks[str(layer)].ffn.down_proj):
                linear.weight.zero_()
                linear.bias.zero_()
    smaller = prune(model, replace(TEACHER, num_layers=2), {})
    assert smaller.config.attention.window_layers == (1,)
    assert smaller.config.attention.layers_without_rope == (1,)
    torch.testing.assert_close(hidden(smaller), hidden(model))
    whole = prune(model, TEACHER, {})
    assert whole.config == TEACHER
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in whole.state_dict().items())
    assert even_layers(replace(TEACHER, num_layers=12), 5) == [0, 3, 6, 8, 11]
    assert even_layers(TEACHER, 1) == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_dim": 16}, "model_dim: 16 differs from the teacher's 32"),
        ({"num_layers": 5}, "num_layers: 5 is more than the teacher's 4"),
        ({"num_kv_heads": 1}, "num_kv_heads: with 4 query heads each of 1 key/value heads would serve 4"),
    ],
)
def test_a_shape_that_is_no_part_of_the_teachers_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_part(replace(TEACHER, **changes), TEACHER)
