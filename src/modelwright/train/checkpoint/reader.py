"""Finds the newest intact checkpoint, on disk or in the memory of the hosts, and loads from it only this rank's shards.

A copy in memory serves fast recovery when a process or a host is lost. It is a checkpoint folder in an in-memory file
system, which outlives the processes: each rank's files are on its own host and on that of another rank. Unless two
neighbors are lost together, the remaining hosts have all of it. They exchange missing files and read the copy like a
checkpoint on disk.
"""

import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelwright.core.artifacts import ArtifactError, write_atomic, writing
from modelwright.parallel.control_plane import ControlPlane
from modelwright.parallel.mesh import World, single
from modelwright.train.checkpoint.files import (
    INDEX,
    PARTS,
    STATE,
    DamagedCheckpointError,
    ShardReader,
    check_checkpoint,
    list_checkpoints,
    piece_of,
    read_index,
    read_state,
    step_name,
)
from modelwright.train.checkpoint.state_tree import UnplaceableError, join, join_transport, optimizer_state, seat

NUM_KEPT = 2
"""The newest copy may be incomplete somewhere when a host goes; then the one before is taken."""


class MemoryCopies:
    """The copies of one run on this host. Every rank creates one and calls the same methods in the same order. root: a
    folder in memory, separate on each host; key: identifies this run.
    """

    def __init__(self, root: Path, key: str, channel: ControlPlane) -> None:
        self.host = f"{socket.gethostname()}:{root}"
        name = hashlib.sha256(f"{self.host}:{key}".encode()).hexdigest()[:16]
        self.folder = root / f"modelwright-{name}"
        self.channel = channel

    def write(self, step: int, files: Mapping[str, bytes], index: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Store this rank's files here and on its peer; index and record (equal on all ranks) everywhere."""
        what = f"copying step {step} to memory"
        folder = self.folder / step_name(step)
        partial = folder.with_name(f"{folder.name}.partial")
        hosts, names = zip(
            *self.channel.exchange((self.host, {name: len(data) for name, data in files.items()}), what=what),
            strict=True,
        )
        pairs = peers(hosts)
        received = self.channel.move(
            [
                (torch.frombuffer(bytearray(data), dtype=torch.uint8), to)
                for source, to in pairs
                if source == self.channel.rank
                for data in files.values()
            ],
            [(size, source) for source, to in pairs if to == self.channel.rank for size in names[source].values()],
            what=what,
        )
        others = [name for source, to in pairs if to == self.channel.rank for name in names[source]]

        def store() -> None:
            with writing(partial):
                partial.mkdir(parents=True, exist_ok=True)
                for name, data in files.items():
                    (partial / name).write_bytes(data)
                for name, tensor in zip(others, received, strict=True):
                    tensor.numpy().tofile(partial / name)
                if self._speaks(hosts):
                    (partial / INDEX).write_text(json.dumps(index), encoding="utf-8")
                    (partial / STATE).write_text(json.dumps(record), encoding="utf-8")

        # Every rank has stored its files once `attempt` returns, so the name without .partial means a whole folder.
        self.channel.attempt(store, what=what)
        if self._speaks(hosts):
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            for old in [*self._steps()[:-NUM_KEPT], *self.folder.glob("*.partial")]:
                shutil.rmtree(old, ignore_errors=True)

    def newest(self, *, after: int) -> Path | None:
        """The newest complete copy after the step `after`, assembled on this host; or None."""
        # This host's copies: step, digest, names of all files of the copy, and of those intact on this host.
        own: list[tuple[int, str, list[str], list[str]]] = []
        for folder in self._steps():
            step = int(folder.name.removeprefix("step-"))
            if step <= after:
                continue
            try:
                index = read_index(folder)
                digest = hashlib.sha256((folder / INDEX).read_bytes() + (folder / STATE).read_bytes()).hexdigest()
            except (DamagedCheckpointError, OSError):
                continue
            entries = (entry for part in index.values() for entry in part.values())
            names = sorted({piece["file"] for entry in entries for piece in entry["pieces"]})
            readers = [ShardReader(folder, part) for part in index.values()]
            own.append((step, digest, names, [name for name in names if all(one.is_whole(name) for one in readers)]))
        offers = self.channel.exchange((self.host, own), what="looking for copies in memory")
        hosts = [host for host, _ in offers]
        # Copies are told apart by step and digest: hosts may hold states of the same step from different starts. One
        # is usable only if each of its files has an owner, the first rank that holds it undamaged.
        owners: dict[tuple[int, str], dict[str, int]] = {}
        needed: dict[tuple[int, str], list[str]] = {}
        for rank, (_, offer) in enumerate(offers):
            for step, digest, whole, held in offer:
                needed[step, digest] = whole
                for name in held:
                    owners.setdefault((step, digest), {}).setdefault(name, rank)
        complete = [key for key, names in needed.items() if set(names) <= set(owners.get(key, {}))]
        if not complete:
            return None
        key = max(complete)
        folder = self.folder / step_name(key[0])
        local = next((held for step, digest, _, held in own if (step, digest) == key), list[str]())
        # Collective: all ranks enter `any` for each file in the same order, and the broadcast if any of them lacks it.
        for name in [*needed[key], INDEX, STATE]:
            path, what = folder / name, f"gathering {name}"
            lacks = name not in local if name in needed[key] else not local
            if not self.channel.any(lacks, what=what):
                continue
            owner = owners[key].get(name, min(owners[key].values()))
            is_owner = self.channel.rank == owner
            data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) if is_owner else None
            size = max(self.channel.exchange(0 if data is None else data.numel(), what=what))
            data = torch.empty(size, dtype=torch.uint8) if data is None else data
            self.channel.broadcast(data, source=owner, what=what)
            if lacks and self._speaks(hosts) and not is_owner:
                path.parent.mkdir(parents=True, exist_ok=True)
                data.numpy().tofile(path)
        self.channel.exchange(None, what="copies gathered")
        return folder

    def forget(self) -> None:
        """Free the memory."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _speaks(self, hosts: Sequence[str]) -> bool:
        """True for the first rank of its host, which writes the files that its ranks have in common."""
        return hosts.index(self.host) == self.channel.rank

    def _steps(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if path.suffix != ".partial")


def peers(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs (rank, rank that keeps its copy), by the hosts of all ranks: always on another host, in a ring, so that
    each host stores about as much as it owns. Empty with one host.
    """
    # The first ranks of all hosts, then the second ones, ...: neighbors in the ring are mostly on different hosts.
    places = [(hosts[:rank].count(host), hosts.index(host), rank) for rank, host in enumerate(hosts)]
    ring = [rank for *_, rank in sorted(places)]
    pairs: list[tuple[int, int]] = []
    for position, rank in enumerate(ring):
        others = [other for other in ring[position + 1 :] + ring[:position] if hosts[other] != hosts[rank]]
        if others:
            pairs.append((rank, others[0]))
    return sorted(pairs)


