"""Models of every type that GGUF files hold."""

from pathlib import Path
from typing import Any

from hf_folders import BIASED, LLAMA3, rope, write_folder

EXPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {**BIASED, "tie_word_embeddings": True}),
    "llama-llama3": ("llama", rope(**LLAMA3)),
    "llama-linear": ("llama", rope(rope_type="linear", factor=2.5)),
    "mistral": ("mistral-all", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 8}),
}
"""Case of `hf_folders`, and what it changes."""


def model_folder(name: str, folder: Path, files: dict[str, Path], **changes: Any) -> Path:
    write_folder(name, folder, **changes)
    for file, path in files.items():
        (folder / file).write_bytes(path.read_bytes())
    return folder
