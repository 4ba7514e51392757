"""Checkpoints: everything that a run needs to go on as if nothing had happened, written beside the training.

<folder>/step-00000123/model.safetensors      weights by parameter name
                       training.safetensors   all other tensors: optimizer, updates, controllers, transport
                       index.json             which file holds which part of which tensor, with checksums
                       state.json             the rest: step, best so far, scalars; tensors as {"$tensor": name},
                                              non-finite floats as {"$float": text}
                       manifest.json          sizes and SHA-256, written last
<folder>/best.json                            the checkpoint with the lowest held-out loss

Several processes write one pair of tensor files each, `model-00000-of-00004.safetensors` and so on; a tensor may then
lie in several files. A checkpoint is whole or absent. It loads under any number of processes, any layout and any number
of microbatches. Only JSON and safetensors are read: loading runs no code. Knows nothing about what the tensors mean,
but for two rules on the state: `updates/optimizer/<parameter>` is laid out as that parameter is, and `transport`
differs from rank to rank (`train/state_tree.py`).
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from modelwright.core.artifacts import (
    ArtifactDraft,
    Manifest,
    describe_file,
    read_manifest,
    write_artifact,
    write_atomic,
)
from modelwright.core.errors import ArtifactError, StorageError, writing
from modelwright.parallel.channel import Channel
from modelwright.parallel.mesh import World, single
from modelwright.train.shards import (
    INDEX,
    DamagedCheckpointError,
    Piece,
    ShardReader,
    describe_pieces,
    merge_indexes,
    piece_of,
    read_index,
    share_out,
)
from modelwright.train.state_tree import (
    UnplaceableError,
    join,
    join_transport,
    merge,
    optimizer_state,
    seat,
    split,
    split_transport,
)

__all__ = ["Best", "Checkpoints", "DamagedCheckpointError", "Snapshot", "list_checkpoints", "read_best", "read_weights"]

KIND = "checkpoint"
ALONE = single()
PARTS = ("model", "training")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What one checkpoint holds. `weights`: by parameter name; `state`: nested dicts and lists of tensors and JSON.

    On several ranks: what this rank holds. Tensors are whole or DTensors; a name may be on some ranks only.
    gradients: names of the parameters in the order in which a transport sees their gradients.
    """

    step: int
    weights: Mapping[str, Tensor]
    state: Mapping[str, Any]
    gradients: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Best:
    """The lowest held-out loss so far; step 0 while there is none."""

    step: int = 0
    loss: float = float("inf")


@dataclass(frozen=True)
class _Job:
    """What one rank hands to its writer: the pieces that it writes, on the host, and its state without tensors."""

    step: int
    pieces: Mapping[str, Mapping[str, Piece]]
    tree: Any
    best: Best


