"""Decoders in the Hugging Face layout: the only format in which this project keeps weights.

A model folder holds `config.json` (type `llama`, or `qwen3` for a decoder with QK-norm), `model.safetensors` or shards
with `model.safetensors.index.json`, and `generation_config.json`. `transformers` reads what `save_model` writes, and
`load_model` reads what `transformers` writes. Nothing is unpickled.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from modelwright.core.artifacts import fsync_folder, write_atomic
from modelwright.core.errors import ConfigError, ModelError, StorageError, writing
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

_TOP_NAMES = {"embedding.": "model.embed_tokens.", "norm.": "model.norm.", "head.": "lm_head."}
_BLOCK_NAMES = {
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "attention.": "self_attn.",
    "ffn.": "mlp.",
}


def save_model(
    model: Decoder, folder: Path, *, eos_id: int | None = None, bos_id: int | None = None, pad_id: int | None = None
) -> None:
    """Write the decoder into `folder` (created if missing), each file atomically. The weights keep their number format.
    Raises `StorageError` if writing fails.
    """
    special = {"bos_token_id": bos_id, "eos_token_id": eos_id, "pad_token_id": pad_id}
    weights = {hf_name(name): tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    config = {**hf_config(model.config), **special, "dtype": str(model.head_weight.dtype).removeprefix("torch.")}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _save_tensors(folder / WEIGHTS, weights)
    write_atomic(folder / "generation_config.json", json.dumps(special, indent=2) + "\n")
    write_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")


def load_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """Read a Llama or Qwen3 type folder, sharded or not, into a decoder on the CPU with weights in `dtype`.

    Raises `ModelError` that names the setting or tensor when the folder holds anything that the decoder cannot express
    exactly, or when files are missing, damaged or contradict each other.
    """
    config = load_config(folder)
    with torch.device("meta"):
        model = Decoder(config)
    stored = _read_tensors(folder)
    if config.tie_embeddings:
        stored.pop("lm_head.weight", None)
    requested = {hf_name(name): (name, parameter.shape) for name, parameter in model.state_dict().items()}
    _check_tensors(folder, wanted={name: shape for name, (_, shape) in requested.items()}, stored=stored)
    state = {name: stored[hf].to(dtype, copy=True) for hf, (name, _) in requested.items()}
    model.load_state_dict(state, assign=True)
    return model


def load_config(folder: Path) -> ModelConfig:
    """The shape that a folder's `config.json` describes. Raises `ModelError` as `load_model` does."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; give the path of a model folder in the Hugging Face layout")
    return config_from_hf(_read_json(path), source=str(path))


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The Hugging Face `config.json` of a decoder of this shape: Qwen3 with QK-norm, Llama without."""
    kind = ("qwen3", "Qwen3ForCausalLM") if config.qk_norm else ("llama", "LlamaForCausalLM")
    return {
        "architectures": [kind[1]],
        "model_type": kind[0],
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "embedding_initializer_range": config.embedding_init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def config_from_hf(data: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
    """The decoder's shape from a Hugging Face config; the defaults of missing keys are those of `transformers`.

    Raises `ModelError` naming the setting that the decoder cannot express.
    """
    kind = data.get("model_type")
    if kind not in ("llama", "qwen3"):
        raise ModelError(f"{source}: model_type is {kind!r}; only 'llama' and 'qwen3' can be loaded")
    _refuse_unsupported(data, source)
    try:
        heads, width = int(data["num_attention_heads"]), int(data["hidden_size"])
        rope: Mapping[str, Any] = data.get("rope_parameters") or {}
        return ModelConfig(
            vocab_size=int(data["vocab_size"]),
            num_layers=int(data["num_hidden_layers"]),
            model_dim=width,
            num_heads=heads,
            num_kv_heads=int(data.get("num_key_value_heads") or heads),
            ffn_dim=int(data["intermediate_size"]),
            head_dim=int(data.get("head_dim") or (width // heads if kind == "llama" else 128)),
            max_seq_len=int(data.get("max_position_embeddings") or 2048),
            rope_theta=float(rope.get("rope_theta") or data.get("rope_theta") or 10_000.0),
            norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            qk_norm=kind == "qwen3",
            tie_embeddings=bool(data.get("tie_word_embeddings", False)),
            init_std=float(data.get("initializer_range", 0.02)),
            embedding_init_std=float(data.get("embedding_initializer_range", data.get("initializer_range", 0.02))),
        )
    except KeyError as error:
        raise ModelError(f"{source}: has no {error.args[0]!r}, so it does not describe a complete model") from None
    except (TypeError, ValueError) as error:
        text = str(error) if isinstance(error, ConfigError) else f"a size is not a number ({error})"
        raise ModelError(f"{source}: {text}") from None


def hf_name(name: str) -> str:
    """A parameter's Hugging Face name: `blocks.0.ffn.up_proj.weight` -> `model.layers.0.mlp.up_proj.weight`."""
    if name.startswith("blocks."):
        _, layer, rest = name.split(".", 2)
        part = next(part for part in _BLOCK_NAMES if rest.startswith(part))
        return f"model.layers.{layer}.{_BLOCK_NAMES[part]}{rest.removeprefix(part)}"
    part = next(part for part in _TOP_NAMES if name.startswith(part))
    return _TOP_NAMES[part] + name.removeprefix(part)


