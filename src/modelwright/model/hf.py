"""Decoders in the Hugging Face layout: the only format in which this project keeps weights.

A model folder holds `config.json` (of a type in `hf_types/`), `model.safetensors` or shards with
`model.safetensors.index.json`, and `generation_config.json`. `transformers` reads what `save_model` writes, and
`load_model` reads what `transformers` writes. Nothing is unpickled.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from modelwright.core.artifacts import fsync_folder, write_atomic
from modelwright.core.errors import ConfigError, ModelError, StorageError, writing
from modelwright.model.adapters import ADAPTER
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.hf_types import HF_TYPES
from modelwright.model.hf_types.hf_type import HfSettings, HfType
from modelwright.model.hf_types.own import OWN_TYPE
from modelwright.model.stored_weights import WEIGHTS, StoredWeights, check_tensors, read_json

LLAVA = "llava"
"""The `model_type` of a decoder that reads images (`vision/llava.py`)."""
CLASSIFIER, SCORE = "ForSequenceClassification", "score"
"""Suffix of such models' class names in `transformers`, and the name of their output projection."""
_TOP_NAMES = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def save_model(
    model: Decoder,
    folder: Path,
    *,
    eos_id: int | None = None,
    bos_id: int | None = None,
    pad_id: int | None = None,
    types: Sequence[HfType] = HF_TYPES,
) -> None:
    """Write the decoder, each file atomically, as the type that it came from. Raises `StorageError` on failure."""
    special = {"bos_token_id": bos_id, "eos_token_id": eos_id, "pad_token_id": pad_id}
    files = {"generation_config.json": special, "config.json": {**hf_config(model.config, types), **special}}
    _save_folder(model, folder, hf_weights(model, types), files)


def save_sequence_classifier(model: Decoder, folder: Path, *, head: str, label: str, eos_id: int, pad_id: int) -> None:
    """Write the decoder with one of its `heads`, a product of the last token's hidden state with `weight` [1, D], as a
    sequence classification with one label. `AutoModelForSequenceClassification` loads it and gives the same scores.

    pad_id: a token that no sequence ends with; `transformers` pools at the last token that is another one. Raises
    `StorageError` if writing fails.
    """
    weights = {name: tensor for name, tensor in hf_weights(model).items() if not name.startswith("lm_head.")}
    weights[f"{SCORE}.weight"] = model.heads[head].get_parameter("weight").detach().contiguous()
    plain = hf_config(model.config)
    config = {
        **plain,
        "architectures": [name.replace("ForCausalLM", CLASSIFIER) for name in plain["architectures"]],
        "id2label": {"0": label},
        "label2id": {label: 0},
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
    }
    _save_folder(model, folder, weights, {"config.json": config})


def _save_folder(
    model: Decoder, folder: Path, weights: dict[str, Tensor], files: Mapping[str, Mapping[str, Any]]
) -> None:
    dtype = {"dtype": str(model.head_weight.dtype).removeprefix("torch.")}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / WEIGHTS, weights)
    for name, settings in files.items():
        text = json.dumps({**settings, **(dtype if name == "config.json" else {})}, indent=2)
        write_atomic(folder / name, text + "\n")


def load_model(folder: Path, *, dtype: torch.dtype = torch.float32, types: Sequence[HfType] = HF_TYPES) -> Decoder:
    """Read a folder, sharded or not, into a decoder on the CPU with weights in `dtype`. The files are read tensor by
    tensor, so that memory holds the model and one tensor more.

    Raises `ModelError` that names the setting or tensor when the folder holds anything that the decoder cannot express
    exactly, or when files are missing, damaged or contradict each other.
    """
    model, weights = open_model(folder, types=types)
    weights.fill(model, dtype)
    return model


def is_sequence_classifier(folder: Path) -> bool:
    """Returns whether a model folder is for `load_sequence_classifier`. Raises `ModelError` without a `config.json`."""
    return _architecture(folder).endswith(CLASSIFIER)


def _architecture(folder: Path) -> str:
    return str((read_json(folder / "config.json").get("architectures") or [""])[0])


