"""The run of a model under one layout: step by step, and what happens in between: metrics, evaluation, checkpoints,
rollbacks. Read `Trainer.fit`.
"""

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch.optim import Optimizer

from modelwright.core.errors import Stopped
from modelwright.core.progress import Progress
from modelwright.core.records import Recorder
from modelwright.core.rundir import StageDir
from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import Mesh, World
from modelwright.parallel.strategy import Replica
from modelwright.parallel.traffic import Traffic
from modelwright.precision.model import ModelFormats
from modelwright.train.checkpoint.optimizer import load_optimizer_state, optimizer_state_dict, reading_state
from modelwright.train.checkpoint.writer import Best, Checkpoints, Snapshot
from modelwright.train.config import TrainConfig
from modelwright.train.evaluation import heldout_losses
from modelwright.train.monitors.watchdog import Watchdog
from modelwright.train.objective import Batch
from modelwright.train.runner import Executor
from modelwright.train.signals import StopRequest
from modelwright.train.state import TrainResult, TrainState
from modelwright.train.step import TrainStep
from modelwright.train.technique import Relayout, Rollback, StepInfo, Technique
from modelwright.train.techniques.out_of_memory import give_back_memory


class StepMemory(Protocol):
    """Where the tensors of a step are stored."""

    def step(self) -> AbstractContextManager[None]: ...

    def resting(self) -> AbstractContextManager[None]: ...

    def abandon(self) -> None: ...

    def figures(self) -> dict[str, float]: ...


