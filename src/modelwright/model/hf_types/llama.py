"""Llama: one attention span, optional biases, every rotary scaling."""

from typing import Any

from modelwright.model.decoder import AttentionConfig, FeedForwardConfig
from modelwright.model.hf_types import hf_type as hf


def _read(settings: hf.HfSettings) -> dict[str, Any]:
    if settings.data.get("use_sliding_window") or "sliding_attention" in settings.layer_types():
        settings.refuse("use_sliding_window", "sliding-window attention of a Llama, which transformers ignores,")
    hf.refuse_partial_rotary(settings)
    shape = hf.read_shape(settings)
    bias = bool(settings.get("attention_bias", False))
    return {
        **shape,
        **hf.read_rope(settings, max_len=shape["max_seq_len"]),
        "attention": AttentionConfig(qkv_bias=bias, output_bias=bias),
        "feed_forward": FeedForwardConfig(
            activation=hf.read_activation(settings, "hidden_act"), bias=bool(settings.get("mlp_bias", False))
        ),
    }


LLAMA = hf.HfType(
    name="llama",
    architecture="LlamaForCausalLM",
    read=_read,
    write=lambda config: {
        **hf.write_shape(config),
        **hf.write_rope(config),
        **({"mlp_bias": True} if config.feed_forward.bias else {}),
    },
)