def load_sequence_classifier(folder: Path, *, head: str) -> Decoder:
    """Read the folder of a sequence classification with one label, such as `save_sequence_classifier` and
    `transformers` write, into a decoder with `score.weight` as the module `head` of its `heads`, in FP32. The folder
    lacks an output projection, so the decoder's logits are meaningless.

    Raises `ModelError` as `load_model` does, and for a folder of another kind.
    """
    architecture = _architecture(folder)
    if not architecture.endswith(CLASSIFIER):
        raise ModelError(
            f"{folder}: holds a {architecture or 'model of unknown kind'}, not a sequence classification; give the "
            "folder of a reward model"
        )
    # Tied, so that no lm_head is wanted: the classifier's folder has score.weight in its place
    config = replace(load_config(folder), tie_embeddings=True)
    score = f"{SCORE}.weight"
    model, weights = _open(config, folder, HF_TYPES, {score: torch.Size((1, config.model_dim))})
    weights.fill(model, torch.float32)
    model.heads[head] = nn.Linear(config.model_dim, 1, bias=False)
    set_parameter(model, f"heads.{head}.weight", weights.stored.read(score).float())
    return model


def deferred_model(folder: Path) -> Decoder:
    """Returns a decoder whose weights stay in the folder, which must not change, until it is laid out for training.
    Raises `ModelError` as `load_model` does; damaged weights are noticed only when they are read.
    """
    model, weights = open_model(folder)
    model.stored = weights
    return model


def stored_dtype(folder: Path) -> torch.dtype:
    """Number format of a folder's weights. Raises `ModelError` if a file is missing or damaged."""
    return StoredWeights(folder).dtype


@dataclass(frozen=True)
class ParameterSource:
    """Location of a parameter: rows from `first_row` on of a tensor that may hold several parameters."""

    tensor: str
    first_row: int = 0


@dataclass(frozen=True)
class FolderWeights:
    """Weights of a folder under this project's names."""

    stored: StoredWeights
    sources: Mapping[str, ParameterSource]

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read the part of a parameter that bounded slices of its dimensions select, in the format of the file."""
        source, rows = self.sources[name], part[0]
        rows = slice(rows.start + source.first_row, rows.stop + source.first_row)
        return self.stored.read(source.tensor, (rows, *part[1:]))

    def fill(self, model: Decoder, dtype: torch.dtype) -> None:
        """Replace all parameters of a model, one tensor at a time."""
        for name, parameter in list(model.named_parameters()):
            whole = tuple(slice(0, length) for length in parameter.shape)
            set_parameter(model, name, self.read(name, whole).to(dtype))


def open_model(folder: Path, *, types: Sequence[HfType] = HF_TYPES) -> tuple[Decoder, FolderWeights]:
    """Returns a decoder on the meta device and its weights, unread so far. Raises `ModelError` as `load_model` does."""
    return _open(load_config(folder, types=types), folder, types, {})


def _open(
    config: ModelConfig, folder: Path, types: Sequence[HfType], further: Mapping[str, torch.Size]
) -> tuple[Decoder, FolderWeights]:
    """further: shapes of other tensors that the folder must have."""
    with torch.device("meta"):
        model = Decoder(config)
    stored = StoredWeights(folder)
    # Old folders of transformers store rotary frequencies, and some tied ones a copy of the embedding as lm_head
    shapes = {name: tensor.shape for name, tensor in stored.tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        shapes.pop("lm_head.weight", None)
    wanted = dict(further)
    sources: dict[str, ParameterSource] = {}
    for tensor, names in hf_tensors(model, type_of(config, types)).items():
        parts = [model.get_parameter(name).shape for name in names]
        wanted[tensor] = torch.Size((sum(shape[0] for shape in parts), *parts[0][1:]))
        for place, name in enumerate(names):
            sources[name] = ParameterSource(tensor, sum(shape[0] for shape in parts[:place]))
    check_tensors(folder, wanted=wanted, stored=shapes)
    return model, FolderWeights(stored, sources)


def set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter."""
    place, _, own = name.rpartition(".")
    module = model.get_submodule(place)
    setattr(module, own, nn.Parameter(value, requires_grad=module.get_parameter(own).requires_grad))


