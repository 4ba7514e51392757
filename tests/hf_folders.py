"""Folders that `transformers` itself writes: small models of every type with random weights and odd sizes."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 1003
WINDOW = 16
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.5, 4.0],
}
BIASED = {"attention_bias": True, "mlp_bias": True}


def rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **scaling}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {**BIASED, "tie_word_embeddings": True}),
    "llama-llama3": ("Llama", rope(**LLAMA3)),
    "llama-linear": ("Llama", rope(rope_type="linear", factor=2.5)),
    "llama-dynamic": ("Llama", {**rope(rope_type="dynamic", factor=4.0), "max_position_embeddings": 32}),
    "llama-yarn": ("Llama", rope(**YARN)),
    "llama-yarn-mscale": ("Llama", rope(**YARN, mscale=0.7, mscale_all_dim=0.5, truncate=False)),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3-yarn-biased": ("Qwen3", {"head_dim": 16, "attention_bias": True, **rope(**YARN)}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral-all": ("Mistral", {"sliding_window": None, "head_dim": 6}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5}),
    "phi3-long": (
        "Phi3",
        {"rope_parameters": LONG, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 40},
    ),
    "phi3-window": ("Phi3", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-window": ("SmolLM3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}),
    "gemma2-untied": (
        "Gemma2",
        {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": WINDOW, "tie_word_embeddings": False},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 10,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma3-linear-cap": (
        "Gemma3Text",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        },
    ),
}
"""Class of the config, and what it changes of `SIZES`."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "max_position_embeddings": 160,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}


def hf_model(name: str, **changes: Any) -> Any:
    """A model of the case with random weights, norms and biases included, in evaluation mode. Attention is computed
    step by step, as its own kernels would add their rounding to the comparison.
    """
    kind, special = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **special, **changes})
    torch.manual_seed(0)
    causal = "Gemma3ForCausalLM" if kind == "Gemma3Text" else f"{kind}ForCausalLM"
    model = getattr(transformers, causal)._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def write_folder(name: str, folder: Path, *, shard_size: str = "5GB", **changes: Any) -> Any:
    """Save such a model; returns it."""
    model = hf_model(name, **changes)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model
