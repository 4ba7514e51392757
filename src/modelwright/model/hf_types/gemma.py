"""Gemma 2 and the text models of Gemma 3: norms on both sides with scales of 1 + weight, a scaled embedding, GeGLU,
layers that alternate between a window and all tokens; soft caps (2), norms on queries and keys and other rotary
frequencies under the window (3).
"""

import math
from collections.abc import Mapping
from typing import Any, cast

from modelwright.model.decoder import AttentionConfig, FeedForwardConfig, ModelConfig, NormConfig
from modelwright.model.hf_types import hf_type as hf

NAMES: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attention": "self_attn",
    "ffn": "mlp",
}
GEMMA3_THETA, GEMMA3_WINDOW_THETA = 1_000_000.0, 10_000.0


def _read(settings: hf.HfSettings, *, max_len: int, soft_cap: float, slides: int) -> dict[str, Any]:
    """Read the fields that both types share. slides: every layer with a multiple of this number sees all tokens."""
    settings.refuse_if_set(use_bidirectional_attention="attention to later tokens")
    shape = hf.read_shape(
        settings, num_key_value_heads=4, head_dim=256, max_position_embeddings=max_len, tie_word_embeddings=True
    )
    window = int(settings.data.get("sliding_window", 4096) or 0)
    layers = settings.window_layers(window, lambda layer: (layer + 1) % slides != 0)
    scale = float(settings.get("query_pre_attn_scalar", 256)) ** -0.5
    bias = bool(settings.get("attention_bias", False))
    return {
        **shape,
        "attention": AttentionConfig(
            qkv_bias=bias,
            output_bias=bias,
            # 0 stands for this default, so that folders written by this project compare equal when read back
            query_scale=0.0 if scale == shape["head_dim"] ** -0.5 else scale,
            soft_cap=soft_cap,
            window=window if layers else 0,
            window_layers=layers,
        ),
        "norms": NormConfig(post_norms=True, one_plus_weight=True),
        "feed_forward": FeedForwardConfig(
            activation=hf.read_activation(settings, "hidden_activation", default="gelu_pytorch_tanh")
        ),
        "embedding_scale": math.sqrt(shape["model_dim"]),
    }


def _read_gemma2(settings: hf.HfSettings) -> dict[str, Any]:
    hf.refuse_partial_rotary(settings)
    read = _read(settings, max_len=8192, soft_cap=_cap(settings, "attn_logit_softcapping", 50.0), slides=2)
    logit_soft_cap = _cap(settings, "final_logit_softcapping", 30.0)
    return {**read, **hf.read_rope(settings, max_len=read["max_seq_len"]), "logit_soft_cap": logit_soft_cap}


def _read_gemma3(settings: hf.HfSettings) -> dict[str, Any]:
    settings.refuse_if_set(attn_logit_softcapping="a soft cap of scores of a Gemma 3, which transformers ignores,")
    pattern = int(settings.get("sliding_window_pattern", settings.get("_sliding_window_pattern", 6)))
    read = _read(settings, max_len=131_072, soft_cap=0.0, slides=pattern)
    groups = settings.mapping("rope_parameters")
    full = {**cast(Mapping[str, Any], groups.get("full_attention") or {}), **settings.mapping("rope_scaling")}
    sliding = cast(Mapping[str, Any], groups.get("sliding_attention") or {})
    if sliding.get("rope_type", "default") != "default":
        settings.refuse("rope_parameters", "scaled rotary positions of layers with a window")
    theta = sliding.get("rope_theta") or settings.get("rope_local_base_freq", GEMMA3_WINDOW_THETA)
    return {
        **read,
        **hf.read_rope(settings, max_len=read["max_seq_len"], default_theta=GEMMA3_THETA, group=full),
        "qk_norm": True,
        "window_rope_theta": float(theta),
        "logit_soft_cap": _cap(settings, "final_logit_softcapping", 0.0),
    }


def _cap(settings: hf.HfSettings, name: str, default: float) -> float:
    """Reads a soft cap: null disables it, and a missing one is the default."""
    return float(settings.data.get(name, default) or 0.0)


def _write(config: ModelConfig) -> dict[str, Any]:
    scale = config.attention.query_scale
    shape = hf.write_shape(config)
    del shape["hidden_act"]
    return {
        **shape,
        **hf.write_layer_types(config),
        "hidden_activation": hf.HF_ACTIVATIONS[config.feed_forward.activation],
        "query_pre_attn_scalar": round(scale**-2) if scale else config.head_dim,
        "final_logit_softcapping": config.logit_soft_cap or None,
        "attn_logit_softcapping": config.attention.soft_cap or None,
    }


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    scaling = hf.scaling_settings(config)
    written = {
        **_write(config),
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": config.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.window_rope_theta},
        },
        "rope_local_base_freq": config.window_rope_theta,
    }
    return written if config.rope.kind == "default" else {**written, "rope_scaling": scaling}


GEMMA2 = hf.HfType(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    read=_read_gemma2,
    write=lambda config: {**_write(config), **hf.write_rope(config)},
    block_names=NAMES,
)
GEMMA3 = hf.HfType(
    name="gemma3_text", architecture="Gemma3ForCausalLM", read=_read_gemma3, write=_write_gemma3, block_names=NAMES
)
