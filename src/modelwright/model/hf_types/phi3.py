"""Phi-3: a Llama with fused projections, LongRoPE, positions on a part of each head, and a window in some sizes."""

from typing import Any

from modelwright.model.decoder import AttentionConfig, FeedForwardConfig, ModelConfig
from modelwright.model.hf_types import hf_type as hf

LONGROPE_NAMES = ("longrope", "su", "yarn")
"""Names of LongRoPE in Phi-3 folders of all versions."""


def _read(settings: hf.HfSettings) -> dict[str, Any]:
    shape = hf.read_shape(settings, max_position_embeddings=4096, rms_norm_eps=1e-5)
    group = dict(hf.rope_settings(settings))
    kind = group.pop("rope_type", None) or group.pop("type", "default")
    if kind not in ("default", *LONGROPE_NAMES):
        settings.refuse("rope_scaling", f"scaled rotary positions ({kind}) of a Phi-3")
    group["rope_type"] = "longrope" if kind in LONGROPE_NAMES else kind
    if kind != "default" and not settings.data.get("original_max_position_embeddings"):
        group.setdefault("original_max_position_embeddings", 4096)
    rotary_dim = int(shape["head_dim"] * float(group.get(hf.PARTIAL) or settings.get(hf.PARTIAL, 1.0)))
    window = int(settings.get("sliding_window", 0))
    return {
        **shape,
        **hf.read_rope(settings, max_len=shape["max_seq_len"], group=group),
        "rotary_dim": rotary_dim if rotary_dim < shape["head_dim"] else 0,
        "attention": AttentionConfig(window=window, window_layers=tuple(range(shape["num_layers"])) if window else ()),
        "feed_forward": FeedForwardConfig(activation=hf.read_activation(settings, "hidden_act")),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    part = config.num_rotated / config.head_dim
    scaling = hf.scaling_settings(config)
    written = {
        **hf.write_shape(config),
        "rope_parameters": {**scaling, "rope_theta": config.rope_theta, hf.PARTIAL: part},
        hf.PARTIAL: part,
        "sliding_window": config.attention.window or None,
        "original_max_position_embeddings": config.rope.original_max_len or config.max_seq_len,
    }
    if set(scaling) == {"rope_type", "original_max_position_embeddings", "short_factor", "long_factor"}:
        # transformers before version 5 takes exactly these three, and derives all else from the lengths
        lists = {name: scaling[name] for name in ("short_factor", "long_factor")}
        written["rope_scaling"] = {"type": "longrope", **lists}
    return written


PHI3 = hf.HfType(
    name="phi3",
    architecture="Phi3ForCausalLM",
    read=_read,
    write=_write,
    fused={
        "self_attn.qkv_proj": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "mlp.gate_up_proj": ("ffn.gate_proj", "ffn.up_proj"),
    },
)
