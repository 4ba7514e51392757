"""THE training loop: steps (`train/step.py`), evaluation, checkpoints and metrics. Read `train` and `_Loop.run`.

What makes a run repeatable: batch number n is a function of n, random streams are seeded afresh at every step from
(seed, step, rank), and everything else that lives longer than a step is in the checkpoint. So a run that is killed at
any moment and started again ends with the same bits.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from modelwright.core.errors import Stopped
from modelwright.core.progress import Progress, SilentProgress
from modelwright.core.records import Recorder
from modelwright.core.rundir import StageDir
from modelwright.memory.allocator import freed_memory_kept
from modelwright.memory.arena_run import StepArena, step_arena
from modelwright.memory.offload import open_store
from modelwright.model.decoder import Decoder
from modelwright.ops.pieces import local
from modelwright.optim.update import FiniteCheck
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.gather import give_weights, take_weights, whole_weights
from modelwright.parallel.mesh import Mesh, World, lay_out
from modelwright.parallel.transport import GradientTransport
from modelwright.parallel.transports.local_steps import LocalSteps
from modelwright.parallel.turns import Together
from modelwright.precision.layer_scales import layer_scales_for
from modelwright.precision.model import ModelFormats, tf32_products
from modelwright.train.checkpoint import Best, Checkpoints, Snapshot
from modelwright.train.config import TrainConfig
from modelwright.train.evaluation import heldout_losses
from modelwright.train.exchange import check_exchange, transport_for, turns_for
from modelwright.train.objective import Batch, Controller, Objective, StepInfo
from modelwright.train.passes import activation_pass, remove_passes, spread
from modelwright.train.recovery import Recovery
from modelwright.train.result import Position, TrainResult
from modelwright.train.signals import StopRequest
from modelwright.train.standing import standing_controllers
from modelwright.train.step import TrainStep
from modelwright.train.watch import Watch
from modelwright.train.watchdog import Watchdog

DATA_PARALLEL = ParallelConfig()


def train(
    model: Decoder,
    objective: Objective,
    config: TrainConfig,
    *,
    num_steps: int,
    world: World,
    stage: StageDir,
    seed: int,
    name: str,
    input_digest: str,
    progress: Progress,
    heldout: Sequence[Batch] = (),
    peak_flops: float = 0.0,
    controllers: Mapping[str, Controller] | None = None,
    transport: GradientTransport | None = None,
    parallel: ParallelConfig = DATA_PARALLEL,
) -> TrainResult:
    """Train `model` in place until `num_steps` updates are done, going on from the newest whole checkpoint in `stage`.

    num_steps: from `config.resolve_num_steps`; name: what the progress display calls it; input_digest: of whatever
    decides the result (config, data, initial weights): a checkpoint with another one is refused; heldout: batches for
    evaluation, shared among the ranks; peak_flops: matrix-product rate of one rank in FLOP/s, 0 when unknown;
    transport: the one that `config.transport` describes unless given; parallel: how the world is laid out. Every rank
    comes with the same whole model and leaves with it, trained; in between, and after an error, a model that is laid
    out over several ranks has no values of its own. Writes `stage.checkpoints`, `stage.metrics`, `stage.tensorboard`
    and, in `stage.path`, the watch list and what guards leave, mostly on the first rank only.

    Raises `Stopped` after a SIGTERM or Ctrl-C (the state is saved), `StorageError` when a checkpoint or a metric
    cannot be written, `ArtifactError` for checkpoints of another run, `ModelwrightError` when training has diverged or
    replicas differ, `ConfigError` when the settings do not go together.
    """
    check_exchange(config.transport, config.asynchronous, parallel)
    progress = progress if world.is_first else SilentProgress()
    progress.begin(name, num_steps, "steps")
    hang_after_s = config.guards.hang_after_s if world.size > 1 else 0.0
    model = model.to(world.device)
    try:
        with (
            StopRequest() as stop,
            freed_memory_kept(),
            tf32_products(config.precision.tf32),
            Watchdog(stage.path / f"hang-{world.rank}.txt", limit_s=hang_after_s) as watchdog,
            step_arena(config.memory_arena, world.device, progress.note) as arena,
        ):
            while True:
                ended = _train_laid_out(
                    model,
                    config,
                    parallel,
                    world,
                    given_transport=transport,
                    stop=stop,
                    objective=objective,
                    num_steps=num_steps,
                    stage=stage,
                    seed=seed,
                    progress=progress,
                    heldout=heldout,
                    peak_flops=peak_flops,
                    given_controllers=dict(controllers or {}),
                    input_digest=input_digest,
                    watchdog=watchdog,
                    arena=arena,
                )
                if isinstance(ended, TrainResult):
                    return ended
                parallel = replace(parallel, layers_per_stage=ended)
    finally:
        progress.end()


def _train_laid_out(
    model: Decoder,
    config: TrainConfig,
    parallel: ParallelConfig,
    world: World,
    *,
    objective: Objective,
    num_steps: int,
    stage: StageDir,
    seed: int,
    peak_flops: float,
    input_digest: str,
    given_transport: GradientTransport | None,
    stop: StopRequest,
    arena: StepArena,
    **parts: Any,
) -> TrainResult | tuple[int, ...]:
    """Train under one layout: to the end, or until other numbers of layers per stage, which are returned, are better.

    The model leaves with the trained weights.
    """
    everyone = lay_out(world, parallel)
    with ExitStack() as held:
        shares_memory = parallel.share_memory and given_transport is None and config.is_plain
        turns = held.enter_context(turns_for(config.asynchronous, everyone, model, shares_memory=shares_memory))
        mesh = turns.mesh
        in_place = mesh.is_only_data_parallel
        layer_scales = layer_scales_for(
            config.precision.loss_scale,
            uses_fp16=config.precision.uses_fp16,
            count=lambda: model.config.num_parameters,
            num_layers=model.config.num_layers,
            device=world.device,
        )
        runner = spread(
            model if in_place else take_weights(model),
            mesh=mesh,
            parallel=parallel,
            activations=activation_pass(
                config.activations,
                precision=config.precision,
                tokens_per_microbatch=config.batch_tokens
                // (mesh.data.size * mesh.context.size * config.num_microbatches),
                num_microbatches=config.num_microbatches,
                parallel=parallel,
                store=open_store(config.activations, device=world.device, folder=stage.path),
                pipeline_rank=mesh.pipeline.rank,
            ),
            compile_blocks=config.compile,
            layer_scales=layer_scales,
        )
        held.callback(remove_passes, model)
        formats = ModelFormats(runner.model, config.precision)
        weights = [local(p.detach()) for p in runner.model.parameters() if p.requires_grad]
        transport = given_transport or held.enter_context(
            transport_for(config.transport, config.asynchronous, turns, weights)
        )
        checkpoints = Checkpoints(
            stage.checkpoints,
            keep_last=config.keep_last,
            digest=input_digest,
            world=world,
            reduce=everyone.reduce,
        )
        one_step = TrainStep(
            runner=runner,
            objective=objective,
            config=config,
            num_steps=num_steps,
            turns=turns,
            everyone=everyone,
            seed=seed,
            peak_flops=peak_flops,
            transport=transport,
            formats=formats,
            folder=stage.path,
            layer_scales=layer_scales,
            arena=arena,
        )
        loop = _Loop(
            one_step=one_step,
            config=config,
            num_steps=num_steps,
            everyone=everyone,
            stage=stage,
            checkpoints=checkpoints,
            **parts,
        )
        held.callback(loop.close)
        if one_step.sparse:
            held.callback(one_step.sparse.close)
        ended = loop.run(stop)
        if not in_place:
            give_weights(model, whole_weights(runner.model, mesh))
        return ended


@dataclass(kw_only=True)
class _Loop:
    """The parts of one run, and its steps in the order in which they happen."""

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
    controllers: dict[str, Controller] = field(init=False)
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
        while True:
            wishes = stop.requested, self.minutes_due(), self.checkpoints.failed
            stopping, minutes_due, failed = map(bool, self.world.maxima(*wishes))
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
                raise Stopped(f"stopped after step {self.at.step} of {self.num_steps}; run again to go on from there")
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
        return replace(info, scalars={**info.scalars, **arena.figures()}), flops

    def interrupted(self, stop: StopRequest) -> bool:
        """Whether this process wants all of them to meet before `next_stop`."""
        return stop.requested or self.minutes_due() or self.checkpoints.failed

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
        step = self.checkpoints.latest_step(self.progress.note)
        if step:
            names = list(self.one_step.names.values())
            self.restore(self.checkpoints.load(step, self.model.state_dict(), gradients=names, note=self.progress.note))
            self.progress.note(f"going on after step {step} of {self.num_steps}")
        elif self.everyone.is_only_data_parallel:
            for weight in self.model.state_dict().values():
                self.world.broadcast(weight)
        self.checkpoints.write_best(self.best())
        if self.world.is_first:
            self.recorder = Recorder(self.stage.metrics, tensorboard=self.stage.tensorboard, first_step=step + 1)

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
            bytes_sent=self.one_step.transport.bytes_sent,
        )

    def close(self) -> None:
        self.checkpoints.close()
        if self.recorder is not None:
            self.recorder.close()