def load_config(folder: Path, *, types: Sequence[HfType] = HF_TYPES) -> ModelConfig:
    """Read the shape that a folder's `config.json` describes. Raises `ModelError` as `load_model` does."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; give the path of a model folder in the Hugging Face layout")
    path = folder / "config.json"
    return config_from_hf(read_json(path), source=str(path), types=types)


def type_of(config: ModelConfig, types: Sequence[HfType] = HF_TYPES) -> HfType:
    """Returns the type that a model is written as. Raises `ConfigError` if it is not in the table."""
    name, by_name = config.hf_type or _plain_type(config), {one.name: one for one in types}
    if name not in by_name:
        raise ConfigError(f"hf_type: {name!r} is unknown; choose from {', '.join(by_name)}")
    return by_name[name]


def _plain_type(config: ModelConfig) -> str:
    """Returns the type of a model that was not read from a folder."""
    if config.attention_gate != "none" or config.head_budget < 1.0:
        return OWN_TYPE
    return "qwen3" if config.qk_norm else "llama"


def hf_config(config: ModelConfig, types: Sequence[HfType] = HF_TYPES) -> dict[str, Any]:
    """Hugging Face `config.json` of a decoder of this shape. Raises `ConfigError` if its type cannot express it."""
    chosen = type_of(config, types)
    written = {"architectures": [chosen.architecture], "model_type": chosen.name, **chosen.write(config)}
    # Reading back what was written finds every feature that the type lacks, without a list of them for each type
    if config_from_hf(written, types=types) != config:
        raise ConfigError(
            f"hf_type: a {chosen.name} cannot have all features of this model; set the type that has them"
        )
    return written


def config_from_hf(
    data: Mapping[str, Any], *, source: str = "config.json", types: Sequence[HfType] = HF_TYPES
) -> ModelConfig:
    """Convert a Hugging Face config to the decoder's shape; missing keys get the defaults of `transformers`.

    Raises `ModelError` naming the setting that the decoder cannot express.
    """
    settings = HfSettings(data, source)
    kind = data.get("model_type")
    if kind == LLAVA:
        raise ModelError(
            f"{source}: model_type is {kind!r}, a model that reads images; it can be served, and its language model "
            "is that of the stage before"
        )
    chosen = next((one for one in types if one.name == kind), None)
    if chosen is None:
        known = ", ".join(one.name for one in types)
        raise ModelError(f"{source}: model_type is {kind!r}, which cannot be loaded; known are {known}")
    settings.refuse_if_set(
        num_experts="a mixture of experts",
        num_local_experts="a mixture of experts",
        quantization_config="quantized weights",
    )
    try:
        config = ModelConfig(**chosen.read(settings))
        return config if _plain_type(config) == chosen.name else replace(config, hf_type=chosen.name)
    except ModelError:
        raise
    except ConfigError as error:
        raise ModelError(f"{source}: {error}") from None
    except KeyError as error:
        raise ModelError(f"{source}: {error.args[0]!r} is missing, so the model is not complete") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{source}: a size is not a number ({error})") from None


def hf_tensors(model: Decoder, chosen: HfType) -> dict[str, list[str]]:
    """Names of this project's parameters that each tensor of a folder holds, by rows, without heads and adapters."""
    tensors: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        if not name.startswith("heads.") and ADAPTER not in name:
            tensors.setdefault(hf_name(name, chosen), []).append(name)
    return tensors


def hf_name(name: str, chosen: HfType) -> str:
    """Name of a parameter's tensor: `blocks.0.ffn.up_proj.weight` -> `model.layers.0.mlp.up_proj.weight`."""
    if not name.startswith("blocks."):
        part, rest = name.split(".", 1)
        return f"{_TOP_NAMES[part]}.{rest}"
    _, layer, place = name.split(".", 2)
    module, _, own = place.rpartition(".")
    for fused, parts in chosen.fused.items():
        if module in parts:
            return f"model.layers.{layer}.{fused}.{own}"
    part, dot, rest = module.partition(".")
    return f"model.layers.{layer}.{chosen.block_names[part]}{dot}{rest}.{own}"


def hf_weights(model: Decoder, types: Sequence[HfType] = HF_TYPES) -> dict[str, Tensor]:
    """Tensors under Hugging Face names. Raises `ConfigError` for a model with adapters, which a folder would lack."""
    if model.adapters.r:
        raise ConfigError("lora: the model has adapters; merge them (merge_adapters) before it is written")
    weights, tensors = dict(model.named_parameters()), dict[str, Tensor]()
    for tensor, names in hf_tensors(model, type_of(model.config, types)).items():
        # Tensors that hold several projections are copies
        parts = [weights[name].detach() for name in names]
        tensors[tensor] = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
    return tensors


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, whole or not at all. Raises `StorageError` if writing fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        # On disk before the rename: after a crash the name must not point to a file whose content was never written
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except SafetensorError as error:
        raise StorageError(f"{path}: cannot be written ({error}); free some space and run again") from error
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)