@dataclass(kw_only=True)
class Trainer:
    """The parts of one run under one layout.

    techniques: all of them, monitors too. memory: where the tensors of a step are stored. restart: begin at step 0 when
    all checkpoints are damaged.
    """

    one_step: TrainStep
    config: TrainConfig
    num_steps: int
    replica: Replica
    executor: Executor
    formats: ModelFormats
    everyone: Mesh
    stage: StageDir
    progress: Progress
    heldout: Sequence[Batch]
    techniques: Sequence[Technique]
    checkpoints: Checkpoints
    watchdog: Watchdog
    memory: StepMemory
    restart: bool = False
    traffic: Traffic = field(init=False)
    recorder: Recorder | None = None
    state: TrainState = field(default_factory=TrainState)
    saved: tuple[int, int] = (0, 0)
    saved_time: float = field(default_factory=time.monotonic)

    @property
    def model(self) -> Decoder:
        """What this rank holds of the model."""
        return self.executor.model

    @property
    def world(self) -> World:
        """All processes of the run."""
        return self.everyone.world

    @property
    def optimizer(self) -> Optimizer:
        return self.replica.optimizer

    def fit(self, stop: StopRequest) -> TrainResult | Relayout:
        """Train to the end, or until a technique asks for another layout, after a checkpoint."""
        self.resume()
        self.one_step.strategy.begin(self.state.step, self.num_steps)
        self.model.train()
        give_back_memory(self.world.device)  # what it took to load and to lay out
        self.traffic = Traffic(self.world)
        while True:
            wishes = stop.requested, self.minutes_due(), self.checkpoints.failed
            stopping, minutes_due, failed = map(int, self.world.maxima(*wishes))
            if failed:
                self.checkpoints.wait()  # raises on every rank what the writer met
            if self.evaluation_due() and not stopping:
                self.evaluate()
            if stopping or minutes_due or self.checkpoint_due():
                self.save()
            elif self.copy_due():
                self.checkpoints.keep(self.snapshot(), best=self.best())
            if self.state.step >= self.num_steps:
                break
            if stopping:
                self.finish()
                text = f"stopped after step {self.state.step} of {self.num_steps}; run again to go on from there"
                raise Stopped(text, stopping)
            requests = []
            interrupted = partial(self.interrupted, stop)
            for info in self.one_step.strategy.steps(
                self.measured_step, self.state.step, self.next_stop(), interrupted
            ):
                self.count(info)
                requests += self.report(info)
            for request in requests:
                match request:
                    case Rollback():
                        self.rollback(request)
                    case Relayout():
                        self.save()
                        self.checkpoints.wait()
                        return request
        self.finish()
        return self.result()

    def measured_step(self, step: int) -> StepInfo:
        """Step `step` (from 0), with what it stored and sent."""
        with self.memory.step():
            info = self.one_step(step)
        scalars = {**info.scalars, **self.memory.figures()}
        return replace(info, bytes_sent=self.traffic.bytes_sent(), scalars=scalars)

    def interrupted(self, stop: StopRequest) -> bool:
        """Whether this process wants all of them to come together before `next_stop`."""
        return bool(stop.requested) or self.minutes_due() or self.checkpoints.failed

    def next_stop(self) -> int:
        """The step at which there is something to do for all: evaluation, checkpoint or the end."""
        cadences = (
            self.config.eval_every_steps if self.heldout else 0,
            self.config.checkpoint_every_steps,
            self.config.guards.memory_every_steps,
        )
        return min([self.num_steps, *((self.state.step // every + 1) * every for every in cadences if every)])

    def count(self, info: StepInfo) -> None:
        """Count the step as done."""
        self.state.step = info.step
        self.state.loss = info.loss
        self.state.num_tokens += info.num_tokens
        self.state.train_time_s += info.step_time_s
        self.state.model_flops += info.model_flops

    def report(self, info: StepInfo) -> list[Rollback | Relayout]:
        """Show the step to techniques, metrics and display; returns what techniques ask for."""
        self.watchdog.alive()
        asked = [one.on_step_end(info) for one in self.techniques if info.step % one.every == 0]
        if self.recorder is not None and info.step % self.config.log_every_steps == 0:
            self.recorder.write(info.step, **info.as_record())
        self.progress.advance(
            info.step, loss=info.loss, lr=info.learning_rate, tokens_per_s=info.tokens_per_s, mfu=info.mfu
        )
        return [request for request in asked if request is not None]

    def evaluation_due(self) -> bool:
        """Every n steps and at the end, once: a run that was stopped before evaluating does it when it goes on."""
        if not self.heldout or self.state.step == self.state.evaluated_step:
            return False
        every = self.config.eval_every_steps
        return self.state.step == self.num_steps or (every > 0 and self.state.step % every == 0)

    def evaluate(self) -> None:
        """Held-out losses over the whole set; the best so far is remembered."""
        started = time.perf_counter()
        with self.formats.evaluating(), self.memory.resting():
            losses = heldout_losses(
                self.executor, self.one_step.objective, self.heldout, self.everyone, alive=self.watchdog.alive
            )
        loss = sum(losses.values())
        self.state.evaluated_step, self.state.heldout_loss = self.state.step, loss
        if loss < self.state.best_loss:
            self.state.best_step, self.state.best_loss = self.state.step, loss
        if self.recorder is not None:
            terms = {f"heldout_loss/{name}": value for name, value in losses.items()} if len(losses) > 1 else {}
            took_s = time.perf_counter() - started
            self.recorder.write(self.state.step, heldout_loss=loss, eval_time_s=took_s, **terms)
        self.progress.advance(self.state.step, heldout_loss=loss)

    def minutes_due(self) -> bool:
        minutes = self.config.checkpoint_every_minutes
        return self.state.step > 0 and 0 < minutes * 60 <= time.monotonic() - self.saved_time

    def checkpoint_due(self) -> bool:
        every = self.config.checkpoint_every_steps
        is_best = self.config.keep_best and 0 < self.state.step == self.state.best_step
        return self.state.step == self.num_steps or is_best or (every > 0 and self.state.step % every == 0)

    def save(self) -> None:
        """Hand the state to the checkpoint writer, unless it has it already; every rank writes its part."""
        self.saved_time = time.monotonic()
        if self.saved == (self.state.step, self.state.evaluated_step):
            return
        self.saved = (self.state.step, self.state.evaluated_step)
        started = time.perf_counter()
        pinned = [step for technique in self.techniques for step in technique.pinned_checkpoints()]
        self.checkpoints.save(self.snapshot(), best=self.best(), also=pinned)
        if self.recorder is not None:
            self.recorder.write(self.state.step, checkpoint_stall_s=time.perf_counter() - started)

    def rollback(self, request: Rollback) -> None:
        """Take weights and optimizer from the first of the requested checkpoints that is whole. Steps and batches are
        not counted back."""
        self.checkpoints.wait()
        for step in request.steps:
            if self.checkpoints.is_whole(step):
                break
            self.progress.note(f"the checkpoint of step {step}, to which the run was to roll back, is damaged")
            self.checkpoints.set_aside(step)
        else:
            return
        state = self.load(step)
        load_optimizer_state(self.optimizer, self.replica.names, state["optimizer"])
        for technique in self.techniques:
            if technique.belongs_to_weights:
                technique.load_state_dict(state["techniques"][technique.name])
        request.done(step)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            step=self.state.step,
            weights=self.model.state_dict(),
            state=self.state_dict(),
            gradients=list(self.replica.names.values()),
        )

    def copy_due(self) -> bool:
        """Whether the hosts' memory is to take the state, which is not being written to disk at this step."""
        every = self.config.guards.memory_every_steps
        return every > 0 and self.state.step > 0 and self.state.step % every == 0

    def finish(self) -> None:
        """The run ends on purpose, with its state on disk."""
        self.checkpoints.forget()

    def state_dict(self) -> dict[str, Any]:
        return {
            "trainer": dict(vars(self.state)),
            "objective": self.one_step.objective.state_dict(),
            "optimizer": optimizer_state_dict(self.optimizer, self.replica.names),
            "techniques": {technique.name: technique.state_dict() for technique in self.techniques},
            "strategy": self.one_step.strategy.state_dict(),
        }

    def load(self, step: int) -> dict[str, Any]:
        """Put the weights of a checkpoint in place; return its state."""
        names = list(self.replica.names.values())
        return self.checkpoints.load(step, self.model.state_dict(), gradients=names, note=self.progress.note)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, whatever the layout and number of ranks that wrote it.

        All ranks read their parts of it (the run directory is shared); without one, copies of the model begin with
        the first one's weights.
        """
        self.checkpoints.prepare()
        step = self.checkpoints.latest_step(self.progress.note, restart=self.restart)
        if step:
            self.load_state_dict(self.load(step))
            self.forget_damaged_best()
            self.progress.note(f"going on after step {step} of {self.num_steps}")
        elif self.everyone.is_only_data_parallel:
            for weight in self.model.state_dict().values():
                self.world.broadcast(weight)
        self.checkpoints.write_best(self.best())
        if self.world.is_first:
            self.recorder = Recorder(self.stage.metrics, tensorboard=self.stage.tensorboard, first_step=step + 1)

    def forget_damaged_best(self) -> None:
        """Without its checkpoint the lowest held-out loss is of no use: the next evaluation begins afresh."""
        best_step = self.state.best_step
        if not self.config.keep_best or not best_step or self.checkpoints.is_whole(best_step):
            return
        aside = self.checkpoints.set_aside(best_step)
        kept = f"is damaged; it is kept as {aside}" if aside else "is gone"
        self.progress.note(f"the checkpoint of the best step, {best_step}, {kept}; the best of what follows is taken")
        self.state.best_step, self.state.best_loss = 0, math.inf

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint's state; the weights are in place already.

        Raises `ModelwrightError` for a state that another version of this project wrote in another form.
        """
        with reading_state():
            self.state = TrainState(**state["trainer"])
            self.saved = (self.state.step, self.state.evaluated_step)
            self.one_step.objective.load_state_dict(state["objective"])
            load_optimizer_state(self.optimizer, self.replica.names, state["optimizer"])
            for technique in self.techniques:
                if technique.name in state["techniques"]:  # one that has been switched on since begins afresh
                    technique.load_state_dict(state["techniques"][technique.name])
            if state["strategy"]:  # empty when it does not fit this layout: it starts afresh
                self.one_step.strategy.load_state_dict(state["strategy"])

    def best(self) -> Best:
        return self.state.best if self.config.keep_best else Best()

    def result(self) -> TrainResult:
        return TrainResult(
            num_steps=self.state.step,
            loss=self.state.loss,
            heldout_loss=self.state.heldout_loss,
            best=self.best(),
            num_tokens=self.state.num_tokens,
            train_time_s=self.state.train_time_s,
            model_flops=self.state.model_flops,
            mfu=self.one_step.throughput.utilization(self.state.model_flops, self.state.train_time_s),
            bytes_sent=self.traffic.bytes_sent(),
            peak_flops=self.one_step.throughput.peak_flops,
            summaries={technique.name: dict(technique.summary()) for technique in self.techniques},
        )

    def close(self) -> None:
        self.checkpoints.close()
        if self.recorder is not None:
            self.recorder.close()
