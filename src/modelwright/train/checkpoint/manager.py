"""`CheckpointManager` saves the state of a run when due, and resumes a run from it under any layout.

The optimizer's state is stored by parameter name, so that it fits any order or grouping of parameters. An objective's
state is equal on all ranks, except for tensors under the key `rows`, such as a rollout that several steps learn from:
their first dimension is the rows of this data rank, and in a checkpoint those of the global batch.
"""

import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.ops.dtensor import as_dtensor_like, local
from modelwright.parallel.mesh import World
from modelwright.parallel.strategy import Replica
from modelwright.train.checkpoint.files import Best
from modelwright.train.checkpoint.reader import CheckpointReader
from modelwright.train.checkpoint.writer import CheckpointWriter, Snapshot
from modelwright.train.job import StepParts, TrainJob, TrainState
from modelwright.train.technique import Rollback


def load_optimizer_state(optimizer: Optimizer, names: Mapping[Tensor, str], state: Mapping[str, Any]) -> None:
    """Restore tensors and scalars by parameter name, on the parameters' devices and in their dtypes."""
    for parameter, name in names.items():
        if name not in state:
            continue
        values = dict(state[name])
        for key, value in values.items():
            if isinstance(value, Tensor) and key == "step":
                values[key] = value.to(parameter.device)  # not in the parameter's dtype: BF16 counts to 256 only
            elif isinstance(value, Tensor):
                values[key] = as_dtensor_like(value, local(value).to(local(parameter).device, parameter.dtype))
        optimizer.state[parameter] = values


@contextmanager
def reading_state() -> Generator[None]:
    """Convert errors caused by a state of another form into one clear error."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelwrightError(
            f"the checkpoint's state has another form than this version expects ({error!r}); finish the run with "
            "the version that started it, or start a new one with another --run-dir"
        ) from error


ROWS = "rows"


def gather_rows(state: Mapping[str, Any], data: World) -> dict[str, Any]:
    """The state with the rows of all data ranks, in order. Collective; each rank passes the same number of rows."""
    rows = state.get(ROWS, {})
    whole = {name: data.all_gather(values.to(data.device)).flatten(0, 1).cpu() for name, values in rows.items()}
    return {**state, ROWS: whole} if rows else dict(state)


def own_rows(state: Mapping[str, Any], data: World) -> dict[str, Any]:
    """The state with this rank's rows. Raises `ConfigError` if the ranks cannot divide them equally."""
    own: dict[str, Tensor] = {}
    for name, values in state.get(ROWS, {}).items():
        share, rest = divmod(len(values), data.size)
        if rest:
            raise ConfigError(
                f"parallel: the checkpoint has {len(values)} rows of {name}, which {data.size} data ranks cannot "
                "divide equally; resume with another number of processes"
            )
        own[name] = values[data.rank * share : (data.rank + 1) * share].clone()
    return {**state, ROWS: own} if own else dict(state)


