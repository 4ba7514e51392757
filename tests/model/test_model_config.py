"""The decoder's shape: validation and the arithmetic about it."""

import pytest

from modelwright.core.config import ConfigError, dump, parse
from modelwright.model.decoder import AttentionConfig, Decoder, FeedForwardConfig, ModelConfig, NormConfig
from modelwright.ops.rope_norm_swiglu import RopeScaling
from tiny_decoder import make_config


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_num_parameters_is_exact(qk_norm, tie_embeddings):
    config = make_config(qk_norm=qk_norm, tie_embeddings=tie_embeddings)
    assert config.num_parameters == sum(p.numel() for p in Decoder(config).parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers: must be at least 1"),
        ({"head_dim": 7}, "head_dim: must be even"),
        ({"num_kv_heads": 3}, "num_kv_heads: 3 must divide num_heads"),
    ],
)
def test_bad_shape_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**change)


def test_flops_grow_with_context():
    config = make_config()
    assert config.flops_per_token(0) == 2 * (
        config.num_layers * (config.block_parameters - 2 * config.model_dim - 2 * config.head_dim)
        + config.vocab_size * config.model_dim
    )
    assert config.flops_per_token(64) > config.flops_per_token(0)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": AttentionConfig(qkv_bias=True)},
        {"attention": AttentionConfig(qkv_bias=True, output_bias=True), "feed_forward": FeedForwardConfig(bias=True)},
        {"norms": NormConfig(post_norms=True), "qk_norm": False, "tie_embeddings": False},
    ],
)
def test_parameters_of_other_types_are_counted_too(changes):
    config = make_config(**changes)
    assert sum(parameter.numel() for parameter in Decoder(config).parameters()) == config.num_parameters


def test_a_window_bounds_the_flops_of_its_layers():
    sliding = make_config(attention=AttentionConfig(window=8, window_layers=(0,)))
    assert sliding.windows == (0, 8)
    per_token = 4 * sliding.num_heads * sliding.head_dim
    assert make_config().flops_per_token(20) - sliding.flops_per_token(20) == per_token * (20 - 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": {"window": 4}}, "window: is 4 with 0 window_layers"),
        ({"attention": {"soft_cap": -1.0}}, "must not be negative"),
        ({"rotary_dim": 3}, "rotary_dim: must be even"),
        ({"rope": {"kind": "yarn", "factor": 2.0}}, "original_max_len: yarn needs the context"),
        (
            {"rope": {"kind": "llama3", "factor": 2.0, "original_max_len": 8, "low_freq_factor": 5.0}},
            "high_freq_factor",
        ),
    ],
)
def test_what_other_types_have_is_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse(ModelConfig, {**dump(make_config()), **changes}, constants=True)


def test_what_only_imported_models_have_is_no_setting():
    assert set(dump(make_config(norms=NormConfig(post_norms=True)))) == set(dump(make_config()))
    with pytest.raises(ConfigError, match="norms: is fixed and cannot be set"):
        parse(ModelConfig, {**dump(make_config()), "norms": {}})
    config = make_config(norms=NormConfig(post_norms=True), rope=RopeScaling(kind="linear", factor=2.0))
    assert parse(ModelConfig, dump(config, constants=True), constants=True) == config
