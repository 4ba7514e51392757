"""Chooses the architecture of llama.cpp for a model, with its settings, and refuses models that llama.cpp cannot
compute.

llama.cpp derives some of a model's shape from the architecture alone (which layers slide, which have no positions, the
scale of attention). A model that differs from that would run and answer wrongly, so it is refused by the name of the
setting. Names and rules are those of llama.cpp's `src/models` and of its converter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from modelwright.core.errors import ModelError
from modelwright.model.config import Activation, ModelConfig
from modelwright.ops.rope import RopeKind, RopeScaling, scaled_frequencies

Value = int | float | str | Sequence[bool] | Sequence[float]
"""A setting of a GGUF file."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp, and the parts of a model that it computes."""

    name: str
    """Name in the file, which is also the prefix of the settings."""
    activation: Activation = "silu"
    scalings: Sequence[RopeKind] = ("default", "linear", "yarn")
    """Rotary scalings that it computes as `transformers` does."""
    interleaves: bool = False
    """True if it rotates neighboring dimensions instead of those of the two halves, so that rows of queries and keys
    are reordered."""
    slides_every: int = 0
    """All layers but every so-many-th have the window; 0 for an architecture that ignores windows."""
    no_rope_every: int = 0
    """Interval of the layers without rotary positions; 0 if all layers have them."""
    fuses: bool = False
    """True if queries, keys and values are one tensor, and gate and up projection one."""
    heads_fill_width: bool = False
    """True if all heads together must be as wide as the model."""
    biases: Sequence[str] = ("qkv_bias",)
    """Biases that it adds."""


ARCHITECTURES: Mapping[str, Architecture] = {
    # Only what llama.cpp computes for the type; everything else is refused by `architecture_of`.
    "llama": Architecture(
        name="llama",
        interleaves=True,
        scalings=("default", "linear", "yarn", "llama3"),
        biases=("qkv_bias", "output_bias", "ffn_bias"),
    ),
    "mistral": Architecture(name="llama", interleaves=True, biases=()),
    "qwen2": Architecture(name="qwen2", heads_fill_width=True),
    "qwen3": Architecture(name="qwen3"),
    "smollm3": Architecture(name="smollm3", interleaves=True, no_rope_every=4),
    "gemma2": Architecture(name="gemma2", activation="gelu_tanh", slides_every=2, scalings=("default",)),
    "gemma3_text": Architecture(name="gemma3", activation="gelu_tanh", slides_every=6, scalings=("default", "linear")),
    "phi3": Architecture(name="phi3", fuses=True, heads_fill_width=True, scalings=("default", "longrope"), biases=()),
}
"""Architectures by the `model_type` of Hugging Face."""


