"""Decoders in the Hugging Face layout: the only format in which this project keeps weights.

A model folder holds `config.json` (of a type in `hf_types/`), `model.safetensors` or shards with
`model.safetensors.index.json`, and `generation_config.json`. `transformers` reads what `save_model` writes, and
`load_model` reads what `transformers` writes. Nothing is unpickled.

Shapes come from the headers of the safetensors files, so that a folder is checked before any weight is read, one tensor
at a time. The format lacks a checksum: the header, the length of each file, the set of tensors, their shapes and finite
values are checked, but a flipped bit that leaves a finite weight goes unnoticed here. Folders of this project's own
stages have a manifest with SHA-256 digests, which covers every bit.
"""

import functools
import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from modelwright.core.artifacts import StorageError, fsync_folder, write_atomic, writing
from modelwright.core.config import ConfigError, ModelError
from modelwright.model.adapters import ADAPTER
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.hf_types import HF_TYPES
from modelwright.model.hf_types.hf_type import HfSettings, HfType
from modelwright.model.hf_types.own import OWN_TYPE

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point formats by their names in safetensors."""


@dataclass(frozen=True)
class StoredTensor:
    """Tensor described by a file's header."""

    file: Path
    shape: torch.Size
    format: str


class StoredWeights:
    """Tensors of a folder, in one file or in shards. Raises `ModelError` if a file is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        names = [WEIGHTS]  # the single file, or the shards that an index names
        if not (folder / WEIGHTS).is_file():
            if not (folder / WEIGHTS_INDEX).is_file():
                pickled = any(folder.glob("*.bin"))
                hint = "its weights are pickled; save them again with safe_serialization=True"
                raise ModelError(f"{folder}: {WEIGHTS} is missing ({hint if pickled else 'no weights'})")
            weight_map = read_json(folder / WEIGHTS_INDEX).get("weight_map")
            files = cast(dict[str, Any], weight_map) if isinstance(weight_map, dict) else {}
            names = sorted({str(name) for name in files.values()})
        for name in names:
            # A plain file name: an index from the internet must not read files outside the folder
            if Path(name).name != name or not (folder / name).is_file():
                raise ModelError(f"{folder / name}: a shard named in {WEIGHTS_INDEX} is missing; copy the folder again")
        for path in [folder / name for name in names]:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - the library's handle is not a mapping
                    header = file.get_slice(name)
                    self.tensors[name] = StoredTensor(path, torch.Size(header.get_shape()), str(header.get_dtype()))

    @property
    def dtype(self) -> torch.dtype:
        """Narrowest format that holds all weights of the folder."""
        formats = [FORMATS.get(tensor.format, torch.float32) for tensor in self.tensors.values()]
        return functools.reduce(torch.promote_types, formats)

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """Returns a copy of the part of a tensor that slices of its dimensions select, None for all, in the format of
        the file. Raises `ModelError` for tensors of integers and for values that are not finite.
        """
        path, shape = self.tensors[name].file, self.tensors[name].shape
        with _opened(path) as file:
            # A copy: the slice may be a view of the mapped file, which must not stay mapped with the model
            piece = file.get_slice(name)[part or tuple(slice(0, length) for length in shape)].clone()
        if not piece.is_floating_point():
            raise ModelError(
                f"{path}: {name} holds {piece.dtype} instead of floating-point weights; choose another model"
            )
        # One sum instead of a mask as large as the tensor; FP64, because finite FP32 values may overflow an FP32 sum
        if not bool(piece.sum(dtype=torch.float64).isfinite()):
            raise ModelError(f"{path}: {name} has values that are not finite, so the file is damaged; copy it again")
        return piece


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a whole file and its metadata. Raises `ModelError` if it is missing, damaged or not finite."""
    if not path.is_file():
        raise ModelError(f"{path}: no such file; if the weights are pickled, save them again as safetensors")
    with _opened(path) as file:
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata: dict[str, str] = file.metadata() or {}
    for name, tensor in tensors.items():
        if not bool(tensor.sum(dtype=torch.float64).isfinite()):
            raise ModelError(f"{path}: {name} has values that are not finite, so the file is damaged; copy it again")
    return tensors, metadata


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ModelError` if the file is missing, cannot be read or is damaged."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; a model folder in the Hugging Face layout has one") from None
    except OSError as error:
        reason = error.strerror
        raise ModelError(f"{path}: cannot be read ({reason}); name another folder or make it readable") from None
    except ValueError as error:
        raise ModelError(f"{path}: is damaged ({error}); copy the folder again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: is not a JSON object; copy the folder again")
    return cast(dict[str, Any], data)


def check_tensors(folder: Path, *, wanted: Mapping[str, torch.Size], stored: Mapping[str, torch.Size]) -> None:
    """Raise `ModelError` naming the tensors that are missing, surplus or of another shape than the config says."""
    problems = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unknown": sorted(stored.keys() - wanted.keys()),
        "of another shape than config.json says": [
            f"{name} {list(stored[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if stored.get(name, shape) != shape
        ],
    }
    for problem, names in problems.items():
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ModelError(f"{folder}: tensors {problem}: {', '.join(names[:5])}{more}")


@contextmanager
def _opened(path: Path) -> Generator[Any, None, None]:
    try:
        with cast(Any, safe_open(path, framework="pt")) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: is damaged or truncated ({error}); copy the folder again") from None


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
    if config.tie_embeddings and shapes.pop("lm_head.weight", None):
        # A head of its own would be dropped without a word
        head, embedding = (stored.read(f"{_TOP_NAMES[name]}.weight") for name in ("head", "embedding"))
        if not torch.equal(head, embedding):
            raise ModelError(
                f"{folder}: tie_word_embeddings: is true in config.json, but lm_head.weight is not the embedding; "
                "set it to false to keep the head, or delete lm_head.weight"
            )
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
