"""A checkpoint folder: its finished checkpoints, their integrity, and their tensors.

Tensors of a run that is laid out over processes are saved as shards in safetensors files, and loaded under any layout.
A tensor is plain (whole on every rank that has its name) or a DTensor of which each rank holds a shard. Each shard is
written once, by one of the ranks that hold it; `index.json` records its position in the whole tensor. A reader takes
from each file only the values that its own shard of the tensor needs.

PyTorch's distributed checkpoint with its safetensors writer was tried: it carries DTensors, names that only some ranks
have and 0-dimensional tensors, but a non-tensor value makes a file that no reader opens, a missing file appears as a
tensor of another size, and it has no checksums. Only its intersection of boxes is used here.
"""

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from modelwright.core.artifacts import ArtifactError, describe_file, read_manifest

KIND = "checkpoint"


PARTS = ("model", "training")


INDEX = "index.json"


STATE = "state.json"


class DamagedCheckpointError(ArtifactError):
    """A checkpoint's files are missing, truncated or changed."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The lowest held-out loss so far and its step; step 0 before the first evaluation."""

    step: int = 0
    loss: float = float("inf")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first; their content is not checked."""
    # The glob would also match step-*.partial and step-*.damaged.
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def check_checkpoint(path: Path, *, digest: str, part: int = 0, num_parts: int = 1) -> None:
    """Check that all files exist, and the SHA-256 of every `num_parts`-th from `part` on.

    Raises `DamagedCheckpointError` that names the file (and the tensor, if known), or `ArtifactError` when the
    checkpoint was made under another `digest`.
    """
    try:
        manifest = read_manifest(path, kind=KIND)
        if manifest.digest == digest:
            for file in sorted(manifest.files)[part::num_parts]:
                if describe_file(path / file)["sha256"] != manifest.files[file]["sha256"]:
                    tensor = "" if file == INDEX else _damaged_tensor(path, file)
                    raise DamagedCheckpointError(f"{path / file}: its content does not match the manifest{tensor}")
            if INDEX not in manifest.files:
                raise DamagedCheckpointError(f"{path / INDEX}: is missing")
    except (ArtifactError, OSError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged ({error})") from None
    if manifest.digest != digest:
        raise ArtifactError(
            f"{path}: was made with another configuration or other inputs; remove {path.parent} to start over, or "
            "use another run directory"
        )


def _damaged_tensor(path: Path, file: str) -> str:
    try:
        index = read_index(path)
        names = (ShardReader(path, index[part]).damaged_tensor(file) for part in PARTS)
        return "".join(f"; damaged: {name}" for name in names if name)
    except (DamagedCheckpointError, KeyError, ValueError):
        return ""


def read_weights(folder: Path, step: int) -> dict[str, Tensor]:
    """Returns a checkpoint's whole weights, on the CPU. Raises `ArtifactError` if it is missing or damaged."""
    path = folder / step_name(step)
    read_manifest(path, kind=KIND, verify=True)
    reader = ShardReader(path, read_index(path)["model"])
    return {name: reader.read(name) for name in reader.entries}


def read_index(folder: Path) -> dict[str, Any]:
    """`index.json` of a checkpoint: its parts by name."""
    try:
        return json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{folder / INDEX}: cannot be read ({error})") from None


