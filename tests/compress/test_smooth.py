"""SmoothQuant: the same function, and smaller errors of INT8 where activations have outliers."""

from dataclasses import replace

import pytest
import tiny_run
import torch

from modelwright.compress.fold import smoothed
from modelwright.compress.int8 import Int8WeightsConfig, quantize_model
from modelwright.model.decoder import AttentionConfig, Decoder, FeedForwardConfig, NormConfig
from modelwright.train.objective import forward

SHAPES = {
    "plain": tiny_run.SHAPE,
    "biases": replace(
        tiny_run.SHAPE,
        attention=AttentionConfig(qkv_bias=True, output_bias=True),
        feed_forward=FeedForwardConfig(bias=True),
        attention_gate="head",
    ),
    "gemma": replace(
        tiny_run.SHAPE,
        norms=NormConfig(post_norms=True, one_plus_weight=True),
        feed_forward=FeedForwardConfig(activation="gelu_tanh"),
    ),
}


def with_outliers(name: str, dtype: torch.dtype) -> Decoder:
    """A few channels of the norms' outputs are far larger than the others, as in large language models."""
    model = Decoder(SHAPES[name])
    model.init_weights(2)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and key.startswith("blocks"):
                parameter.mul_(5.0)
            elif key.endswith("bias"):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
        for block in model.blocks.values():
            for norm in (block.attention_norm, block.ffn_norm):
                norm.weight[[3, 17]] = 60.0
            for linear in (block.attention.q_proj, block.attention.k_proj, block.attention.v_proj):
                linear.weight[:, [3, 17]] /= 40
            for linear in (block.ffn.gate_proj, block.ffn.up_proj):
                linear.weight[:, [3, 17]] /= 40
    return model.to(dtype).eval()


@pytest.mark.parametrize("name", SHAPES)
def test_the_function_stays(name: str) -> None:
    model = with_outliers(name, torch.float64)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batch = tiny_run.Rows().batch(5)
    result = smoothed(model, [tiny_run.Rows().batch(0)])
    with torch.no_grad():
        torch.testing.assert_close(forward(result, batch), forward(model, batch), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(torch.equal(one.weight, before[f"{key}.weight"]) for key, one in result.projections().items())


@pytest.mark.parametrize("name", SHAPES)
def test_integers_err_less(name: str) -> None:
    model, batch = with_outliers(name, torch.float32), tiny_run.Rows().batch(5)
    config = Int8WeightsConfig(backend="int_mm")
    with torch.no_grad():
        wanted = forward(model, batch)
        errors = [
            float((forward(quantize_model(one, config), batch) - wanted).square().mean())
            for one in (smoothed(model, [tiny_run.Rows().batch(0)]), model)
        ]
    assert errors[0] < 0.6 * errors[1]
