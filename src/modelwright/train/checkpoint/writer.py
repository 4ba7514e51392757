"""Writes checkpoints, concurrently with training: everything that a run needs to resume exactly.

A checkpoint is written from a copy in host memory, which the next one uses again. On CUDA this memory is pinned, and
what only the optimizer changes, weights and their states, is copied beside the computation, which `hold_changes` makes
wait before it changes them.

<folder>/step-00000123/model.safetensors      weights by parameter name
                       training.safetensors   all other tensors: optimizer, techniques, strategy, objective
                       index.json             which file holds which part of which tensor, with checksums
                       state.json             the rest: step, best so far, scalars; tensors as {"$tensor": name},
                                              non-finite floats as {"$float": text}
                       manifest.json          sizes and SHA-256, written last
<folder>/best.json                            the checkpoint with the lowest held-out loss
<folder>/step-00000123.damaged                one that was found damaged; nothing reads or deletes it any more

Several processes write one pair of tensor files each, `model-00000-of-00004.safetensors` and so on; a tensor may then
be split over several files. A checkpoint is whole or absent. It loads under any number of processes, any layout and any
number of microbatches. Only JSON and safetensors are read: loading runs no code.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save as serialize
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from modelwright.core.artifacts import (
    ArtifactDraft,
    ArtifactError,
    StorageError,
    read_manifest,
    write_artifact,
    write_atomic,
    writing,
)
from modelwright.train.checkpoint.files import (
    INDEX,
    KIND,
    PARTS,
    STATE,
    Best,
    TensorShard,
    describe_pieces,
    key_from_json,
    list_checkpoints,
    merge_indexes,
    piece_of,
    share_out,
    step_name,
)
from modelwright.train.checkpoint.reader import CheckpointReader
from modelwright.train.checkpoint.state_tree import merge, seat, split, split_transport
from modelwright.train.memory.offload import CopyStream


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The contents of a checkpoint. weights: by parameter name; state: nested dicts and lists of tensors and JSON.

    On several ranks: this rank's part. Tensors are whole or DTensors; a name may be on some ranks only. gradients:
    names of the parameters in the order in which their gradients are synchronized.
    """

    step: int
    weights: Mapping[str, Tensor]
    state: Mapping[str, Any]
    gradients: Sequence[str] = ()


@dataclass(frozen=True)
class _Job:
    """A rank's input to its writer thread: the shards that it writes, on the host, and its state without tensors."""

    step: int
    pieces: Mapping[str, Mapping[str, TensorShard]]
    tree: Any
    best: Best
    copied: Any
    """Event of the end of the copies."""
    also: Sequence[int] = ()


