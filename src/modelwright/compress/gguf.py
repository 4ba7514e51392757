"""Writes a model folder as one GGUF file, tensor by tensor, so that only one of them is in memory at a time.

Number formats: `f16`, `q8_0` (8 bits, one scale for 32 values) and `q4_0` (4 bits, likewise). Vectors stay in FP32, as
llama.cpp wants them, and a matrix whose rows do not divide into blocks of 32 stays in FP16. In `q4_0` the embedding and
the head have 8 bits, because errors there reach every token.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from modelwright.compress.gguf.architectures import (
    Architecture,
    Value,
    architecture_of,
    rope_tensors,
    settings_of,
    tensor_name,
)
from modelwright.compress.gguf.vocabulary import Vocabulary, read_vocabulary
from modelwright.core.errors import ConfigError, writing
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.hf import FolderWeights, open_model, type_of

GgufFormat = Literal["f16", "q8_0", "q4_0"]
_FILE_TYPES: Mapping[GgufFormat, int] = {"f16": 1, "q8_0": 7, "q4_0": 2}
"""llama.cpp's numbers for the formats of whole files."""
BLOCK = 32
"""Values that share a scale."""
_ENDS = ("token_embd.weight", "output.weight")


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor of the file. `read` returns it in FP32."""

    name: str
    shape: tuple[int, ...]
    format: str
    read: Callable[[], np.ndarray]


def export_gguf(folder: Path, target: Path, *, number_format: GgufFormat, name: str) -> Path:
    """Write the model folder as `target`, atomically; returns it. name: of the model, for display. Raises `ModelError`
    with the setting or the part of the tokenizer for which llama.cpp lacks a counterpart, and `ConfigError` if the
    package `gguf` is not installed.
    """
    try:
        gguf: Any = import_module("gguf")
    except ImportError:
        raise ConfigError("--to gguf: needs the package gguf: pip install 'modelwright[gguf]'") from None
    model, weights = open_model(folder)
    config = model.config
    chosen = architecture_of(config, type_of(config).name, str(folder))
    vocabulary = read_vocabulary(folder, config.vocab_size)
    # Listed before the file is opened: what llama.cpp cannot compute is refused without a trace on disk.
    tensors = list(gguf_tensors(model, weights, chosen, number_format))
    temporary = target.with_name(target.name + ".tmp")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer = gguf.GGUFWriter(temporary, chosen.name)
            # llama.cpp infers facts about the vocabulary from the name: `phi-3` or `phi3` makes it strip white space
            # after special tokens, and fail without the token `</s>`; `modern-bert` changes the token `[MASK]`.
            shown = re.sub(r"(phi|modern)-?(?=3|bert)", r"\1 ", name, flags=re.IGNORECASE)
            writer.add_name(f"Phi-3 {shown}" if vocabulary.strips_like_phi3 else shown)
            writer.add_file_type(_FILE_TYPES[number_format])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            _add_settings(writer, settings_of(config, chosen), chosen.name)
            _add_vocabulary(writer, vocabulary)
            _write_tensors(writer, gguf, tensors)
            # On disk before the rename: a crash must not leave a whole name with half a file.
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    return target


def gguf_tensors(
    model: Decoder, weights: FolderWeights, chosen: Architecture, number_format: GgufFormat
) -> Iterator[GgufTensor]:
    """Yields the tensors of the file in the order of the model's parameters. model: may be on the meta device."""
    for name, factors in rope_tensors(model.config).items():
        values = np.array(factors, dtype=np.float32)
        yield GgufTensor(name=f"{name}.weight", shape=values.shape, format="f32", read=lambda values=values: values)
    parts: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        if not name.startswith("heads."):
            parts.setdefault(tensor_name(name, chosen), []).append(name)
    for target, names in parts.items():
        shapes = [tuple(model.get_parameter(name).shape) for name in names]
        shape = (sum(own[0] for own in shapes), *shapes[0][1:])

        def read(names: Sequence[str] = tuple(names), shapes: Sequence[tuple[int, ...]] = tuple(shapes)) -> np.ndarray:
            rows = [
                stored(weights.read(name, tuple(slice(0, length) for length in own)), name, model.config, chosen)
                for name, own in zip(names, shapes, strict=True)
            ]
            return torch.cat(rows).numpy()

        # Vectors stay in FP32 and rows that do not divide into blocks in FP16; q4_0's ends have 8 bits.
        kind: str = "q8_0" if number_format == "q4_0" and target in _ENDS else number_format
        if number_format != "f16" and shape[-1] % BLOCK:
            kind = "f16"
        yield GgufTensor(name=target, shape=shape, format=kind if len(shape) > 1 else "f32", read=read)


def stored(weight: Tensor, name: str, config: ModelConfig, chosen: Architecture) -> Tensor:
    """Returns a parameter as llama.cpp stores it, FP32: norms with their whole scale, and rows of queries and keys so
    that the dimensions that are rotated together are neighbors.
    """
    weight = weight.float()
    if config.norms.one_plus_weight and "norm" in name.rpartition(".")[0].rpartition(".")[2]:
        weight = weight + 1.0
    if chosen.interleaves and ".q_proj." in name:
        weight = interleaved(weight, config.num_heads)
    if chosen.interleaves and ".k_proj." in name:
        weight = interleaved(weight, config.num_kv_heads)
    return weight.contiguous()


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Reorders the rows of each head, of which (i, i + half) belong together, to 0, half, 1, half + 1, ..."""
    halves = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def _add_settings(writer: Any, settings: Mapping[str, Value], architecture: str) -> None:
    for key, value in settings.items():
        name = f"{architecture}.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, list(cast(Sequence[Any], value)))


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types([int(kind) for kind in vocabulary.kinds])
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    add = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "eot": writer.add_eot_token_id,
        "unknown": writer.add_unk_token_id,
        "padding": writer.add_pad_token_id,
    }
    for name, token_id in vocabulary.special.items():
        add[name](token_id)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_space_prefix(vocabulary.adds_space)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def _write_tensors(writer: Any, gguf: Any, tensors: Sequence[GgufTensor]) -> None:
    """Write the descriptions of all tensors first, then the data, one tensor after another."""
    kinds = {"f32": "F32", "f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[kinds[tensor.format]]
        is_plain = tensor.format in ("f32", "f16")
        shape = tensor.shape if is_plain else gguf.quants.quant_shape_to_byte_shape(tensor.shape, kind)
        dtype = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}.get(tensor.format, np.dtype(np.uint8))
        num_bytes = math.prod(shape) * dtype.itemsize
        writer.add_tensor_info(tensor.name, shape, dtype, num_bytes, raw_dtype=None if is_plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[kinds[tensor.format]]
        writer.write_tensor_data(gguf.quants.quantize(tensor.read(), kind))
    writer.close()
