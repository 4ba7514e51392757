"""Runs a training under one layout: steps, metrics, evaluation, checkpoints and rollbacks. Read `Trainer.fit`."""

import time
from dataclasses import dataclass, field, replace

from modelwright.core.config import Stopped
from modelwright.core.records import Recorder
from modelwright.core.resources import resident_bytes
from modelwright.ops.tensor_heap import give_back_memory
from modelwright.parallel.control_plane import Traffic
from modelwright.train.checkpoint.manager import CheckpointManager
from modelwright.train.interruption import Requests
from modelwright.train.job import Session, StepParts, TrainJob, TrainResult, TrainState
from modelwright.train.objective import evaluate_heldout
from modelwright.train.technique import Relayout, Rollback, StepInfo


@dataclass(kw_only=True)
class Trainer:
    """Trains one job under one layout."""

    job: TrainJob
    session: Session
    parts: StepParts
    state: TrainState = field(default_factory=TrainState)
    """Progress of the run."""
    checkpoints: CheckpointManager = field(init=False)
    traffic: Traffic = field(init=False)
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        self.checkpoints = CheckpointManager(
            job=self.job, parts=self.parts, state=self.state, note=self.session.progress.note
        )
        self.parts.one_step.own_requests = self.own_requests

    def fit(self) -> TrainResult | Relayout:
        """Train to the end, or until a technique asks for another layout, after a checkpoint."""
        first_step = self.checkpoints.resume() + 1
        if self.session.world.is_first:
            stage, tracking = self.job.stage, self.job.tracking
            sinks = tracking.open(stage.path, self.job.name, first_step, self.session.note)
            self.recorder = Recorder(stage.metrics, sinks=sinks, first_step=first_step)
        self.parts.run.strategy.begin(self.state.step, self.job.num_steps)
        self.parts.run.model.train()
        give_back_memory()  # that of loading and of laying out
        self.traffic = Traffic(self.session.world)
        copy_every = self.job.config.fault_tolerance.in_memory_checkpoint_every_steps
        while True:
            asked = self.requests()
            if asked.writer_failed:
                self.checkpoints.writer.wait()  # raises the writer's error on every rank
            # Evaluation comes before the checkpoint, which records the best loss and the step of the evaluation.
            if not asked.stop:
                self.evaluate_if_due()
            if asked.stop or asked.minutes_due or self.checkpoints.due():
                self.save()
            elif copy_every and self.state.step and self.state.step % copy_every == 0:
                self.checkpoints.writer.keep(self.checkpoints.snapshot(), best=self.checkpoints.best())
            if self.state.step >= self.job.num_steps:
                break
            if asked.stop:
                self.checkpoints.writer.forget()
                text = f"stopped after step {self.state.step} of {self.job.num_steps}; run again to resume from there"
                raise Stopped(text, asked.stop)
            for request in self.advance():
                match request:
                    case Rollback():
                        self.checkpoints.rollback(request)
                    case Relayout():
                        self.save()
                        self.checkpoints.writer.wait()
                        return request
        self.checkpoints.writer.forget()
        throughput = self.parts.one_step.throughput
        return TrainResult(
            num_steps=self.state.step,
            loss=self.state.loss,
            heldout_loss=self.state.heldout_loss,
            heldout_metrics=self.state.heldout_metrics,
            best=self.checkpoints.best(),
            num_tokens=self.state.num_tokens,
            train_time_s=self.state.train_time_s,
            model_flops=self.state.model_flops,
            mfu=throughput.utilization(self.state.model_flops, self.state.train_time_s),
            bytes_sent=self.traffic.bytes_sent(),
            peak_flops=throughput.peak_flops,
            summaries={technique.name: dict(technique.summary()) for technique in self.parts.techniques},
        )

    def advance(self) -> list[Rollback | Relayout]:
        """Make at least one update, at most up to the next evaluation or checkpoint; returns techniques' requests."""
        state, config, requests = self.state, self.job.config, list[Rollback | Relayout]()
        cadences = (
            config.eval_every_steps if self.job.heldout else 0,
            config.checkpoint_every_steps,
            config.fault_tolerance.in_memory_checkpoint_every_steps,
        )
        next_stop = min([self.job.num_steps, *((state.step // every + 1) * every for every in cadences if every)])
        # A request makes asynchronous ranks synchronize before the next planned stop.
        steps, is_interrupted = self.parts.run.strategy.steps, lambda: self.own_requests() != Requests()
        for info in steps(self.measured_step, state.step, next_stop, is_interrupted):
            state.step, state.loss = info.step, info.loss
            state.num_tokens += info.num_tokens
            state.train_time_s += info.step_time_s
            state.model_flops += info.model_flops
            self.session.watchdog.alive()
            asked = [one.on_step_end(info) for one in self.parts.techniques if info.step % one.every == 0]
            requests += [request for request in asked if request is not None]
            if self.recorder is not None and info.step % config.log_every_steps == 0:
                self.recorder.write(info.step, resident_bytes=resident_bytes(), **info.as_record())
            self.session.progress.advance(
                info.step, loss=info.loss, lr=info.learning_rate, tokens_per_s=info.tokens_per_s, mfu=info.mfu
            )
        return requests

    def own_requests(self) -> Requests:
        """Returns this rank's present requests."""
        return Requests(
            stop=self.session.stop.requested,
            minutes_due=self.checkpoints.minutes_due(),
            writer_failed=self.checkpoints.writer.failed,
        )

    def requests(self) -> Requests:
        """Returns the union of all ranks' requests. Ranks that make updates together have exchanged them in the last
        step's vote; others exchange them now.
        """
        world = self.session.world
        if world.size == 1:
            return self.own_requests()
        if self.parts.run.mesh.world.size == world.size:
            return self.parts.one_step.requests
        own = self.own_requests()
        stop, minutes_due, failed = world.maxima(own.stop, own.minutes_due, own.writer_failed)
        return Requests(stop=int(stop), minutes_due=minutes_due > 0, writer_failed=failed > 0)

    def measured_step(self, step: int) -> StepInfo:
        """Run step `step` (from 0); returns its info with memory and communication figures."""
        info = self.parts.one_step(step)
        self.checkpoints.writer.hold_changes()  # a step that was skipped has not; techniques may change weights now
        scalars = dict(info.scalars)
        for technique in self.parts.techniques:
            scalars |= technique.metrics()
        return replace(info, bytes_sent=self.traffic.bytes_sent(), scalars=scalars)

    def save(self) -> None:
        """Save a checkpoint, unless this state is already saved."""
        stall_s = self.checkpoints.save()
        if self.recorder is not None and stall_s is not None:
            self.recorder.write(self.state.step, checkpoint_stall_s=stall_s)

    def evaluate_if_due(self) -> None:
        """Measure losses and metrics over the whole held-out set, and record the best loss so far."""
        if not self.job.heldout or self.state.step == self.state.evaluated_step:
            return  # a run that was stopped before it evaluated a step does so after resuming
        every = self.job.config.eval_every_steps
        if self.state.step != self.job.num_steps and (every <= 0 or self.state.step % every):
            return
        started = time.perf_counter()
        run, alive = self.parts.run, self.session.watchdog.alive
        with run.formats.evaluating():
            result = evaluate_heldout(run.executor, self.job.objective, self.job.heldout, run.global_mesh, alive=alive)
        loss = result.loss
        self.state.evaluated_step, self.state.heldout_loss = self.state.step, loss
        self.state.heldout_metrics = dict(result.metrics)
        if loss < self.state.best_loss:
            self.state.best_step, self.state.best_loss = self.state.step, loss
        if self.recorder is not None:
            took_s = time.perf_counter() - started
            self.recorder.write(self.state.step, heldout_loss=loss, eval_time_s=took_s, **result.as_record())
        self.session.progress.advance(self.state.step, heldout_loss=loss)

    def close(self) -> None:
        self.checkpoints.writer.close()
        if self.recorder is not None:
            self.recorder.close()