def _refuse_unsupported(data: Mapping[str, Any], source: str) -> None:
    """Raise `ModelError` for the first setting that changes the computation in a way that the decoder lacks."""
    scaling: Any = data.get("rope_scaling") or data.get("rope_parameters") or {}
    rope = cast(Mapping[str, Any], scaling) if isinstance(scaling, Mapping) else {"rope_type": scaling}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    partial = data.get("partial_rotary_factor") or (rope.get("partial_rotary_factor") if rope_type == "default" else 1)
    sliding = data.get("use_sliding_window") or set(data.get("layer_types") or ()) - {"full_attention"}
    unsupported: dict[str, tuple[Any, str]] = {
        "attention_bias": (data.get("attention_bias"), "biases in attention"),
        "mlp_bias": (data.get("mlp_bias"), "biases in the feed-forward layers"),
        "rope_scaling": (rope_type != "default", f"scaled rotary positions ({rope_type})"),
        "partial_rotary_factor": (partial not in (None, 1, 1.0), "rotary positions on a part of each head"),
        "use_sliding_window": (sliding, "sliding-window attention"),
        "num_experts": (data.get("num_experts") or data.get("num_local_experts"), "mixture of experts"),
        "hidden_act": (data.get("hidden_act", "silu") != "silu", f"activation {data.get('hidden_act')!r}"),
        "quantization_config": (data.get("quantization_config"), "quantized weights"),
    }
    for name, (present, what) in unsupported.items():
        if present:
            raise ModelError(f"{source}: {name}: {what} cannot be loaded; use a plain Llama or Qwen3 model")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a model folder in the Hugging Face layout has one") from None
    except ValueError as error:
        raise ModelError(f"{path}: is damaged ({error}); copy the folder again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: is not a JSON object; copy the folder again")
    return cast(dict[str, Any], data)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the single one, or the shards that its index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / WEIGHTS_INDEX).is_file():
        pickled = any(folder.glob("*.bin"))
        hint = "its weights are pickled; save them again with safe_serialization=True" if pickled else "no weights"
        raise ModelError(f"{folder}: has no {WEIGHTS} ({hint})")
    weight_map = _read_json(folder / WEIGHTS_INDEX).get("weight_map")
    files = cast(dict[str, Any], weight_map) if isinstance(weight_map, dict) else {}
    names = sorted({str(name) for name in files.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelError(f"{folder / name}: a shard named in {WEIGHTS_INDEX} is missing; copy the folder again")
    return [folder / name for name in names]


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            opened: Any = safe_open(path, framework="pt")
            with opened as file:
                tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: is damaged or truncated ({error}); copy the folder again") from None
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _check_tensors(folder: Path, *, wanted: Mapping[str, torch.Size], stored: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` naming the tensors that are missing, surplus or of another shape than the config says."""
    problems = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unknown": sorted(stored.keys() - wanted.keys()),
        "of another shape than config.json says": [
            f"{name} {list(stored[name].shape)} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in stored and stored[name].shape != shape
        ],
    }
    for problem, names in problems.items():
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ModelError(f"{folder}: tensors {problem}: {', '.join(names[:5])}{more}")


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except SafetensorError as error:
        raise StorageError(f"{path}: cannot be written ({error}); free some space and run again") from error
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)
