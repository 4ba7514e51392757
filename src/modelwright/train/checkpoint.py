"""Checkpoints: everything that a run needs to go on as if nothing had happened, written beside the training.

<folder>/step-00000123/model.safetensors      weights by parameter name
                       training.safetensors   all other tensors: optimizer, updates, controllers, transport
                       state.json             the rest: step, best so far, scalars; tensors as {"$tensor": name},
                                              non-finite floats as {"$float": text}
                       manifest.json          sizes and SHA-256, written last
<folder>/best.json                            the checkpoint with the lowest held-out loss

A checkpoint is whole or absent. Whole ones hold no rank and no microbatch, so that they load under any number of
either. Only JSON and safetensors are read: loading runs no code. Knows nothing about what the tensors mean.
"""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelwright.core.artifacts import read_manifest, write_artifact, write_atomic
from modelwright.core.errors import ArtifactError, StorageError, writing

KIND = "checkpoint"
_TENSOR, _FLOAT = "$tensor", "$float"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What one checkpoint holds. `weights`: by parameter name; `state`: nested dicts and lists of tensors and JSON."""

    step: int
    weights: Mapping[str, Tensor]
    state: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Best:
    """The lowest held-out loss so far; step 0 while there is none."""

    step: int = 0
    loss: float = float("inf")


class Checkpoints:
    """The checkpoints of one run; one writer at a time (the first rank).

    `save` copies to host memory and returns; a thread writes. What goes wrong there is raised by the next `save`,
    `poll` or `close`. `keep_last` whole checkpoints stay, and the best ones that they refer to.
    """

    def __init__(self, folder: Path, *, keep_last: int, digest: str) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.digest = digest
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def prepare(self) -> None:
        """Make the folder and remove what a killed process left half-written."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in [*self.folder.glob("step-*.partial"), *self.folder.glob("step-*.old")]:
                shutil.rmtree(leftover, ignore_errors=True)

    def latest(self, note: Callable[[str], None]) -> Snapshot | None:
        """The newest checkpoint that is whole, or None when there is none.

        A damaged one is set aside as `*.damaged` and told to `note`; the one before is taken. Raises
        `ArtifactError` when a checkpoint was made by another configuration.
        """
        for path in reversed(list_checkpoints(self.folder)):
            try:
                return read_checkpoint(path, digest=self.digest)
            except DamagedCheckpointError as error:
                note(f"{error}; going back to the checkpoint before it")
                aside = path.with_name(path.name + ".damaged")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(path, aside)
        return None

    def read(self, step: int) -> Snapshot:
        """The checkpoint at `step`, which another rank has found whole."""
        return read_checkpoint(self.folder / _name(step), digest=self.digest)

    def save(self, snapshot: Snapshot, *, best: Best) -> None:
        """Copy the snapshot to host memory and have it written, after an earlier one that is still being written."""
        self.wait()
        tensors: dict[str, Tensor] = {}
        state = _split(dict(snapshot.state), "", tensors)
        weights = {name: _host_copy(tensor) for name, tensor in snapshot.weights.items()}
        self._pending = self._writer.submit(self._write, snapshot.step, weights, tensors, state, best)

    def poll(self) -> None:
        """Raise what the writer met, without waiting for it."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint being written; raises `StorageError` when it could not be."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Let the writer finish and end it; what it met is not raised here."""
        self._writer.shutdown(wait=True)

    def write_best(self, best: Best) -> None:
        """Point `best.json` at a checkpoint; takes the pointer away when there is no best one yet."""
        if best.step:
            record = {"step": best.step, "loss": best.loss, "folder": _name(best.step)}
            write_atomic(self.folder / "best.json", json.dumps(record))
        else:
            (self.folder / "best.json").unlink(missing_ok=True)

    def _write(
        self, step: int, weights: dict[str, Tensor], tensors: dict[str, Tensor], state: dict[str, Any], best: Best
    ) -> None:
        with write_artifact(self.folder / _name(step), kind=KIND, digest=self.digest) as draft:
            _save_tensors(weights, draft.path / "model.safetensors")
            _save_tensors(tensors, draft.path / "training.safetensors")
            (draft.path / "state.json").write_text(json.dumps({"step": step, "state": state}), encoding="utf-8")
            draft.facts.update(step=step, best_step=best.step)
        self.write_best(best)
        self._prune()

    def _prune(self) -> None:
        paths = list_checkpoints(self.folder)
        last = paths[-self.keep_last :]
        wanted = {path.name for path in last} | {_name(_best_step(path)) for path in last}
        old = [path for path in paths if path.name not in wanted]
        for path in [*old, *self.folder.glob("step-*.damaged")]:
            shutil.rmtree(path, ignore_errors=True)