ALONE = single()
MEMORY = Path("/dev/shm")
"""A file system in memory that every Linux host has."""
TOKEN = "memory-token"


class CheckpointReader:
    """The checkpoints available to a run. Every rank creates one and calls the same methods in the same order. digest:
    of everything that determines the result of the run; reduce: the ranks among which gradients are summed; memory:
    where copies in the hosts' memory are.
    """

    def __init__(
        self, folder: Path, *, digest: str, world: World = ALONE, reduce: World = ALONE, memory: Path = MEMORY
    ) -> None:
        self.folder = folder
        self.digest = digest
        self.world = world
        self.reduce = reduce
        self.memory = memory
        self.copies: MemoryCopies | None = None
        self.channel = ControlPlane(world)
        self._sources: dict[int, Path] = {}

    def prepare(self) -> None:
        """Create the folder and remove unfinished files of a killed run."""

        def clear() -> str:
            # The token distinguishes the folder from a removed one of the same name, because copies in memory outlive a
            # folder.
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                for leftover in [*self.folder.glob("step-*.partial"), *self.folder.glob("step-*.old")]:
                    shutil.rmtree(leftover, ignore_errors=True)
                if not (self.folder / TOKEN).exists():
                    write_atomic(self.folder / TOKEN, secrets.token_hex(8))
                return (self.folder / TOKEN).read_text(encoding="utf-8")

        token = self.channel.attempt(clear if self.world.is_first else str, what=f"{self.folder}")
        token = self.channel.exchange(token, what=f"{self.folder}")[0]
        self.copies = MemoryCopies(self.memory, f"{self.digest}:{token}", self.channel)

    def latest_step(self, note: Callable[[str], None], *, restart: bool = False) -> int:
        """Returns the step of the newest intact checkpoint, the same on all ranks; 0 without one.

        A copy in memory counts if it is newer than those on disk. The ranks share the verification. Damaged checkpoints
        are reported to `note`, renamed to `*.damaged` and never deleted; the newest intact one before them is used.
        Raises `ArtifactError` if all of them are damaged, unless `restart` asks to start over, and if a checkpoint was
        made with another configuration.
        """
        step, damages = 0, dict[int, str]()
        # All ranks go by the first one's listing: a shared file system may show a new folder to others later.
        for name in reversed(self.channel.exchange([path.name for path in list_checkpoints(self.folder)])[0]):
            path = self.folder / name
            own = self.channel.attempt(partial(self._damage, path), what=f"checking {path}")
            reports: list[str] = self.channel.exchange(own, what=f"checking {path}")
            damage = next((text for text in reports if text), "")
            if not damage:
                step = int(name.removeprefix("step-"))
                break
            damages[int(name.removeprefix("step-"))] = damage
        copy = self.copies.newest(after=step) if self.copies else None
        if copy is not None:
            # The best checkpoint that a copy refers to may have been interrupted while it was written.
            best_step = int(read_state(copy)["best_step"])
            if not self.channel.any(best_step > 0 and not (self.folder / step_name(best_step)).is_dir()):
                step = int(copy.name.removeprefix("step-"))
                self._sources[step] = copy
                note(f"step {step} is in the memory of the hosts")
        if damages and not step and not restart:
            raise ArtifactError(
                f"all checkpoints in {self.folder} are damaged: {'; '.join(damages.values())}; restore a copy of "
                "one of them, or add --restart to start over at step 0 (the damaged ones are kept as *.damaged)"
            )
        for damaged, text in damages.items():
            note(f"{text}; it is kept as {self.set_aside(damaged)}")
        return step

    def is_whole(self, step: int) -> bool:
        """True if the checkpoint of this step is on disk and intact; the ranks share the verification."""
        path = self.folder / step_name(step)
        local = self.channel.attempt(partial(self._damage, path), what=f"checking {path}")
        return not self.channel.any(bool(local), what=f"checking {path}")

    def load(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        *,
        gradients: Sequence[str] = (),
        note: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Any]:
        """Copy the weights of the checkpoint at `step`, verified by `latest_step`, into `weights`, in place; returns
        the state.

        Each rank reads only its own shards. The state under `optimizer` is that of the parameters in `weights`, laid
        out like them; all other tensors are whole, on the CPU. gradients: as in `Snapshot`. Raises `ArtifactError` if
        the checkpoint has other tensors than the ranks hold together.
        """
        path = self._sources.get(step, self.folder / step_name(step))
        names = set[str]().union(*self.channel.exchange(list(weights), what=f"loading {path}"))
        held = {name: weights[name] for name in gradients}

        def copy() -> dict[str, Any]:
            index, record = read_index(path), read_state(path)
            model, training = (ShardReader(path, index[part]) for part in PARTS)
            # The ranks together must hold all of them: a weight that is left out would silently keep its initial
            # values.
            for name in sorted(names ^ set(model.entries)):
                raise ArtifactError(f"{path}: {name} is in {'the model' if name in names else 'the checkpoint'} only")
            for name, weight in weights.items():
                if model.shape(name) != tuple(weight.shape):
                    shapes = f"{list(model.shape(name))}, the model needs {list(weight.shape)}"
                    raise ArtifactError(f"{path}: {name} has shape {shapes}")
                piece = piece_of(weight)
                piece.values.copy_(model.read(name, piece.box))  # detached, so that autograd does not see the change
            tree = record["state"]
            optimizer = tree.pop("optimizer", None)  # laid out like its parameters, where all else is read whole
            state = join(tree, training.read)
            if optimizer is not None:
                state["optimizer"] = optimizer_state(optimizer, training, weights)
            if record["strategy"]:
                at = seat(self.reduce.rank, self.reduce.size, held)
                try:
                    state["strategy"] = join_transport(record["strategy"], training, at, held)
                except UnplaceableError as error:
                    note(f"{path}: the strategy's state {error} does not fit this layout; the strategy starts afresh")
                    state["strategy"] = {}
            return state

        return self.channel.attempt(copy, what=f"loading {path}")

    def set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint, so that nothing reads or deletes it; returns its new name, "" if it is gone."""
        path = self.folder / step_name(step)

        def rename() -> str:
            if not self.world.is_first or not path.exists():
                return ""
            names = chain([f"{path.name}.damaged"], (f"{path.name}.damaged-{number}" for number in count(2)))
            name = next(name for name in names if not path.with_name(name).exists())
            with writing(self.folder):
                os.rename(path, path.with_name(name))
            return name

        return self.channel.exchange(self.channel.attempt(rename, what=f"setting {path} aside"), what=f"{path}")[0]

    def _damage(self, path: Path) -> str:
        """The damage in this rank's share of a checkpoint's files, or ""."""
        try:
            check_checkpoint(path, digest=self.digest, part=self.world.rank, num_parts=self.world.size)
        except DamagedCheckpointError as error:
            return str(error)
        return ""
