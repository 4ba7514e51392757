"""Runs a model under one layout, step by step, with metrics, evaluation, checkpoints and rollbacks in between. Read
`Trainer.fit`.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from modelwright.core.errors import Stopped
from modelwright.core.progress import Progress
from modelwright.core.records import Recorder
from modelwright.core.rundir import StageDir
from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import Mesh, World
from modelwright.parallel.traffic import Traffic
from modelwright.precision.apply import ModelPrecision
from modelwright.train.checkpoint.manager import CheckpointManager
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
    """The parts of one run under one layout. techniques: all of them, monitors included; memory: where the tensors of a
    step are stored; state: progress of the run.
    """

    one_step: TrainStep
    config: TrainConfig
    num_steps: int
    executor: Executor
    formats: ModelPrecision
    global_mesh: Mesh
    stage: StageDir
    progress: Progress
    heldout: Sequence[Batch]
    techniques: Sequence[Technique]
    checkpoints: CheckpointManager
    watchdog: Watchdog
    memory: StepMemory
    state: TrainState
    traffic: Traffic = field(init=False)
    recorder: Recorder | None = None

    @property
    def model(self) -> Decoder:
        """This rank's part of the model."""
        return self.executor.model

    @property
    def world(self) -> World:
        """All processes of the run."""
        return self.global_mesh.world

    def fit(self, stop: StopRequest) -> TrainResult | Relayout:
        """Train to the end, or until a technique asks for another layout, after a checkpoint."""
        step = self.checkpoints.resume()
        if self.world.is_first:
            self.recorder = Recorder(self.stage.metrics, tensorboard=self.stage.tensorboard, first_step=step + 1)
        self.one_step.strategy.begin(self.state.step, self.num_steps)
        self.model.train()
        give_back_memory(self.world.device)  # what it took to load and to lay out
        self.traffic = Traffic(self.world)
        while True:
            wishes = stop.requested, self.checkpoints.minutes_due(), self.checkpoints.writer.failed
            stopping, minutes_due, failed = map(int, self.world.maxima(*wishes))
            if failed:
                self.checkpoints.writer.wait()  # raises on every rank what the writer met
            if self.evaluation_due() and not stopping:
                self.evaluate()
            if stopping or minutes_due or self.checkpoints.due():
                self.save()
            elif self.checkpoints.copy_due():
                self.checkpoints.keep_copy()
            if self.state.step >= self.num_steps:
                break
            if stopping:
                self.checkpoints.finish()
                text = f"stopped after step {self.state.step} of {self.num_steps}; run again to go on from there"
                raise Stopped(text, stopping)
            requests: list[Rollback | Relayout] = []
            interrupted = partial(self.interrupted, stop)
            for info in self.one_step.strategy.steps(
                self.measured_step, self.state.step, self.next_stop(), interrupted
            ):
                self.count(info)
                requests += self.report(info)
            for request in requests:
                match request:
                    case Rollback():
                        self.checkpoints.rollback(request)
                    case Relayout():
                        self.save()
                        self.checkpoints.writer.wait()
                        return request
        self.checkpoints.finish()
        return self.result()

    def measured_step(self, step: int) -> StepInfo:
        """Run step `step` (from 0); returns its info with memory and communication figures."""
        with self.memory.step():
            info = self.one_step(step)
        scalars = {**info.scalars, **self.memory.figures()}
        return replace(info, bytes_sent=self.traffic.bytes_sent(), scalars=scalars)

    def interrupted(self, stop: StopRequest) -> bool:
        """Whether this process wants all of them to synchronize before `next_stop`."""
        return bool(stop.requested) or self.checkpoints.minutes_due() or self.checkpoints.writer.failed

    def next_stop(self) -> int:
        """The next step with something to do for all: evaluation, checkpoint or the end."""
        cadences = (
            self.config.eval_every_steps if self.heldout else 0,
            self.config.checkpoint_every_steps,
            self.config.fault_tolerance.in_memory_checkpoint_every_steps,
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
        """Pass the step to techniques, metrics and display; returns the techniques' requests."""
        self.watchdog.alive()
        asked = [one.on_step_end(info) for one in self.techniques if info.step % one.every == 0]
        if self.recorder is not None and info.step % self.config.log_every_steps == 0:
            self.recorder.write(info.step, **info.as_record())
        self.progress.advance(
            info.step, loss=info.loss, lr=info.learning_rate, tokens_per_s=info.tokens_per_s, mfu=info.mfu
        )
        return [request for request in asked if request is not None]

    def save(self) -> None:
        """Save a checkpoint, unless this state is already saved."""
        stall_s = self.checkpoints.save()
        if self.recorder is not None and stall_s is not None:
            self.recorder.write(self.state.step, checkpoint_stall_s=stall_s)

    def evaluation_due(self) -> bool:
        """Evaluate every n steps and once at the end: a run that was stopped before evaluating does it after
        resuming.
        """
        if not self.heldout or self.state.step == self.state.evaluated_step:
            return False
        every = self.config.eval_every_steps
        return self.state.step == self.num_steps or (every > 0 and self.state.step % every == 0)

    def evaluate(self) -> None:
        """Held-out losses over the whole set; records the best so far."""
        started = time.perf_counter()
        with self.formats.evaluating(), self.memory.resting():
            losses = heldout_losses(
                self.executor, self.one_step.objective, self.heldout, self.global_mesh, alive=self.watchdog.alive
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

    def result(self) -> TrainResult:
        return TrainResult(
            num_steps=self.state.step,
            loss=self.state.loss,
            heldout_loss=self.state.heldout_loss,
            best=self.checkpoints.best(),
            num_tokens=self.state.num_tokens,
            train_time_s=self.state.train_time_s,
            model_flops=self.state.model_flops,
            mfu=self.one_step.throughput.utilization(self.state.model_flops, self.state.train_time_s),
            bytes_sent=self.traffic.bytes_sent(),
            peak_flops=self.one_step.throughput.peak_flops,
            summaries={technique.name: dict(technique.summary()) for technique in self.techniques},
        )

    def close(self) -> None:
        self.checkpoints.writer.close()
        if self.recorder is not None:
            self.recorder.close()
