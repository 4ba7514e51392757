"""Llama: one attention span, optional biases, every rotary scaling."""

from typing import Any

from modelwright.model.config import AttentionConfig, FeedForwardConfig, ModelConfig
from modelwright.model.hf_types.hf_type import (
    HfSettings,
    HfType,
    read_activation,
    read_rope,
    read_shape,
    refuse_partial_rotary,
    write_rope,
    write_shape,
)


def _read(settings: HfSettings) -> dict[str, Any]:
    if settings.data.get("use_sliding_window") or "sliding_attention" in settings.layer_types():
        settings.refuse("use_sliding_window", "sliding-window attention of a Llama, which transformers ignores,")
    refuse_partial_rotary(settings)
    shape = read_shape(settings)
    bias = bool(settings.get("attention_bias", False))
    return {
        **shape,
        **read_rope(settings, max_len=shape["max_seq_len"]),
        "attention": AttentionConfig(qkv_bias=bias, output_bias=bias),
        "feed_forward": FeedForwardConfig(
            activation=read_activation(settings, "hidden_act"), bias=bool(settings.get("mlp_bias", False))
        ),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_shape(config), **write_rope(config), **({"mlp_bias": True} if config.feed_forward.bias else {})}


LLAMA = HfType(name="llama", architecture="LlamaForCausalLM", read=_read, write=_write)