@dataclass(kw_only=True)
class CheckpointManager:
    """Saves and restores one job under one layout. All ranks call the same methods in the same order."""

    job: TrainJob
    parts: StepParts
    state: TrainState
    """Progress of the run, which the trainer advances."""
    note: Callable[[str], None]
    """Shows a line to the user."""
    replica: Replica = field(init=False)
    reader: CheckpointReader = field(init=False)
    writer: CheckpointWriter = field(init=False)
    saved: tuple[int, int] = (0, 0)
    """Steps done and steps evaluated when the state was saved last."""
    saved_time: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.replica = self.parts.run.replica
        mesh, folder = self.parts.run.global_mesh, self.job.stage.checkpoints
        self.reader = CheckpointReader(folder, digest=self.job.input_digest, world=mesh.world, reduce=mesh.reduce)
        self.writer = CheckpointWriter(self.reader, keep_last=self.job.config.keep_last)
        self.replica.optimizer.register_step_pre_hook(self.writer.hold_changes)

    def due(self) -> bool:
        """True if a checkpoint is saved at this step."""
        every = self.job.config.checkpoint_every_steps
        is_best = self.job.config.keep_best and 0 < self.state.step == self.state.best_step
        return self.state.step == self.job.num_steps or is_best or (every > 0 and self.state.step % every == 0)

    def minutes_due(self) -> bool:
        """True if a checkpoint is due by this rank's clock. Clocks differ, so the ranks vote on it."""
        minutes = self.job.config.checkpoint_every_minutes
        return self.state.step > 0 and 0 < minutes * 60 <= time.monotonic() - self.saved_time

    def save(self) -> float | None:
        """Pass the state to the writer, unless it already has it; every rank writes its part. Returns the seconds for
        which training paused, None if there was nothing to save.
        """
        # Also if nothing is saved: a clock that stays due would ask all ranks for a checkpoint after every step.
        self.saved_time = time.monotonic()
        if not self.job.is_resumable or self.saved == (self.state.step, self.state.evaluated_step):
            return None
        self.saved = (self.state.step, self.state.evaluated_step)
        started = time.perf_counter()
        pinned = [step for technique in self.parts.techniques for step in technique.pinned_checkpoints()]
        self.writer.save(self.snapshot(), best=self.best(), also=pinned)
        return time.perf_counter() - started

    def resume(self) -> int:
        """Resume from the newest intact checkpoint, whatever layout and number of ranks wrote it; returns its step, 0
        without one.

        All ranks read their shards of it (the run directory is shared); without one, all replicas start with the first
        replica's weights.
        """
        self.reader.prepare()
        step = self.reader.latest_step(self.note, restart=self.job.restart)
        if step:
            self.load_state_dict(self.load(step))
            best_step = self.state.best_step
            if self.job.config.keep_best and best_step and not self.reader.is_whole(best_step):
                # Without its checkpoint the lowest held-out loss is useless: the next evaluation starts afresh.
                aside = self.reader.set_aside(best_step)
                kept = f"is damaged; it is kept as {aside}" if aside else "is gone"
                self.note(
                    f"the checkpoint of the best step, {best_step}, {kept}; tracking of the best checkpoint restarts "
                    "from here"
                )
                self.state.best_step, self.state.best_loss = 0, math.inf
            self.note(f"resuming from step {step} of {self.job.num_steps}")
        elif self.parts.run.global_mesh.is_only_data_parallel:
            for weight in self.replica.model.state_dict().values():
                self.parts.run.global_mesh.world.broadcast(weight)
        self.writer.write_best(self.best())
        return step

    def rollback(self, request: Rollback) -> None:
        """Restore weights and optimizer, not steps and batches, from the first intact checkpoint of the request."""
        self.writer.wait()
        for step in request.steps:
            if self.reader.is_whole(step):
                break
            self.note(f"the checkpoint of step {step}, to which the run was to roll back, is damaged")
            self.reader.set_aside(step)
        else:
            return
        state = self.load(step)
        load_optimizer_state(self.replica.optimizer, self.replica.names, state["optimizer"])
        for technique in self.parts.techniques:
            if technique.belongs_to_weights:
                technique.load_state_dict(state["techniques"][technique.name])
        request.done(step)

    def best(self) -> Best:
        return Best(step=self.state.best_step, loss=self.state.best_loss) if self.job.config.keep_best else Best()

    def snapshot(self) -> Snapshot:
        return Snapshot(
            step=self.state.step,
            weights=self.replica.trained_weights(),
            state=self.state_dict(),
            gradients=list(self.replica.names.values()),
        )

    def load(self, step: int) -> dict[str, Any]:
        """Restore the weights of a checkpoint; returns its state."""
        names, weights = list(self.replica.names.values()), self.replica.trained_weights()
        return self.reader.load(step, weights, gradients=names, note=self.note)

    def state_dict(self) -> dict[str, Any]:
        strategy = self.parts.run.strategy
        return {
            "trainer": dict(vars(self.state)),
            "objective": gather_rows(self.job.objective.state_dict(), strategy.mesh.data),
            "optimizer": {self.replica.names[p]: dict(state) for p, state in self.replica.optimizer.state.items()},
            "techniques": {technique.name: technique.state_dict() for technique in self.parts.techniques},
            "strategy": strategy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint's state; the weights are already in place. Raises `ModelwrightError` for a state that
        another version of this project wrote in another form.
        """
        strategy = self.parts.run.strategy
        with reading_state():
            vars(self.state).update(vars(TrainState(**state["trainer"])))  # in place: the trainer holds it, too
            self.saved = (self.state.step, self.state.evaluated_step)
            self.job.objective.load_state_dict(own_rows(state["objective"], strategy.mesh.data))
            load_optimizer_state(self.replica.optimizer, self.replica.names, state["optimizer"])
            for technique in self.parts.techniques:
                if technique.name in state["techniques"]:  # one that has been switched on since begins afresh
                    technique.load_state_dict(state["techniques"][technique.name])
            if state["strategy"]:  # empty when it does not fit this layout: it starts afresh
                strategy.load_state_dict(state["strategy"])
