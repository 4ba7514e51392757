"""Qwen2 and Qwen2.5 (biases on queries, keys and values) and Qwen3 (norms on queries and keys); both may slide."""

from functools import partial
from typing import Any

from modelwright.model.config import AttentionConfig, FeedForwardConfig, ModelConfig
from modelwright.model.hf_types import hf_type
from modelwright.model.hf_types.hf_type import read_rope, refuse_partial_rotary, write_rope


def _read(
    settings: hf_type.HfSettings, *, head_dim: int, qkv_bias: bool, output_bias: bool, qk_norm: bool
) -> dict[str, Any]:
    refuse_partial_rotary(settings)
    shape = hf_type.read_shape(settings, head_dim=head_dim, max_position_embeddings=32_768)
    window = int(settings.data.get("sliding_window", 4096) or 0) if settings.get("use_sliding_window", False) else 0
    first = int(settings.get("max_window_layers", 28))
    # In Qwen the first layers see all tokens and the later ones slide
    layers = settings.window_layers(window, lambda layer: window > 0 and layer >= first)
    attention = AttentionConfig(
        qkv_bias=qkv_bias, output_bias=output_bias, window=window if layers else 0, window_layers=layers
    )
    return {
        **shape,
        **read_rope(settings, max_len=shape["max_seq_len"]),
        "qk_norm": qk_norm,
        "attention": attention,
        "feed_forward": FeedForwardConfig(activation=hf_type.read_activation(settings, "hidden_act")),
    }


def _read_qwen3(settings: hf_type.HfSettings) -> dict[str, Any]:
    bias = bool(settings.get("attention_bias", False))
    return _read(settings, head_dim=128, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _write(config: ModelConfig) -> dict[str, Any]:
    written = {**hf_type.write_shape(config), **write_rope(config)}
    if not config.attention.window:
        return written
    return {
        **written,
        **hf_type.write_layer_types(config),
        "use_sliding_window": True,
        "max_window_layers": config.attention.window_layers[0],
    }


QWEN2 = hf_type.HfType(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    read=partial(_read, head_dim=0, qkv_bias=True, output_bias=False, qk_norm=False),
    write=_write,
)
QWEN3 = hf_type.HfType(name="qwen3", architecture="Qwen3ForCausalLM", read=_read_qwen3, write=_write)
