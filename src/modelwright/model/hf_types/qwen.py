"""Qwen2 and Qwen2.5 (biases on queries, keys and values) and Qwen3 (norms on queries and keys); both may slide."""

from functools import partial
from typing import Any

from modelwright.model.decoder import AttentionConfig, FeedForwardConfig, ModelConfig
from modelwright.model.hf_types import hf_type as hf


def _read(settings: hf.HfSettings, *, head_dim: int, is_qwen3: bool) -> dict[str, Any]:
    hf.refuse_partial_rotary(settings)
    shape = hf.read_shape(settings, head_dim=head_dim, max_position_embeddings=32_768)
    window = int(settings.data.get("sliding_window", 4096) or 0) if settings.get("use_sliding_window", False) else 0
    first = int(settings.get("max_window_layers", 28))
    # In Qwen the first layers see all tokens and the later ones slide
    layers = settings.window_layers(window, lambda layer: window > 0 and layer >= first)
    bias = is_qwen3 and bool(settings.get("attention_bias", False))
    attention = AttentionConfig(
        qkv_bias=bias or not is_qwen3, output_bias=bias, window=window if layers else 0, window_layers=layers
    )
    return {
        **shape,
        **hf.read_rope(settings, max_len=shape["max_seq_len"]),
        "qk_norm": is_qwen3,
        "attention": attention,
        "feed_forward": FeedForwardConfig(activation=hf.read_activation(settings, "hidden_act")),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    written = {**hf.write_shape(config), **hf.write_rope(config)}
    if not config.attention.window:
        return written
    return {
        **written,
        **hf.write_layer_types(config),
        "use_sliding_window": True,
        "max_window_layers": config.attention.window_layers[0],
    }


QWEN2 = hf.HfType(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    read=partial(_read, head_dim=0, is_qwen3=False),
    write=_write,
)
QWEN3 = hf.HfType(
    name="qwen3", architecture="Qwen3ForCausalLM", read=partial(_read, head_dim=128, is_qwen3=True), write=_write
)
