"""Entry of the table of Hugging Face model types, and what entries share: shapes, activations and rotary settings.

An entry maps settings of a `config.json` to fields of `ModelConfig` and back, and parameters to names of tensors. All
types use the modules of `decoder.py`. Rotary settings are `rope_parameters` in transformers 5, `rope_theta` and
`rope_scaling` in 4.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from modelwright.core.config import ModelError
from modelwright.model.decoder import Activation, ModelConfig, layers_where
from modelwright.ops.rope_norm_swiglu import RopeKind, RopeScaling

PRE_NORM_NAMES: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "ffn": "mlp",
}
"""Names of a block's parts, with one norm before attention and one before the feed-forward layer."""

SHAPE_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 0,
    "head_dim": 0,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
"""Defaults of settings in most types. 0 key/value heads mean one for each query head, a head width of 0 the model width
divided by the query heads."""

ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
HF_ACTIVATIONS: Mapping[Activation, str] = {own: name for name, own in ACTIVATIONS.items()}


@dataclass(frozen=True)
class HfSettings:
    """Settings of a `config.json`; null counts as missing. source: its path, for errors."""

    data: Mapping[str, Any]
    source: str

    def get(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        return default if value is None else value

    def required(self, name: str) -> Any:
        if self.data.get(name) is None:
            raise ModelError(f"{self.source}: {name!r} is missing, so the model is not complete")
        return self.data[name]

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Returns a group of settings, empty if it is missing. Raises `ModelError` if it is not a group."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            self.refuse(name, f"{value!r} where a group of settings is expected")
        return cast(Mapping[str, Any], value)

    def refuse(self, name: str, what: str) -> None:
        """Raise `ModelError` for a setting that needs a computation that the decoder lacks."""
        raise ModelError(f"{self.source}: {name}: {what} cannot be loaded; choose a model without")

    def refuse_if_set(self, **unsupported: str) -> None:
        """Raise `ModelError` for the first of these settings that is present and true."""
        for name, what in unsupported.items():
            if self.data.get(name):
                self.refuse(name, what)

    def layer_types(self) -> Sequence[str]:
        """Returns `full_attention` or `sliding_attention` for each layer; empty if the config lacks such a list."""
        types = [str(one) for one in self.get("layer_types", ())]
        if types and len(types) != int(self.required("num_hidden_layers")):
            raise ModelError(
                f"{self.source}: layer_types: has {len(types)} entries for {self.required('num_hidden_layers')} layers"
            )
        for one in sorted(set(types) - {"full_attention", "sliding_attention"}):
            self.refuse("layer_types", f"layers of type {one!r}")
        return types

    def window_layers(self, window: int, default: Callable[[int], bool]) -> tuple[int, ...]:
        """Returns the layers with a window, by `layer_types` or else by the type's own rule, `default`."""
        num_layers = int(self.required("num_hidden_layers"))
        types = self.layer_types() or [
            "sliding_attention" if default(layer) else "full_attention" for layer in range(num_layers)
        ]
        layers = layers_where([one == "sliding_attention" for one in types])
        if layers and window < 1:
            raise ModelError(f"{self.source}: sliding_window: is not set, but layers {layers[0]} and others slide")
        return layers


@dataclass(frozen=True, kw_only=True)
class HfType:
    """Entry for a `model_type` of Hugging Face.

    name: the `model_type`; architecture: its class for causal language modeling; read: returns the fields of
    `ModelConfig` from a config.json; write: returns the settings of a config.json, without type and architecture;
    block_names: names of a block's parts; fused: projections in each tensor that concatenates several by rows.
    """

    name: str
    architecture: str
    read: Callable[[HfSettings], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    block_names: Mapping[str, str] = field(default_factory=lambda: PRE_NORM_NAMES)
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])


def read_shape(settings: HfSettings, **defaults: Any) -> dict[str, Any]:
    """Read the fields that all types have. defaults: differences from `SHAPE_DEFAULTS`."""
    get = {name: settings.get(name, default) for name, default in {**SHAPE_DEFAULTS, **defaults}.items()}
    heads, width = int(settings.required("num_attention_heads")), int(settings.required("hidden_size"))
    return {
        "vocab_size": int(settings.required("vocab_size")),
        "num_layers": int(settings.required("num_hidden_layers")),
        "model_dim": width,
        "num_heads": heads,
        "num_kv_heads": int(get["num_key_value_heads"]) or heads,
        "ffn_dim": int(settings.required("intermediate_size")),
        "head_dim": int(get["head_dim"]) or width // heads,
        "max_seq_len": int(get["max_position_embeddings"]),
        "norm_eps": float(get["rms_norm_eps"]),
        "qk_norm": False,
        "tie_embeddings": bool(get["tie_word_embeddings"]),
        "init_std": float(get["initializer_range"]),
        "embedding_init_std": float(settings.get("embedding_initializer_range", get["initializer_range"])),
    }


