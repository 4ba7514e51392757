"""Tensors of a model folder, read one at a time and only on request.

Shapes come from the headers of the safetensors files, so that a folder is checked before any weight is read. The format
lacks a checksum: the header, the length of each file, the set of tensors, their shapes and finite values are checked,
but a flipped bit that leaves a finite weight goes unnoticed here. Folders of this project's own stages have a manifest
with SHA-256 digests, which covers every bit.
"""

import functools
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modelwright.core.errors import ModelError

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
        for path in _weight_files(folder):
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


def _weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: the single one, or the shards that its index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / WEIGHTS_INDEX).is_file():
        pickled = any(folder.glob("*.bin"))
        hint = "its weights are pickled; save them again with safe_serialization=True" if pickled else "no weights"
        raise ModelError(f"{folder}: {WEIGHTS} is missing ({hint})")
    weight_map = read_json(folder / WEIGHTS_INDEX).get("weight_map")
    files = cast(dict[str, Any], weight_map) if isinstance(weight_map, dict) else {}
    names = sorted({str(name) for name in files.values()})
    for name in names:
        # A plain file name: an index from the internet must not read files outside the folder
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelError(f"{folder / name}: a shard named in {WEIGHTS_INDEX} is missing; copy the folder again")
    return [folder / name for name in names]


@contextmanager
def _opened(path: Path) -> Generator[Any, None, None]:
    try:
        with cast(Any, safe_open(path, framework="pt")) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: is damaged or truncated ({error}); copy the folder again") from None