class Checkpoints:
    """The checkpoints of one run. Every rank makes one and calls the same methods in the same order.

    `save` copies to host memory and returns; a thread writes. What goes wrong there, on any rank, is raised on every
    rank by the next `save`, `poll` or `wait`. `keep_last` whole checkpoints stay, and the best ones that they refer
    to. reduce: the ranks among which a gradient transport sums.
    """

    def __init__(
        self, folder: Path, *, keep_last: int, digest: str, world: World = ALONE, reduce: World = ALONE
    ) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.digest = digest
        self.world = world
        self.reduce = reduce
        self._channel = Channel(world)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._keys: list[tuple] = []
        self._written: list[int] = []
        self._host: dict[str, Tensor] = {}

    @property
    def failed(self) -> bool:
        """Whether the writer has met something that `wait` will raise."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def prepare(self) -> None:
        """Make the folder and remove what a killed run left half-written."""
        self._channel.attempt(self._clear if self.world.is_first else _nothing, what=f"{self.folder}")

    def latest_step(self, note: Callable[[str], None]) -> int:
        """The step of the newest checkpoint that is whole, the same on all ranks; 0 when there is none.

        The ranks share the checking. A damaged one is set aside as `*.damaged` and told to `note`; the one before is
        taken. Raises `ArtifactError` when a checkpoint was made by another configuration.
        """
        for name in reversed(self._channel.exchange([path.name for path in list_checkpoints(self.folder)])[0]):
            path = self.folder / name
            mine = self._channel.attempt(partial(self._damage, path), what=f"checking {path}")
            found = self._channel.exchange(mine, what=f"checking {path}")
            damage = next(filter(None, found), "")
            if not damage:
                return int(name.removeprefix("step-"))
            note(f"{damage}; going back to the checkpoint before it")
            self._channel.attempt(partial(self._set_aside, path), what=f"setting {path} aside")
        return 0

    def load(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        *,
        gradients: Sequence[str] = (),
        note: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Any]:
        """Copy the weights of the checkpoint at `step`, which `latest_step` has checked, into `weights`, in place;
        return the state.

        Each rank reads just what it holds. The state under `updates/optimizer` is that of the parameters in `weights`,
        laid out like them; all other tensors are whole, on the CPU. gradients: as in `Snapshot`. Raises
        `ArtifactError` when the checkpoint has other tensors than the ranks hold together.
        """
        path = self.folder / _name(step)
        names = set().union(*self._channel.exchange(list(weights), what=f"loading {path}"))
        held = {name: weights[name] for name in gradients}
        return self._channel.attempt(lambda: self._load(path, names, weights, held, note), what=f"loading {path}")

    def latest(self, note: Callable[[str], None]) -> Snapshot | None:
        """The newest whole checkpoint with all its tensors, or None: for one process."""
        step = self.latest_step(note)
        return self.read(step) if step else None

    def read(self, step: int) -> Snapshot:
        path = self.folder / _name(step)
        weights = read_weights(self.folder, step)
        return Snapshot(step=step, weights=weights, state=self._load(path, set(weights), weights, {}, print))

    def save(self, snapshot: Snapshot, *, best: Best) -> None:
        """Copy the snapshot to host memory and have it written, after an earlier one that is still being written."""
        self.wait()
        job = self._copy(snapshot, best)
        self._pending = self._writer.submit(self._write, job)

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
        if not self.world.is_first:
            return
        if best.step:
            record = {"step": best.step, "loss": best.loss, "folder": _name(best.step)}
            write_atomic(self.folder / "best.json", json.dumps(record))
        else:
            (self.folder / "best.json").unlink(missing_ok=True)

    def _clear(self) -> None:
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in [*self.folder.glob("step-*.partial"), *self.folder.glob("step-*.old")]:
                shutil.rmtree(leftover, ignore_errors=True)

    def _damage(self, path: Path) -> str:
        """What is wrong with this rank's share of a checkpoint's files, or nothing."""
        try:
            check_checkpoint(path, digest=self.digest, part=self.world.rank, num_parts=self.world.size)
        except DamagedCheckpointError as error:
            return str(error)
        return ""

    def _set_aside(self, path: Path) -> None:
        if self.world.is_first:
            aside = path.with_name(path.name + ".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)

    def _load(
        self,
        path: Path,
        names: set[str],
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        note: Callable[[str], None],
    ) -> dict[str, Any]:
        index, record = read_index(path), _read_state(path)
        model, training = (ShardReader(path, index[part]) for part in PARTS)
        for name in sorted(names ^ set(model.entries)):
            raise ArtifactError(f"{path}: {name} is in {'the model' if name in names else 'the checkpoint'} only")
        for name, weight in weights.items():
            model.read_into(name, weight)
        tree = record["state"]
        optimizer = tree.get("updates", {}).pop("optimizer", None)
        state = join(tree, training.read)
        if optimizer is not None:
            state["updates"]["optimizer"] = optimizer_state(optimizer, training, weights)
        if record["transport"]:
            at = seat(self.reduce.rank, self.reduce.size, gradients)
            try:
                state["transport"] = join_transport(record["transport"], training, at, gradients)
            except UnplaceableError as error:
                note(f"{path}: the transport's state {error} does not fit this layout; the transport starts afresh")
                state["transport"] = {}
        return state

    def _copy(self, snapshot: Snapshot, best: Best) -> _Job:
        """Host copies of the pieces that this rank is to write."""
        state = dict(snapshot.state)
        transport = state.pop("transport", None)
        tensors: dict[str, Tensor] = {}
        tree: dict[str, Any] = {"state": split(state, "", tensors)}
        pieces = {("model", name): piece_of(tensor) for name, tensor in snapshot.weights.items()}
        pieces |= {("training", name): piece_of(tensor) for name, tensor in tensors.items()}
        if transport is not None:
            gradients = {name: snapshot.weights[name] for name in snapshot.gradients}
            at = seat(self.reduce.rank, self.reduce.size, gradients)
            tree["transport"], found = split_transport(transport, at, gradients)
            pieces |= {("training", name): piece for name, piece in found.items()}
        copies: dict[str, dict[str, Piece]] = {part: {} for part in PARTS}
        for (part, name), piece in self._mine(pieces).items():
            values = self._host_copy(f"{part}/{name}", piece.values)
            copies[part][name] = Piece(values, piece.box, piece.shape)
        return _Job(snapshot.step, copies, tree, best)

    def _mine(self, pieces: dict[tuple[str, str], Piece]) -> dict[tuple[str, str], Piece]:
        """The pieces that this rank writes; settled among the ranks when any rank's pieces have changed."""
        if self.world.size == 1:
            return pieces
        keys = [(part, *piece.key(name)) for (part, name), piece in pieces.items()]
        if self._channel.any(keys != self._keys, what="sharing out a checkpoint"):
            self._keys = keys
            everyone = self._channel.exchange(keys, what="sharing out a checkpoint")
            self._written = share_out(everyone)[self.world.rank]
            self._host = {}
        places = list(pieces)
        return {places[position]: pieces[places[position]] for position in self._written}

    def _host_copy(self, name: str, values: Tensor) -> Tensor:
        """A copy on the host, in the memory of the checkpoint before: fresh pages cost more than the copy."""
        copy = self._host.get(name)
        if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
            pinned = values.is_cuda
            copy = self._host[name] = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
        return copy.copy_(values)

    def _write(self, job: _Job) -> None:
        """Runs in the writer's thread, on every rank."""
        path, what = self.folder / _name(job.step), f"writing checkpoint {job.step}"
        with ExitStack() as stack:
            draft = self._channel.attempt(lambda: self._begin(path, stack), what=what)
            folder = path.with_name(path.name + ".partial")
            index = self._channel.attempt(lambda: self._write_own(folder, job), what=what)
            described = self._channel.exchange((index, job.tree), what=what)
            self._channel.attempt(lambda: self._finish(draft, job, described, stack), what=what)

    def _begin(self, path: Path, stack: ExitStack) -> ArtifactDraft | None:
        if not self.world.is_first:
            return None
        return stack.enter_context(write_artifact(path, kind=KIND, digest=self.digest))

    def _write_own(self, folder: Path, job: _Job) -> dict[str, Any]:
        """This rank's files; returns their part of the index."""
        index = {}
        number = "" if self.world.size == 1 else f"-{self.world.rank:05d}-of-{self.world.size:05d}"
        for part, pieces in job.pieces.items():
            file = f"{part}{number}.safetensors"
            with writing(folder / file):
                _save_tensors({name: piece.values for name, piece in pieces.items()}, folder / file)
                with open(folder / file, "rb") as written:
                    os.fsync(written.fileno())
            index[part] = describe_pieces(file, pieces)
        return index

    def _finish(self, draft: ArtifactDraft | None, job: _Job, described: list[Any], stack: ExitStack) -> None:
        """The first rank writes what all ranks have told, and the manifest last."""
        if draft is None:
            return
        index = {part: merge_indexes([own[part] for own, _ in described]) for part in PARTS}
        trees = [tree for _, tree in described]
        record = {
            "step": job.step,
            "state": merge([tree["state"] for tree in trees]),
            "transport": [tree["transport"] for tree in trees if "transport" in tree],
        }
        with writing(draft.path):
            (draft.path / INDEX).write_text(json.dumps(index), encoding="utf-8")
            (draft.path / "state.json").write_text(json.dumps(record), encoding="utf-8")
            draft.facts.update(step=job.step, best_step=job.best.step, num_ranks=self.world.size)
            stack.close()
        self.write_best(job.best)
        self._prune()

    def _prune(self) -> None:
        paths = list_checkpoints(self.folder)
        last = paths[-self.keep_last :]
        wanted = {path.name for path in last} | {_name(_best_step(path)) for path in last}
        old = [path for path in paths if path.name not in wanted]
        for path in [*old, *self.folder.glob("step-*.damaged")]:
            shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were finished, oldest first; their content is not checked."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))


