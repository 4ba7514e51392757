"""The course of a run under one layout: update by update, and what happens between them: metrics, evaluation,
checkpoints, ways back. Read `Course.run`.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from modelwright.core.errors import Stopped
from modelwright.core.progress import Progress
from modelwright.core.records import Recorder
from modelwright.core.rundir import StageDir
from modelwright.model.decoder import Decoder
from modelwright.optim.update import FiniteCheck
from modelwright.parallel.mesh import Mesh, World
from modelwright.parallel.traffic import Traffic
from modelwright.parallel.strategies.local_sgd import LocalSteps
from modelwright.parallel.strategy import Together
from modelwright.train.checkpoint.writer import Best, Checkpoints, Snapshot
from modelwright.train.config import TrainConfig
from modelwright.train.evaluation import heldout_losses
from modelwright.train.objective import Batch, Controller, StepInfo
from modelwright.train.techniques.out_of_memory import give_back_memory
from modelwright.train.monitors.recovery_time import Recovery
from modelwright.train.state import Position, TrainResult
from modelwright.train.signals import StopRequest
from modelwright.train.monitors.build import standing_controllers
from modelwright.train.step import TrainStep
from modelwright.train.monitors.anomalies import Watch
from modelwright.train.monitors.watchdog import Watchdog


@dataclass(kw_only=True)
class Course:
    """The parts of one run, and its steps in the order in which they happen.

    restart: begin at step 0 when all checkpoints are damaged.
    """

    one_step: TrainStep
    config: TrainConfig
    num_steps: int
    everyone: Mesh
    stage: StageDir
    progress: Progress
    heldout: Sequence[Batch]
    given_controllers: dict[str, Controller]
    checkpoints: Checkpoints
    watchdog: Watchdog
    restart: bool = False
    controllers: dict[str, Controller] = field(init=False)
    traffic: Traffic = field(init=False)
    recorder: Recorder | None = None
    at: Position = field(default_factory=Position)
    saved: tuple[int, int] = (0, 0)
    saved_time: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        together, divided = isinstance(self.one_step.turns, Together), self.one_step.turns.divides
        self.controllers = self.given_controllers | standing_controllers(
            self.stage.path,
            self.config.guards,
            self.config.watch,
            self.everyone,
            note=self.progress.note,
            replicas=self.replicas if together and not divided else None,  # one copy has nothing to compare
            own_time=self.one_step.own_time if together else None,
        )

    def replicas(self) -> Mapping[str, Tensor]:
        """What several ranks must hold alike: the weights, or with local steps what those that meet have in common."""
        if not isinstance(self.one_step.transport, LocalSteps):
            return self.model.state_dict()
        mesh = self.everyone
        part = f"{mesh.pipeline.rank}/{mesh.shard.rank}/{mesh.tensor.rank}"
        return {f"start/{part}/{number}": start for number, start in enumerate(self.one_step.transport.start)}

    @property
    def model(self) -> Decoder:
        """What this rank holds of the model."""
        return self.one_step.model

    @property
    def world(self) -> World:
        """All processes of the run."""
        return self.everyone.world

    def run(self, stop: StopRequest) -> TrainResult | tuple[int, ...]:
        """Go on to the end, or to a checkpoint after which other numbers of layers per stage, which are returned, are
        better."""
        self.resume()
        self.one_step.begin(self.at.step)
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
                split = self.better_split()
                if split and not stopping:
                    self.finish_writing()
                    return split
            elif self.copy_due():
                self.checkpoints.keep(self.snapshot(), best=self.best())
            if self.at.step >= self.num_steps:
                break
            if stopping:
                self.finish()
                text = f"stopped after step {self.at.step} of {self.num_steps}; run again to go on from there"
                raise Stopped(text, stopping)
            interrupted = partial(self.interrupted, stop)
            turns = self.one_step.turns
            for info, flops in turns.updates(self.one_update, self.at.step, self.next_stop(), interrupted):
                self.account(info, flops)
                self.report(info)
            self.go_back()
        self.finish()
        return self.result()

    def one_update(self, number: int) -> tuple[StepInfo, float]:
        """Update `number`, in the arena's memory where there is one."""
        arena = self.one_step.arena
        with arena.step():
            info, flops = self.one_step(number)
        scalars = {**info.scalars, **arena.figures()}
        return replace(info, bytes_sent=self.traffic.bytes_sent(), scalars=scalars), flops

    def interrupted(self, stop: StopRequest) -> bool:
        """Whether this process wants all of them to meet before `next_stop`."""
        return bool(stop.requested) or self.minutes_due() or self.checkpoints.failed

    def next_stop(self) -> int:
        """The step at which there is something to do for all: evaluation, checkpoint or the end."""
        cadences = (
            self.config.eval_every_steps if self.heldout else 0,
            self.config.checkpoint_every_steps,
            self.config.guards.memory_every_steps,
        )
        return min([self.num_steps, *((self.at.step // every + 1) * every for every in cadences if every)])

    def account(self, info: StepInfo, flops: float) -> None:
        """Count the step as done."""
        self.at.step = info.step
        self.at.loss = info.loss
        self.at.num_tokens += info.num_tokens
        self.at.train_time_s += info.step_time_s
        self.at.model_flops += flops

    def report(self, info: StepInfo) -> None:
        """Show the step to guards, controllers, metrics and display."""
        self.watchdog.alive()
        for controller in self.controllers.values():
            if info.step % controller.every == 0:
                controller.observe(info)
        if self.recorder is not None and info.step % self.config.log_every_steps == 0:
            self.recorder.write(info.step, **info.as_record())
        self.progress.advance(
            info.step, loss=info.loss, lr=info.learning_rate, tokens_per_s=info.tokens_per_s, mfu=info.mfu
        )

    def evaluation_due(self) -> bool:
        """Every n steps and at the end, once: a run that was stopped before evaluating does it when it goes on."""
        if not self.heldout or self.at.step == self.at.evaluated_step:
            return False
        every = self.config.eval_every_steps
        return self.at.step == self.num_steps or (every > 0 and self.at.step % every == 0)

    def evaluate(self) -> None:
        """Held-out losses over the whole set; the best so far is remembered."""
        started = time.perf_counter()
        with self.one_step.formats.evaluating(), self.one_step.arena.resting():
            losses = heldout_losses(
                self.one_step.runner, self.one_step.objective, self.heldout, self.everyone, alive=self.watchdog.alive
            )
        loss = sum(losses.values())
        self.at.evaluated_step, self.at.heldout_loss = self.at.step, loss
        if loss < self.at.best_loss:
            self.at.best_step, self.at.best_loss = self.at.step, loss
        if self.recorder is not None:
            terms = {f"heldout_loss/{name}": value for name, value in losses.items()} if len(losses) > 1 else {}
            took_s = time.perf_counter() - started
            self.recorder.write(self.at.step, heldout_loss=loss, eval_time_s=took_s, **terms)
        self.progress.advance(self.at.step, heldout_loss=loss)

    def minutes_due(self) -> bool:
        minutes = self.config.checkpoint_every_minutes
        return self.at.step > 0 and 0 < minutes * 60 <= time.monotonic() - self.saved_time

    def checkpoint_due(self) -> bool:
        every = self.config.checkpoint_every_steps
        is_best = self.config.keep_best and 0 < self.at.step == self.at.best_step
        return self.at.step == self.num_steps or is_best or (every > 0 and self.at.step % every == 0)

    def save(self) -> None:
        """Hand the state to the checkpoint writer, unless it has it already; every rank writes its part."""
        self.saved_time = time.monotonic()
        if self.saved == (self.at.step, self.at.evaluated_step):
            return
        self.saved = (self.at.step, self.at.evaluated_step)
        started = time.perf_counter()
        every = self.config.checkpoint_every_steps
        if every and self.at.step % every == 0:  # others may be at any moment
            self.one_step.spikes.saved(self.at.step)
        self.checkpoints.save(self.snapshot(), best=self.best(), also=self.one_step.spikes.wanted_steps)
        if self.recorder is not None:
            self.recorder.write(self.at.step, checkpoint_stall_s=time.perf_counter() - started)

    def go_back(self) -> None:
        """After so many spikes: to weights and optimizer of an earlier update. Numbers and batches go on."""
        spikes = self.one_step.spikes
        if not spikes.step_to_go_back_to():
            return
        self.checkpoints.wait()
        while (step := spikes.step_to_go_back_to()) and not self.checkpoints.is_whole(step):
            self.progress.note(f"the checkpoint of step {step}, to which spikes send the run back, is damaged")
            self.checkpoints.set_aside(step)
            spikes.forget(step)
        if not step:
            return
        names = list(self.one_step.names.values())
        state = self.checkpoints.load(step, self.model.state_dict(), gradients=names, note=self.progress.note)
        self.one_step.go_back(state["updates"])
        spikes.went_back(self.at.step, step)
        text = f"back to the weights of step {step}; batches {step} to {self.at.step - 1} have left no trace"
        watch = self.controllers.get("watch")
        if isinstance(watch, Watch):
            watch.report(self.at.step, "rollback", step, self.at.step, text)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            step=self.at.step,
            weights=self.model.state_dict(),
            state=self.state(),
            gradients=list(self.one_step.names.values()),
        )

    def copy_due(self) -> bool:
        """Whether the hosts' memory is to take the state, which is not being written to disk at this step."""
        every = self.config.guards.memory_every_steps
        return every > 0 and self.at.step > 0 and self.at.step % every == 0

    def better_split(self) -> tuple[int, ...]:
        """Other numbers of layers per pipeline stage, if stages have drifted apart."""
        if self.one_step.stage_balance is None or self.at.step >= self.num_steps:
            return ()
        present, proposed = (
            self.one_step.stage_balance.layers_per_stage,
            self.one_step.stage_balance.propose(self.one_step.mesh),
        )
        if proposed == present:
            return ()
        self.progress.note(f"after step {self.at.step} the stages hold {proposed} layers instead of {present}")
        return proposed

    def finish_writing(self) -> None:
        """Return on all ranks when the last checkpoint is on disk."""
        self.checkpoints.wait()

    def finish(self) -> None:
        """The run ends on purpose, with its state on disk."""
        self.checkpoints.forget()
        recovery = self.controllers.get("recovery")
        if isinstance(recovery, Recovery):
            recovery.stopped()

    def state(self) -> dict[str, Any]:
        return {
            "position": dict(vars(self.at)),
            "updates": {name: update.state_dict() for name, update in self.one_step.updates.items()},
            "controllers": {name: controller.state_dict() for name, controller in self.controllers.items()},
            "transport": self.one_step.transport.state_dict(),
        }

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, whatever the layout and number of ranks that wrote it.

        All ranks read their parts of it (the run directory is shared); without one, copies of the model begin with
        the first one's weights.
        """
        self.checkpoints.prepare()
        step = self.checkpoints.latest_step(self.progress.note, restart=self.restart)
        if step:
            names = list(self.one_step.names.values())
            self.restore(self.checkpoints.load(step, self.model.state_dict(), gradients=names, note=self.progress.note))
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
        best_step = self.at.best_step
        if not self.config.keep_best or not best_step or self.checkpoints.is_whole(best_step):
            return
        aside = self.checkpoints.set_aside(best_step)
        kept = f"is damaged; it is kept as {aside}" if aside else "is gone"
        self.progress.note(f"the checkpoint of the best step, {best_step}, {kept}; the best of what follows is taken")
        self.at.best_step, self.at.best_loss = 0, math.inf

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a checkpoint's state; the weights are in place already."""
        self.at = Position(**state["position"])
        self.saved = (self.at.step, self.at.evaluated_step)
        self.one_step.load_updates(state["updates"])
        for name, controller in self.controllers.items():
            if name in state["controllers"]:  # one that has been switched on since begins afresh
                controller.load_state_dict(state["controllers"][name])
        if state["transport"]:  # empty when it does not fit this layout: it starts afresh
            self.one_step.transport.load_state_dict(state["transport"])

    def best(self) -> Best:
        return self.at.best if self.config.keep_best else Best()

    def result(self) -> TrainResult:
        watch, check = self.controllers.get("watch"), self.one_step.updates["finite_check"]
        return TrainResult(
            num_steps=self.at.step,
            loss=self.at.loss,
            heldout_loss=self.at.heldout_loss,
            best=self.best(),
            num_tokens=self.at.num_tokens,
            train_time_s=self.at.train_time_s,
            model_flops=self.at.model_flops,
            mfu=self.one_step.utilisation(self.at.model_flops, self.at.train_time_s),
            num_skipped=check.num_skipped if isinstance(check, FiniteCheck) else 0,
            num_events=dict(watch.num_events) if isinstance(watch, Watch) else {},
            loss_scale=self.one_step.loss_scale_history(),
            left_out=tuple(self.one_step.spikes.events),
            bytes_sent=self.traffic.bytes_sent(),
            peak_flops=self.one_step.peak_flops,
        )

    def close(self) -> None:
        self.checkpoints.close()
        if self.recorder is not None:
            self.recorder.close()
