"""Rotary settings of a `config.json`: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from modelwright.model.config import ModelConfig
from modelwright.model.hf_types.hf_type import HfSettings
from modelwright.ops.rope import RopeKind, RopeScaling

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