def read_state(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path / STATE}: cannot be read ({error})") from None


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: "Box") -> "Box":
        """The intersection; its volume is 0 if the boxes are disjoint."""
        first = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        return Box(first, tuple(max(0, end - start) for start, end in zip(first, ends, strict=True)))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """The slices of this box in a tensor that holds `outer`."""
        starts = [local - its for local, its in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class TensorShard:
    """This rank's part of a tensor: its values, its position, and the shape of the whole."""

    values: Tensor
    box: Box
    shape: tuple[int, ...]

    def key(self, name: str) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Equal on two ranks if they hold the same shard of the same tensor."""
        return (name, self.shape, self.box.offset, self.box.shape)


def key_from_json(values: Sequence[Any]) -> tuple[Any, ...]:
    """A tuple of names and of shapes, such as `TensorShard.key`, received from another rank as lists."""
    return tuple(tuple(cast(list[Any], value)) if isinstance(value, list) else value for value in values)


def piece_of(tensor: Tensor) -> TensorShard:
    """This rank's part of a tensor, sharing its memory."""
    if not isinstance(tensor, DTensor):
        return TensorShard(tensor.detach(), whole(tensor.shape), tuple(tensor.shape))
    if any(placement.is_partial() for placement in tensor.placements):
        raise ArtifactError(f"a tensor laid out as {tensor.placements} has pending partial sums and cannot be saved")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    values = tensor.to_local().detach()
    assert tuple(values.shape) == tuple(shape), (values.shape, shape, tensor.placements)
    return TensorShard(values, Box(tuple(offset), tuple(shape)), tuple(tensor.shape))


def share_out(keys: Sequence[Sequence[tuple[Any, ...]]]) -> list[list[int]]:
    """Assigns shards to writers; returns for each rank the positions, in its list, of the shards that it writes. A
    shard that several ranks hold goes to the one with the fewest values so far; every rank computes the same result.
    keys: for each rank, `TensorShard.key` of each of its shards.
    """
    holders: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for rank, held in enumerate(keys):
        for position, key in enumerate(held):
            holders.setdefault(key, []).append((rank, position))
    written: list[list[int]] = [[] for _ in keys]
    load = [0] * len(keys)
    # Largest first balances the writers: small shards even out the loads at the end. The key itself breaks ties.
    for key, places in sorted(holders.items(), key=lambda item: (-math.prod(item[0][-1]), item[0])):
        if math.prod(key[-1]):  # ranks with fewer values than others may hold empty shards, which need no file
            rank, position = min(places, key=lambda place: (load[place[0]], place[0]))
            load[rank] += math.prod(key[-1])
            written[rank].append(position)
    return [sorted(positions) for positions in written]


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a CPU tensor's bytes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # NumPy has no BF16
    return zlib.crc32(flat.numpy().data)


def describe_pieces(file: str, pieces: Mapping[str, TensorShard]) -> dict[str, Any]:
    """Index entries of the shards that were written to `file`."""
    return {
        name: {
            "shape": list(piece.shape),
            "dtype": str(piece.values.dtype).removeprefix("torch."),
            "pieces": [
                {
                    "file": file,
                    "offset": list(piece.box.offset),
                    "shape": list(piece.box.shape),
                    "crc32": checksum(piece.values),
                }
            ],
        }
        for name, piece in pieces.items()
    }


def merge_indexes(indexes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the ranks' indexes into one. Raises `ArtifactError` if shards leave gaps or overlap."""
    merged: dict[str, Any] = {}
    for index in indexes:
        for name, entry in index.items():
            known = merged.setdefault(name, {**entry, "pieces": []})
            if (known["shape"], known["dtype"]) != (entry["shape"], entry["dtype"]):
                raise ArtifactError(f"{name}: has shape {known['shape']} on one rank and {entry['shape']} on another")
            known["pieces"] = [*known["pieces"], *entry["pieces"]]
    for name, entry in merged.items():
        boxes = [Box(tuple(piece["offset"]), tuple(piece["shape"])) for piece in entry["pieces"]]
        # Quadratic, but a tensor has at most one piece for each rank. Disjoint boxes of the right total fill the whole.
        apart = all(a.overlap(b).volume == 0 for i, a in enumerate(boxes) for b in boxes[:i])
        if not apart or sum(box.volume for box in boxes) != math.prod(entry["shape"]):
            raise ArtifactError(f"{name}: the ranks' shards do not make up the whole tensor: {boxes}")
    return merged


@dataclass(eq=False)
class ShardReader:
    """Reads tensors of one checkpoint folder. Raises `DamagedCheckpointError` that names the file."""

    folder: Path
    entries: Mapping[str, Any]
    """One part (`model` or `training`) of the index."""
    _files: dict[str, Any] = field(default_factory=dict[str, Any])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name)["shape"])

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A part of a tensor, or all of it, on the CPU."""
        entry = self._entry(name)
        box = whole(entry["shape"]) if box is None else box
        result = torch.empty(box.shape, dtype=getattr(torch, entry["dtype"]))
        num_found = 0
        for piece in entry["pieces"]:
            held = Box(tuple(piece["offset"]), tuple(piece["shape"]))
            common = held.overlap(box)
            if common.volume:
                result[common.within(box)] = self._slice(piece["file"], name, common.within(held))
                num_found += common.volume
        if num_found != box.volume:
            raise DamagedCheckpointError(f"{self.folder / INDEX}: does not have all of {name}")
        return result

    def is_whole(self, file: str) -> bool:
        """True if all expected tensors are in `file` with their checksums."""
        try:
            return not self.damaged_tensor(file)
        except DamagedCheckpointError:
            return False

    def damaged_tensor(self, file: str) -> str:
        """Name of the first tensor in `file` whose values do not match their checksum, or "". Raises
        `DamagedCheckpointError` if the file is missing or its structure is damaged.
        """
        for name, entry in self.entries.items():
            for piece in entry["pieces"]:
                if piece["file"] == file:
                    held = Box(tuple(piece["offset"]), tuple(piece["shape"]))
                    if checksum(self._slice(file, name, held.within(held))) != piece["crc32"]:
                        return name
        return ""

    def _entry(self, name: str) -> Mapping[str, Any]:
        if name not in self.entries:
            raise ArtifactError(f"{self.folder}: does not contain the tensor {name}; it was written by another model")
        return self.entries[name]

    def _slice(self, file: str, name: str, part: tuple[slice, ...]) -> Tensor:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise DamagedCheckpointError(f"{self.folder / file}: cannot be read ({error})") from None
        try:
            return self._files[file].get_slice(name)[part]
        except SafetensorError as error:
            raise DamagedCheckpointError(f"{self.folder / file}: {name} cannot be read ({error})") from None