class DamagedCheckpointError(ArtifactError):
    """A checkpoint's files are missing, cut off or changed."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were finished, oldest first; their content is not checked."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def read_checkpoint(path: Path, *, digest: str) -> Snapshot:
    """Read one checkpoint with its tensors on the CPU, after checking every file's SHA-256.

    Raises `DamagedCheckpointError`, or `ArtifactError` when it was made under another `digest`.
    """
    try:
        manifest = read_manifest(path, kind=KIND, verify=True)
    except (ArtifactError, OSError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged ({error})") from None
    if manifest.digest != digest:
        raise ArtifactError(
            f"{path}: was made by another configuration or from other inputs; remove {path.parent} to start afresh, "
            "or run in another run directory"
        )
    try:
        record = json.loads((path / "state.json").read_text(encoding="utf-8"))
        state = _join(record["state"], load_file(path / "training.safetensors"))
        return Snapshot(step=record["step"], weights=load_file(path / "model.safetensors"), state=state)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged ({error})") from None


def read_best(folder: Path) -> Best:
    """What `best.json` points at; step 0 when there is none or its checkpoint is gone."""
    try:
        record = json.loads((folder / "best.json").read_text(encoding="utf-8"))
        best = Best(step=record["step"], loss=record["loss"])
    except (OSError, ValueError, KeyError):
        return Best()
    return best if (folder / _name(best.step)).is_dir() else Best()


def read_weights(folder: Path, step: int) -> dict[str, Tensor]:
    """The weights of the checkpoint at `step`, on the CPU. Raises `ArtifactError` when it is missing or damaged."""
    path = folder / _name(step)
    read_manifest(path, kind=KIND, verify=True)
    return load_file(path / "model.safetensors")


def _best_step(path: Path) -> int:
    try:
        return int(read_manifest(path).facts["best_step"])
    except (ArtifactError, KeyError):
        return 0


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _split(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with every tensor replaced by its name; host copies of the tensors go into `tensors`."""
    if isinstance(tree, Tensor):
        tensors[name] = _host_copy(tree)
        return {_TENSOR: name}
    if isinstance(tree, Mapping):
        return {key: _split(value, f"{name}/{key}" if name else key, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_split(value, f"{name}/{i}", tensors) for i, value in enumerate(tree)]
    if isinstance(tree, float) and not math.isfinite(tree):
        return {_FLOAT: str(tree)}
    return tree


def _join(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if set(tree) == {_TENSOR}:
            return tensors[tree[_TENSOR]]
        if set(tree) == {_FLOAT}:
            return float(tree[_FLOAT])
        return {key: _join(value, tensors) for key, value in tree.items()}
    return [_join(value, tensors) for value in tree] if isinstance(tree, list) else tree


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """`save_file`, with its own I/O error turned back into the operating system's, which `writing` understands."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise StorageError(f"{path}: cannot be written ({error}); choose another --run-dir") from error
        code = int(found.group(1))
        raise OSError(code, os.strerror(code) if code in errno.errorcode else str(error), str(path)) from error
