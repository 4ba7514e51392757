"""Reads a checkpoint folder: its finished checkpoints, their integrity and their contents."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from modelwright.core.artifacts import describe_file, read_manifest
from modelwright.core.errors import ArtifactError
from modelwright.train.checkpoint.sharded_tensors import INDEX, DamagedCheckpointError, ShardReader, read_index

KIND = "checkpoint"
PARTS = ("model", "training")
STATE = "state.json"


@dataclass(frozen=True, kw_only=True)
class Best:
    """The lowest held-out loss so far and its step; step 0 before the first evaluation."""

    step: int = 0
    loss: float = float("inf")


def referred_steps(path: Path) -> list[int]:
    """Steps of other checkpoints that this one refers to: the best one (0: none yet), and pinned ones."""
    try:
        facts = read_manifest(path).facts
    except ArtifactError:
        return []
    return [int(step) for step in (facts.get("best_step", 0), *facts.get("also", ()))]


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


def read_best(folder: Path) -> Best:
    """Returns the checkpoint that `best.json` points to; step 0 if either is missing."""
    try:
        record = json.loads((folder / "best.json").read_text(encoding="utf-8"))
        best = Best(step=record["step"], loss=record["loss"])
    except (OSError, ValueError, KeyError):
        return Best()
    return best if (folder / step_name(best.step)).is_dir() else Best()


def read_weights(folder: Path, step: int) -> dict[str, Tensor]:
    """Returns a checkpoint's whole weights, on the CPU. Raises `ArtifactError` if it is missing or damaged."""
    path = folder / step_name(step)
    read_manifest(path, kind=KIND, verify=True)
    reader = ShardReader(path, read_index(path)["model"])
    return {name: reader.read(name) for name in reader.entries}


def _damaged_tensor(path: Path, file: str) -> str:
    try:
        index = read_index(path)
        names = (ShardReader(path, index[part]).damaged_tensor(file) for part in PARTS)
        return "".join(f"; damaged: {name}" for name in names if name)
    except (DamagedCheckpointError, KeyError, ValueError):
        return ""


def read_state(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path / STATE}: cannot be read ({error})") from None
