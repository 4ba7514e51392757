"""Mistral: a Llama all of whose layers may have a sliding window."""

from typing import Any

from modelwright.model.decoder import AttentionConfig, FeedForwardConfig
from modelwright.model.hf_types import hf_type as hf

DEFAULT_WINDOW = 4096


def _read(settings: hf.HfSettings) -> dict[str, Any]:
    if settings.layer_types():
        settings.refuse("layer_types", "a Mistral whose layers differ, which transformers ignores,")
    hf.refuse_partial_rotary(settings)
    shape = hf.read_shape(settings, num_key_value_heads=8, max_position_embeddings=131_072)
    # a window of null is none, and a missing one is the default
    window = int(settings.data.get("sliding_window", DEFAULT_WINDOW) or 0)
    layers = tuple(range(shape["num_layers"])) if window else ()
    return {
        **shape,
        **hf.read_rope(settings, max_len=shape["max_seq_len"]),
        "attention": AttentionConfig(window=window, window_layers=layers),
        "feed_forward": FeedForwardConfig(activation=hf.read_activation(settings, "hidden_act")),
    }


MISTRAL = hf.HfType(
    name="mistral",
    architecture="MistralForCausalLM",
    read=_read,
    write=lambda config: {
        **hf.write_shape(config),
        **hf.write_rope(config),
        "sliding_window": config.attention.window or None,
    },
)
