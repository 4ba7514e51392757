"""The decoder's shape: validation and the arithmetic about it."""

import pytest

from modelwright.core.errors import ConfigError
from modelwright.model.decoder import Decoder
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
