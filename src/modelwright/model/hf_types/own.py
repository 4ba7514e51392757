"""This project's own type, for features that all types of `transformers` lack: a gate on attention's output, selected
heads. `transformers` refuses its folders, and the export does so by name.
"""

from typing import Any, get_args

from modelwright.model.decoder import AttentionConfig, AttentionGate, FeedForwardConfig
from modelwright.model.hf_types import hf_type as hf

OWN_TYPE = "modelwright"


def _read(settings: hf.HfSettings) -> dict[str, Any]:
    shape = hf.read_shape(settings)
    gate = settings.required("attention_gate")
    if gate not in get_args(AttentionGate):
        settings.refuse("attention_gate", f"gate {gate!r}")
    budget = settings.get("head_budget", 1.0)
    if not isinstance(budget, int | float) or not 0 < budget <= 1:
        settings.refuse("head_budget", f"a share of {budget!r}")
    bias = bool(settings.get("attention_bias", False))
    return {
        **shape,
        **hf.read_rope(settings, max_len=shape["max_seq_len"]),
        "qk_norm": bool(settings.required("qk_norm")),
        "attention_gate": gate,
        "head_budget": float(budget),
        "attention": AttentionConfig(qkv_bias=bias, output_bias=bias),
        "feed_forward": FeedForwardConfig(
            activation=hf.read_activation(settings, "hidden_act"), bias=bool(settings.get("mlp_bias", False))
        ),
    }


OWN = hf.HfType(
    name=OWN_TYPE,
    architecture="ModelwrightForCausalLM",
    read=_read,
    write=lambda config: {
        **hf.write_shape(config),
        **hf.write_rope(config),
        "qk_norm": config.qk_norm,
        "attention_gate": config.attention_gate,
        "head_budget": config.head_budget,
        "mlp_bias": config.feed_forward.bias,
    },
)