def write_shape(config: ModelConfig) -> dict[str, Any]:
    """Returns the settings that all types have."""
    # Dynamic scaling starts from the original length, which `read_rope` multiplies by the factor again
    original = config.rope.original_max_len if config.rope.kind == "dynamic" else config.max_seq_len
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": original,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "embedding_initializer_range": config.embedding_init_std,
        "hidden_act": HF_ACTIVATIONS[config.feed_forward.activation],
        "attention_bias": config.attention.output_bias,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def read_activation(settings: HfSettings, *names: str, default: str = "silu") -> Activation:
    """Returns the activation that the first of these settings names."""
    name = next((name for name in names if settings.data.get(name) is not None), names[0])
    activation = settings.get(name, default)
    if activation not in ACTIVATIONS:
        settings.refuse(name, f"activation {activation!r}")
    return ACTIVATIONS[activation]


def write_layer_types(config: ModelConfig) -> dict[str, Any]:
    """Returns `layer_types` and the window of the sliding layers."""
    spans = ["sliding_attention" if config.window_of(layer) else "full_attention" for layer in range(config.num_layers)]
    return {"layer_types": spans, "sliding_window": config.attention.window or None}


PARTIAL = "partial_rotary_factor"


def read_rope(
    settings: HfSettings, *, max_len: int, default_theta: float = 10_000.0, group: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read `rope_theta`, `rope` and, where a scaling grows it, `max_seq_len` of a model with `max_len` positions.

    group: the settings of one kind of layers, where a type has several.
    """
    parameters = rope_settings(settings) if group is None else group
    theta = float(parameters.get("rope_theta") or settings.get("rope_theta", default_theta))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in get_args(RopeKind):
        settings.refuse("rope_scaling", f"scaled rotary positions ({kind})")
    if kind == "default":
        return {"rope_theta": theta, "rope": RopeScaling()}
    name = "original_max_position_embeddings"
    original = max_len if kind == "dynamic" else int(settings.data.get(name) or parameters.get(name) or max_len)
    factor = parameters.get("factor")
    if factor is None and kind in ("linear", "dynamic", "llama3"):
        settings.refuse("rope_scaling", f"kind {kind} without a factor")
    factor = max_len / original if factor is None else float(factor)
    scaling: dict[str, Any] = {"kind": kind, "factor": factor, "original_max_len": 0 if kind == "linear" else original}
    if kind == "yarn":
        attention, scale, scale_all = (parameters.get(one) for one in ("attention_factor", "mscale", "mscale_all_dim"))
        if attention is None and scale and scale_all:
            # DeepSeek-V2's two factors; without them attention's factor follows from the scaling's, which 0 stands for
            growth = 0.1 * math.log(factor) if factor > 1 else 0.0
            attention = (growth * float(scale) + 1.0) / (growth * float(scale_all) + 1.0)
        scaling |= {
            "beta_fast": float(parameters.get("beta_fast") or 32.0),
            "beta_slow": float(parameters.get("beta_slow") or 1.0),
            "truncate": bool(parameters.get("truncate", True)),
            "attention_factor": float(attention or 0.0),
        }
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            scaling[name] = tuple(map(float, cast(Sequence[float], parameters.get(name) or ())))
        scaling["attention_factor"] = float(parameters.get("attention_factor") or 0.0)
    if kind == "llama3":
        scaling |= {name: float(parameters[name]) for name in ("low_freq_factor", "high_freq_factor")}
    rope = RopeScaling(**scaling)
    return {"rope_theta": theta, "rope": rope, **({"max_seq_len": int(max_len * factor)} if kind == "dynamic" else {})}


def rope_settings(settings: HfSettings) -> Mapping[str, Any]:
    """Returns the group that applies to all layers: `rope_scaling`, where a config has it, else `rope_parameters`."""
    name = "rope_scaling" if settings.data.get("rope_scaling") else "rope_parameters"
    group = settings.mapping(name)
    if any(isinstance(value, Mapping) for value in group.values()):
        settings.refuse(name, "rotary positions that differ between kinds of layers")
    return group


def refuse_partial_rotary(settings: HfSettings) -> None:
    """Raise `ModelError` if positions are on a part of each head only."""
    if float(rope_settings(settings).get(PARTIAL) or settings.get(PARTIAL, 1.0)) != 1.0:
        settings.refuse(PARTIAL, "rotary positions on a part of each head")


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Returns the scaling under the names of `transformers` 4 and 5; empty without a scaling."""
    if config.rope.kind == "default":
        return {}
    scaling = scaling_settings(config)
    return {"rope_parameters": {**scaling, "rope_theta": config.rope_theta}, "rope_scaling": scaling}


def scaling_settings(config: ModelConfig) -> dict[str, Any]:
    """Returns the settings that the scaling's kind has."""
    scaling = config.rope
    written: dict[str, Any] = {"rope_type": scaling.kind}
    if scaling.kind == "default":
        return written
    # LongRoPE's factor follows from the two lengths when it is read, so only another one is written
    if scaling.kind != "longrope" or scaling.factor != config.max_seq_len / scaling.original_max_len:
        written["factor"] = scaling.factor
    if scaling.kind in ("yarn", "longrope", "llama3"):
        written["original_max_position_embeddings"] = scaling.original_max_len
    if scaling.attention_factor:
        written["attention_factor"] = scaling.attention_factor
    names = {
        "yarn": ("beta_fast", "beta_slow", "truncate"),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }
    for name in names.get(scaling.kind, ()):
        value: Any = getattr(scaling, name)
        written[name] = list(cast(tuple[float, ...], value)) if isinstance(value, tuple) else value
    return written
