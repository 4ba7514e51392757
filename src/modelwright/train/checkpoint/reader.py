"""Finds the newest intact checkpoint, and loads from it only the shards of this rank."""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import Tensor

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ArtifactError, writing
from modelwright.parallel.control_plane import ControlPlane
from modelwright.parallel.mesh import World, single
from modelwright.train.checkpoint.files import PARTS, check_checkpoint, list_checkpoints, read_state, step_name
from modelwright.train.checkpoint.in_memory import MemoryCopies
from modelwright.train.checkpoint.sharded_tensors import DamagedCheckpointError, ShardReader, read_index
from modelwright.train.checkpoint.state_tree import UnplaceableError, join, join_transport, optimizer_state, seat

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
        token = self.channel.attempt(self._clear if self.world.is_first else str, what=f"{self.folder}")
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
        return self.channel.attempt(lambda: self._load(path, names, weights, held, note), what=f"loading {path}")

    def set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint, so that nothing reads or deletes it; returns its new name, "" if it is gone."""
        path = self.folder / step_name(step)
        return self.channel.exchange(
            self.channel.attempt(partial(self._set_aside, path), what=f"setting {path} aside"), what=f"{path}"
        )[0]

    def _clear(self) -> str:
        """Creates the folder, or cleans it; returns an identifier that distinguishes it from a removed folder of the
        same name, because copies in memory outlive a folder.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in [*self.folder.glob("step-*.partial"), *self.folder.glob("step-*.old")]:
                shutil.rmtree(leftover, ignore_errors=True)
            if not (self.folder / TOKEN).exists():
                write_atomic(self.folder / TOKEN, secrets.token_hex(8))
            return (self.folder / TOKEN).read_text(encoding="utf-8")

    def _damage(self, path: Path) -> str:
        """The damage in this rank's share of a checkpoint's files, or ""."""
        try:
            check_checkpoint(path, digest=self.digest, part=self.world.rank, num_parts=self.world.size)
        except DamagedCheckpointError as error:
            return str(error)
        return ""

    def _set_aside(self, path: Path) -> str:
        if not self.world.is_first or not path.exists():
            return ""
        names = chain([f"{path.name}.damaged"], (f"{path.name}.damaged-{number}" for number in count(2)))
        name = next(name for name in names if not path.with_name(name).exists())
        with writing(self.folder):
            os.rename(path, path.with_name(name))
        return name

    def _load(
        self,
        path: Path,
        names: set[str],
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        note: Callable[[str], None],
    ) -> dict[str, Any]:
        index, record = read_index(path), read_state(path)
        model, training = (ShardReader(path, index[part]) for part in PARTS)
        # The ranks together must hold all of them: a weight that is left out would silently keep its initial values.
        for name in sorted(names ^ set(model.entries)):
            raise ArtifactError(f"{path}: {name} is in {'the model' if name in names else 'the checkpoint'} only")
        for name, weight in weights.items():
            model.read_into(name, weight)
        tree = record["state"]
        optimizer = tree.pop("optimizer", None)  # laid out like its parameters, where all else is read whole
        state = join(tree, training.read)
        if optimizer is not None:
            state["optimizer"] = optimizer_state(optimizer, training, weights)
        if record["strategy"]:
            at = seat(self.reduce.rank, self.reduce.size, gradients)
            try:
                state["strategy"] = join_transport(record["strategy"], training, at, gradients)
            except UnplaceableError as error:
                note(f"{path}: the strategy's state {error} does not fit this layout; the strategy starts afresh")
                state["strategy"] = {}
        return state