def check_checkpoint(path: Path, *, digest: str, part: int = 0, num_parts: int = 1) -> None:
    """Check that every file is there, and the SHA-256 of every `num_parts`-th from `part` on.

    Raises `DamagedCheckpointError` that names the file (and the tensor, where that can be told), or `ArtifactError`
    when the checkpoint was made under another `digest`.
    """
    try:
        manifest = read_manifest(path, kind=KIND)
        if manifest.digest == digest:
            _check_files(path, manifest, sorted(manifest.files)[part::num_parts])
    except (ArtifactError, OSError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged ({error})") from None
    if manifest.digest != digest:
        raise ArtifactError(
            f"{path}: was made by another configuration or from other inputs; remove {path.parent} to start afresh, "
            "or run in another run directory"
        )


def read_best(folder: Path) -> Best:
    """What `best.json` points at; step 0 when there is none or its checkpoint is gone."""
    try:
        record = json.loads((folder / "best.json").read_text(encoding="utf-8"))
        best = Best(step=record["step"], loss=record["loss"])
    except (OSError, ValueError, KeyError):
        return Best()
    return best if (folder / _name(best.step)).is_dir() else Best()


def read_weights(folder: Path, step: int) -> dict[str, Tensor]:
    """The whole weights of the checkpoint at `step`, on the CPU, whatever layout wrote it.

    Raises `ArtifactError` when it is missing or damaged.
    """
    path = folder / _name(step)
    read_manifest(path, kind=KIND, verify=True)
    reader = ShardReader(path, read_index(path)["model"])
    return {name: reader.read(name) for name in reader.entries}


def _check_files(path: Path, manifest: Manifest, files: Sequence[str]) -> None:
    for file in files:
        if describe_file(path / file)["sha256"] != manifest.files[file]["sha256"]:
            tensor = "" if file == INDEX else _damaged_tensor(path, file)
            raise DamagedCheckpointError(f"{path / file}: its content does not match the manifest{tensor}")
    if INDEX not in manifest.files:
        raise DamagedCheckpointError(f"{path / INDEX}: is missing")


def _damaged_tensor(path: Path, file: str) -> str:
    try:
        index = read_index(path)
        names = (ShardReader(path, index[part]).damaged_tensor(file) for part in PARTS)
        return "".join(f"; damaged: {name}" for name in names if name)
    except (DamagedCheckpointError, KeyError, ValueError):
        return ""


def _read_state(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path / 'state.json'}: cannot be read ({error})") from None


def _nothing() -> None: ...


def _best_step(path: Path) -> int:
    try:
        return int(read_manifest(path).facts["best_step"])
    except (ArtifactError, KeyError):
        return 0


def _name(step: int) -> str:
    return f"step-{step:08d}"


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