def architecture_of(config: ModelConfig, hf_type: str, source: str) -> Architecture:
    """Returns the architecture that computes the same model. source: the folder, for errors. Raises `ModelError` with
    the setting that llama.cpp does not compute.
    """
    chosen = ARCHITECTURES.get(hf_type)
    if chosen is None:
        raise ModelError(f"{source}: llama.cpp does not support model type {hf_type!r}; export to hf instead")
    attention, layers = config.attention, range(config.num_layers)
    no_rope = tuple(n for n in layers if chosen.no_rope_every and (n + 1) % chosen.no_rope_every == 0)
    biases = {
        "qkv_bias": attention.qkv_bias, "output_bias": attention.output_bias, "ffn_bias": config.feed_forward.bias
    }  # fmt: skip
    missing = [name for name, there in biases.items() if there and name not in chosen.biases]
    ignores_window = not chosen.slides_every and 0 < attention.window < config.max_seq_len
    wrong_width = chosen.heads_fill_width and config.num_heads * config.head_dim != config.model_dim
    # llama.cpp knows the 27B models of Gemma by their number of layers, and scales by the model's width for them.
    is_27b = (chosen.name, config.num_layers) in (("gemma2", 46), ("gemma3", 62))
    usual_scale = (config.model_dim // config.num_heads if is_27b else config.head_dim) ** -0.5
    other_scale = attention.query_scale and not math.isclose(attention.query_scale, usual_scale)
    own_factor = config.rope.kind == "yarn" and (bool(config.rope.attention_factor) or not config.rope.truncate)
    untied_gemma2 = chosen.name == "gemma2" and not config.tie_embeddings
    problems = [
        ("hidden_act", "has another activation" if config.feed_forward.activation != chosen.activation else ""),
        ("rope_scaling", f"has no scaling {config.rope.kind}" if config.rope.kind not in chosen.scalings else ""),
        ("rope_scaling", "takes no attention factor of its own" if own_factor else ""),
        ("sliding_window", "ignores the window" if ignores_window else ""),
        ("no_rope_layers", "gives positions to other layers" if attention.layers_without_rope != no_rope else ""),
        ("attention_bias", f"has no {missing[0]}" if missing else ""),
        ("head_dim", "wants heads that are together as wide as the model" if wrong_width else ""),
        ("query_pre_attn_scalar", "scales attention by another factor" if other_scale else ""),
        ("tie_word_embeddings", "always ties the embeddings" if untied_gemma2 else ""),
    ]
    for name, problem in problems:
        if problem:
            raise ModelError(f"{source}: {name}: llama.cpp's {chosen.name} {problem}; export to hf instead")
    return chosen


def settings_of(config: ModelConfig, chosen: Architecture) -> dict[str, Value]:
    """Returns the settings of the file, without the architecture's name before them."""
    attention, rope = config.attention, config.rope
    settings: dict[str, Value] = {
        "block_count": config.num_layers,
        "context_length": config.max_seq_len,
        "embedding_length": config.model_dim,
        "feed_forward_length": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": config.num_rotated,
        "rope.freq_base": config.rope_theta,
    }
    if rope.kind in ("linear", "yarn", "longrope"):
        settings["rope.scaling.type"] = rope.kind
    if rope.kind in ("linear", "yarn"):
        settings["rope.scaling.factor"] = rope.factor
    if rope.kind in ("yarn", "longrope"):
        settings["rope.scaling.original_context_length"] = rope.original_max_len
    if rope.kind == "yarn":
        settings |= {"rope.scaling.yarn_beta_fast": rope.beta_fast, "rope.scaling.yarn_beta_slow": rope.beta_slow}
    if rope.kind == "longrope":
        # As `transformers` does without a factor in the config: the formula of LongRoPE (Ding et al. 2024).
        growth = math.log(rope.factor) / math.log(rope.original_max_len) if rope.factor > 1 else 0.0
        settings["rope.scaling.attn_factor"] = rope.attention_factor or math.sqrt(1 + growth)
    if chosen.slides_every:
        settings["attention.sliding_window"] = attention.window
        # The layers with a window are stored only where they differ from the architecture's own pattern.
        slides = [bool(config.window_of(layer)) for layer in range(config.num_layers)]
        if slides != [(layer + 1) % chosen.slides_every != 0 for layer in range(config.num_layers)]:
            settings["attention.sliding_window_pattern"] = slides
        if config.window_rope_theta:
            settings["rope.freq_base_swa"] = config.window_rope_theta
    if chosen.name == "phi3":
        settings["attention.sliding_window"] = 0
    if attention.soft_cap:
        settings["attn_logit_softcapping"] = attention.soft_cap
    if config.logit_soft_cap:
        settings["final_logit_softcapping"] = config.logit_soft_cap
    return settings


def rope_tensors(config: ModelConfig) -> dict[str, list[float]]:
    """Returns factors of the rotary frequencies that are stored as tensors, [rotated dimensions / 2] each."""
    rope = config.rope
    if rope.kind == "longrope":
        return {"rope_factors_long": list(rope.long_factor), "rope_factors_short": list(rope.short_factor)}
    if rope.kind != "llama3":
        return {}
    # llama.cpp divides by the factor: unscaled frequency over scaled frequency.
    lengths = torch.ones(1, 1, dtype=torch.int64)
    plain, _ = scaled_frequencies(lengths, config.num_rotated, config.rope_theta, RopeScaling())
    scaled, _ = scaled_frequencies(lengths, config.num_rotated, config.rope_theta, config.rope)
    return {"rope_freqs": (plain.double() / scaled.double()).flatten().tolist()}


_TOP = {"embedding": "token_embd", "norm": "output_norm", "head": "output"}
_PARTS = {
    "attention_norm": "attn_norm",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention_post_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "ffn_post_norm": "post_ffw_norm",
    "ffn.gate_proj": "ffn_gate",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
}
_FUSED = {
    "attention.q_proj": "attn_qkv",
    "attention.k_proj": "attn_qkv",
    "attention.v_proj": "attn_qkv",
    "ffn.gate_proj": "ffn_up",
    "ffn.up_proj": "ffn_up",
}


def tensor_name(name: str, chosen: Architecture) -> str:
    """Returns the tensor's name for a parameter: `blocks.0.ffn.up_proj.weight` -> `blk.0.ffn_up.weight`. Parameters
    with one name are the tensor's rows, in their order.
    """
    if not name.startswith("blocks."):
        part, own = name.split(".", 1)
        return f"{_TOP[part]}.{own}"
    _, layer, place = name.split(".", 2)
    module, _, own = place.rpartition(".")
    names = {**_PARTS, **_FUSED} if chosen.fuses else _PARTS
    return f"blk.{layer}.{names[module]}.{own}"
