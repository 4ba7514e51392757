"""SmolLM3: a Llama with some layers without rotary positions (NoPE), by default every fourth."""

from typing import Any

from modelwright.model.decoder import AttentionConfig, FeedForwardConfig, layers_where
from modelwright.model.hf_types import hf_type as hf


def _read(settings: hf.HfSettings) -> dict[str, Any]:
    hf.refuse_partial_rotary(settings)
    shape = hf.read_shape(settings, num_key_value_heads=4, max_position_embeddings=32_768, tie_word_embeddings=True)
    interval = int(settings.get("no_rope_layer_interval", 4))
    every = [(layer + 1) % interval != 0 for layer in range(shape["num_layers"])]
    uses_rope = [bool(flag) for flag in settings.get("no_rope_layers", every)][: shape["num_layers"]]
    without_rope = layers_where([not flag for flag in uses_rope])
    window = int(settings.get("sliding_window", 0)) if settings.get("use_sliding_window", False) else 0
    layers = settings.window_layers(window, lambda layer: window > 0 and layer in without_rope)
    bias = bool(settings.get("attention_bias", False))
    return {
        **shape,
        **hf.read_rope(settings, max_len=shape["max_seq_len"], default_theta=2_000_000.0),
        "attention": AttentionConfig(
            qkv_bias=bias,
            output_bias=bias,
            window=window if layers else 0,
            window_layers=layers,
            layers_without_rope=without_rope,
        ),
        "feed_forward": FeedForwardConfig(
            activation=hf.read_activation(settings, "hidden_act"), bias=bool(settings.get("mlp_bias", False))
        ),
    }


SMOLLM3 = hf.HfType(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    read=_read,
    write=lambda config: {
        **hf.write_shape(config),
        **hf.write_rope(config),
        **hf.write_layer_types(config),
        "mlp_bias": config.feed_forward.bias,
        "use_sliding_window": config.attention.window > 0,
        "no_rope_layers": [
            int(layer not in config.attention.layers_without_rope) for layer in range(config.num_layers)
        ],
    },
)