class CheckpointWriter:
    """Writes the checkpoints of one run. Every rank creates one and calls the same methods in the same order.

    `save` starts copies to host memory and returns; a thread writes. Whoever changes weights or the optimizer's states
    calls `hold_changes` before. An error of the thread, on any rank, is raised on every rank by the next `save` or
    `wait`. The `keep_last` newest checkpoints are kept, and the others that they refer to. reader: of the same
    checkpoints.
    """

    def __init__(self, reader: CheckpointReader, *, keep_last: int) -> None:
        self.reader = reader
        self.folder = reader.folder
        self.world = reader.world
        self.keep_last = keep_last
        self._channel = reader.channel
        # One thread, because it communicates: all ranks must write their checkpoints in the same order.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._keys: list[tuple[Any, ...]] = []
        self._written: list[int] = []
        self._host: dict[str, Tensor] = {}
        self._copies = CopyStream(self.world.device)
        self._copying: tuple[Any, list[Tensor]] | None = None
        """End of the newest copies, and their sources, which may be freed once the device waits for it."""

    @property
    def failed(self) -> bool:
        """True if the writer has an error that `wait` will raise."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def save(self, snapshot: Snapshot, *, best: Best, also: Sequence[int] = ()) -> None:
        """Start to copy the snapshot to host memory and to write it, once an earlier one is written. also: steps of
        earlier checkpoints that it refers to, which are not removed before it.
        """
        self.wait()  # the copy reuses the host memory that an earlier checkpoint is written from
        job = replace(self._copy(snapshot, best), also=also)
        self._pending = self._writer.submit(self._write, job)

    def keep(self, snapshot: Snapshot, *, best: Best) -> None:
        """Like `save`, but into the hosts' memory, on two hosts if there are two; nothing is written to disk."""
        self.wait()
        copies = self.reader.copies
        assert copies, "the reader's `prepare` comes first"
        job = self._copy(snapshot, best)

        def remember() -> None:
            """Runs in the writer's thread, on every rank."""
            job.copied.synchronize()
            files: dict[str, bytes] = {}
            own: dict[str, Any] = {}
            for part, pieces in job.pieces.items():
                files[self._file(part)] = serialize({name: piece.values for name, piece in pieces.items()})
                own[part] = describe_pieces(self._file(part), pieces)
            what = f"copying step {job.step} to memory"
            index, record = _combine(job, self._channel.exchange((own, job.tree), what=what))
            copies.write(job.step, files, index, record)

        self._pending = self._writer.submit(remember)

    def hold_changes(self, *_: Any) -> None:
        """Let what the device is given from now on wait for the copies of the newest checkpoint; returns at once. Takes
        the arguments of a hook of optimizers.
        """
        if self._copying is not None:
            self._copies.wait(self._copying[0])
            self._copying = None

    def forget(self) -> None:
        """Free the memory of the copies: the run is finished."""
        self.wait()
        if self.reader.copies:
            self.reader.copies.forget()

    def wait(self) -> None:
        """Wait for the checkpoint being written; raises `StorageError` if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Let the writer finish and stop it; its errors are not raised here."""
        self._writer.shutdown(wait=True)

    def write_best(self, best: Best) -> None:
        """Let `best.json` point to a checkpoint, or remove the file while none is the best."""
        if not self.world.is_first:
            return
        if best.step:
            record = {"step": best.step, "loss": best.loss, "folder": step_name(best.step)}
            write_atomic(self.folder / "best.json", json.dumps(record))
        else:
            (self.folder / "best.json").unlink(missing_ok=True)

    def _copy(self, snapshot: Snapshot, best: Best) -> _Job:
        """Copies the shards that this rank writes to the host."""
        state = dict(snapshot.state)
        transport = state.pop("strategy", None)
        tensors: dict[str, Tensor] = {}
        tree: dict[str, Any] = {"state": split(state, "", tensors)}
        pieces = {("model", name): piece_of(tensor) for name, tensor in snapshot.weights.items()}
        pieces |= {("training", name): piece_of(tensor) for name, tensor in tensors.items()}
        if transport is not None:
            gradients = {name: snapshot.weights[name] for name in snapshot.gradients}
            at = seat(self.reader.reduce.rank, self.reader.reduce.size, gradients)
            tree["strategy"], result = split_transport(transport, at, gradients)
            pieces |= {("training", name): piece for name, piece in result.items()}
        if self.world.size > 1:
            # Shards are assigned to writers anew only if those of any rank have changed since the last checkpoint.
            keys = [(part, *piece.key(name)) for (part, name), piece in pieces.items()]
            if self._channel.any(keys != self._keys, what="sharing out a checkpoint"):
                self._keys = keys
                of_all_ranks = self._channel.exchange(keys, what="sharing out a checkpoint")
                all_keys = [[key_from_json(key) for key in held] for held in of_all_ranks]
                self._written = share_out(all_keys)[self.world.rank]
                self._host = {}
            places = list(pieces)
            pieces = {places[position]: pieces[places[position]] for position in self._written}
        copies: dict[str, dict[str, TensorShard]] = {part: {} for part in PARTS}
        parameters = set(snapshot.gradients)
        for (part, name), piece in pieces.items():
            # In the memory of the previous checkpoint's copy, because fresh pages cost more than the copy itself.
            values, copy = piece.values, self._host.get(f"{part}/{name}")
            if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
                copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
                self._host[f"{part}/{name}"] = copy
            copies[part][name] = TensorShard(copy, piece.box, piece.shape)
            if name in parameters if part == "model" else name.startswith("optimizer/"):
                self._copies.start(copy, values)
            else:
                # Buffers, and states of techniques, which the next forward pass may change already
                copy.copy_(values, non_blocking=True)
        self._copying = self._copies.end(), [piece.values for piece in pieces.values()]
        return _Job(snapshot.step, copies, tree, best, self._copying[0])

    def _write(self, job: _Job) -> None:
        """Runs in the writer's thread, on every rank."""
        path, what = self.folder / step_name(job.step), f"writing checkpoint {job.step}"
        artifact = write_artifact(path, kind=KIND, digest=self.reader.digest)
        with ExitStack() as stack:
            # Entering the artifact creates the folder, so other ranks write only once all have passed this attempt.
            draft = self._channel.attempt(
                lambda: stack.enter_context(artifact) if self.world.is_first else None, what=what
            )
            folder = path.with_name(path.name + ".partial")
            index = self._channel.attempt(lambda: self._write_own(folder, job), what=what)
            described = self._channel.exchange((index, job.tree), what=what)
            self._channel.attempt(lambda: self._finish(draft, job, described, stack), what=what)

    def _write_own(self, folder: Path, job: _Job) -> dict[str, Any]:
        """Write this rank's files; returns their part of the index."""
        job.copied.synchronize()
        index: dict[str, Any] = {}
        for part, pieces in job.pieces.items():
            path = folder / self._file(part)
            with writing(path):
                try:
                    save_file({name: piece.values for name, piece in pieces.items()}, path)
                except SafetensorError as error:
                    # `writing` understands the operating system's own error, whose number the text has.
                    result = re.search(r"os error (\d+)", str(error))
                    if result is None:
                        raise StorageError(f"{path}: cannot be written ({error}); choose another --run-dir") from error
                    code = int(result.group(1))
                    text = os.strerror(code) if code in errno.errorcode else str(error)
                    raise OSError(code, text, str(path)) from error
                with open(path, "rb") as written:  # the manifest must not reach the disk before the files
                    os.fsync(written.fileno())
            index[part] = describe_pieces(path.name, pieces)
        return index

    def _file(self, part: str) -> str:
        number = "" if self.world.size == 1 else f"-{self.world.rank:05d}-of-{self.world.size:05d}"
        return f"{part}{number}.safetensors"

    def _finish(self, draft: ArtifactDraft | None, job: _Job, described: list[Any], stack: ExitStack) -> None:
        """On the first rank: write the reports of all ranks, and the manifest last; then remove old checkpoints."""
        if draft is None:
            return
        index, record = _combine(job, described)
        with writing(draft.path):
            (draft.path / INDEX).write_text(json.dumps(index), encoding="utf-8")
            (draft.path / STATE).write_text(json.dumps(record), encoding="utf-8")
            also = list(job.also)
            draft.facts.update(step=job.step, best_step=job.best.step, also=also, num_ranks=self.world.size)
            stack.close()  # writes the manifest and renames the folder
        self.write_best(job.best)
        # The newest checkpoints stay, and those that they refer to. References of the one just written are not read
        # back from it: damage to its files must not cost the older ones.
        paths = list_checkpoints(self.folder)
        last = paths[-self.keep_last :]
        requested = {path.name for path in last}
        requested |= {step_name(step) for step in (job.best.step, *job.also)}
        for path in last:
            with suppress(ArtifactError):
                facts = read_manifest(path).facts  # the best checkpoint then (0: none yet), and pinned ones
                requested |= {step_name(int(step)) for step in (facts.get("best_step", 0), *facts.get("also", ()))}
        for path in paths:
            if path.name not in requested:
                shutil.rmtree(path, ignore_errors=True)


def _combine(
    job: _Job, described: Sequence[tuple[dict[str, Any], dict[str, Any]]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`index.json` and `state.json` merged from all ranks."""
    trees = [tree for _, tree in described]
    record: dict[str, Any] = {
        "step": job.step,
        "best_step": job.best.step,
        "state": merge([tree["state"] for tree in trees]),
        "strategy": [tree["strategy"] for tree in trees if "strategy" in tree],
    }
    return {part: merge_indexes([own[part] for own, _ in described]) for part in PARTS}, record
