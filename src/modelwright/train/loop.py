"""THE training loop. Read `train` and `_Loop` from top to bottom.

The loop owns microbatching, the normaliser, backward, the update, evaluation, checkpoints and metrics. It never sees a
loss formula: an `Objective` gives sums and weights, a `GradientTransport` moves gradients, a list of `Update`s turns
them into new weights, `Controller`s watch.

What makes a run repeatable: batch number n is a function of n, random streams are seeded afresh at every step from
(seed, step, rank), and everything else that lives longer than a step is in the checkpoint. So a run that is killed at
any moment and started again ends with the same bits.
"""

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from modelwright.core.errors import Stopped
from modelwright.core.progress import Progress, SilentProgress
from modelwright.core.records import Recorder
from modelwright.core.rundir import StageDir
from modelwright.core.seeds import derive_seed
from modelwright.memory.allocator import freed_memory_kept
from modelwright.model.decoder import Decoder
from modelwright.optim.build import build_adamw
from modelwright.optim.update import Context, FiniteCheck, Update, standard_updates
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.gather import put, whole_weights
from modelwright.parallel.gradients import global_norm, holders, like_parameter, local
from modelwright.parallel.mesh import Mesh, World, lay_out
from modelwright.parallel.transport import ExactTransport, GradientTransport
from modelwright.parallel.turns import Together, Turns
from modelwright.precision.policy import autocast
from modelwright.train.checkpoint import Best, Checkpoints, Snapshot, read_weights
from modelwright.train.config import TrainConfig
from modelwright.train.evaluation import heldout_losses
from modelwright.train.objective import Batch, Controller, Objective, StepInfo
from modelwright.train.passes import activation_pass, remove_passes, spread
from modelwright.train.runner import Runner
from modelwright.train.signals import StopRequest
from modelwright.train.watch import Watch

DATA_PARALLEL = ParallelConfig()


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended. The model holds the last weights; `load_best` puts the best ones in.

    loss: of the last step; heldout_loss: at the last evaluation, nan without held-out batches; best: lowest held-out
    loss and its step (0: none); num_tokens: trained on, padding left out; train_time_s: spent in steps, over all
    starts; model_flops: of forward and backward passes; mfu: in [0, 1], 0 without a peak rate; num_skipped: updates
    left out for values that were not finite; num_events: entries of the watch list by kind.
    """

    num_steps: int
    loss: float
    heldout_loss: float
    best: Best
    num_tokens: int
    train_time_s: float
    model_flops: float
    mfu: float
    num_skipped: int
    num_events: Mapping[str, int]


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
    turns: Turns | None = None,
) -> TrainResult:
    """Train `model` in place until `num_steps` updates are done, going on from the newest whole checkpoint in `stage`.

    num_steps: from `config.resolve_num_steps`; name: what the progress display calls it; input_digest: of whatever
    decides the result (config, data, initial weights): a checkpoint with another one is refused; heldout: batches for
    evaluation, shared among the ranks; peak_flops: matrix-product rate of one rank in FLOP/s, 0 when unknown;
    transport: the exact all-reduce unless given; parallel: how the world is laid out; turns: who makes which update,
    all ranks together unless given. Every rank comes with the same
    whole model and leaves with it, trained. Writes `stage.checkpoints`, `stage.metrics`, `stage.tensorboard`
    and `stage.path/watch.jsonl`, on the first rank only.

    Raises `Stopped` after a SIGTERM or Ctrl-C (the state is saved), `StorageError` when a checkpoint or a metric
    cannot be written, `ArtifactError` for checkpoints of another run, `ModelwrightError` when training has diverged.
    """
    everyone = lay_out(world, parallel)
    turns = turns or Together(everyone)
    mesh = turns.mesh
    model = model.to(world.device)
    in_place = mesh.is_only_data_parallel
    runner = spread(
        model if in_place else copy.deepcopy(model),
        mesh=mesh,
        parallel=parallel,
        activations=activation_pass(
            config.activations,
            precision=config.precision,
            tokens_per_microbatch=config.batch_tokens // (mesh.data.size * mesh.context.size * config.num_microbatches),
            num_microbatches=config.num_microbatches,
            parallel=parallel,
        ),
        compile_blocks=config.compile,
        autocast=partial(autocast, config.precision, world.device),
    )
    loop = _Loop(
        runner=runner,
        objective=objective,
        config=config,
        num_steps=num_steps,
        turns=turns,
        everyone=everyone,
        stage=stage,
        seed=seed,
        progress=progress if world.is_first else SilentProgress(),
        heldout=heldout,
        peak_flops=peak_flops,
        controllers=dict(controllers or {}),
        transport=transport or ExactTransport(mesh.reduce),
        checkpoints=Checkpoints(
            stage.checkpoints, keep_last=config.keep_last, digest=input_digest, world=world, reduce=everyone.reduce
        ),
    )
    loop.progress.begin(name, num_steps, "steps")
    try:
        with StopRequest() as stop, freed_memory_kept():
            result = loop.run(stop)
        if not in_place:
            for name, whole in whole_weights(runner.model, mesh):
                put(model.get_parameter(name), whole)
        return result
    finally:
        loop.close()
        loop.progress.end()
        remove_passes(model)


def load_best(model: Decoder, stage: StageDir, best: Best) -> None:
    """Put the weights with the lowest held-out loss into the model. Raises `ArtifactError` when they are gone."""
    model.load_state_dict(read_weights(stage.checkpoints, best.step))


@dataclass
class _Position:
    """How far the run is: what a checkpoint says besides tensors. `step`: updates done."""

    step: int = 0
    loss: float = math.nan
    num_tokens: int = 0
    train_time_s: float = 0.0
    model_flops: float = 0.0
    evaluated_step: int = 0
    heldout_loss: float = math.nan
    best_step: int = 0
    best_loss: float = math.inf

    @property
    def best(self) -> Best:
        return Best(step=self.best_step, loss=self.best_loss)


@dataclass(kw_only=True)
class _Loop:
    """The parts of one run, and its steps in the order in which they happen."""

    runner: Runner
    objective: Objective
    config: TrainConfig
    num_steps: int
    turns: Turns
    everyone: Mesh
    stage: StageDir
    seed: int
    progress: Progress
    heldout: Sequence[Batch]
    peak_flops: float
    controllers: dict[str, Controller]
    transport: GradientTransport
    checkpoints: Checkpoints
    names: dict[Tensor, str] = field(init=False)
    num_holders: list[int] = field(init=False)
    optimizer: Optimizer = field(init=False)
    updates: dict[str, Update] = field(init=False)
    recorder: Recorder | None = None
    at: _Position = field(default_factory=_Position)
    saved: tuple[int, int] = (0, 0)
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))
    next_batch: int = -1
    saved_time: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        config = self.config
        self.names = {p: name for name, p in self.model.named_parameters() if p.requires_grad}
        self.num_holders = [
            holders(p, self.mesh, num_stages=self.runner.num_stages_with(name)) for p, name in self.names.items()
        ]
        self.optimizer = build_adamw(
            self.model,
            learning_rate=config.learning_rate,
            betas=config.betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        self.updates = standard_updates(
            self.optimizer,
            self.names,
            agree=lambda flag: self.mesh.world.maxima(flag)[0],
            norm=lambda gradients: global_norm(gradients, self.mesh, num_holders=self.num_holders),
            max_skipped=config.max_skipped_steps,
            clip_norm=config.clip_norm,
            schedule=config.schedule,
            peak_rate=config.learning_rate,
        )
        if self.world.is_first:
            watch = Watch(self.stage.path / "watch.jsonl", config.watch, note=self.progress.note)
            self.controllers = {"watch": watch, **self.controllers}

    @property
    def model(self) -> Decoder:
        """What this rank holds of the model."""
        return self.runner.model

    @property
    def mesh(self) -> Mesh:
        """The processes that make one update together."""
        return self.turns.mesh

    @property
    def world(self) -> World:
        """All processes of the run."""
        return self.everyone.world

    def run(self, stop: StopRequest) -> TrainResult:
        self.resume()
        self.turns.begin(self.optimizer, self.at.step)
        self.model.train()
        while True:
            wishes = stop.requested, self.minutes_due(), self.checkpoints.failed
            stopping, minutes_due, failed = map(bool, self.world.maxima(*wishes))
            if failed:
                self.checkpoints.wait()  # raises on every rank what the writer met
            if self.evaluation_due() and not stopping:
                self.evaluate()
            if stopping or minutes_due or self.checkpoint_due():
                self.save()
            if self.at.step >= self.num_steps:
                break
            if stopping:
                self.finish_writing()
                raise Stopped(f"stopped after step {self.at.step} of {self.num_steps}; run again to go on from there")
            interrupted = partial(self.interrupted, stop)
            for info, flops in self.turns.updates(self.one_step, self.at.step, self.next_stop(), interrupted):
                self.account(info, flops)
                self.report(info)
        self.finish_writing()
        return self.result()

    def interrupted(self, stop: StopRequest) -> bool:
        """Whether this process wants all of them to meet before `next_stop`."""
        return stop.requested or self.minutes_due() or self.checkpoints.failed

    def next_stop(self) -> int:
        """The step at which there is something to do for all: evaluation, checkpoint or the end."""
        cadences = (self.config.eval_every_steps if self.heldout else 0, self.config.checkpoint_every_steps)
        return min([self.num_steps, *((self.at.step // every + 1) * every for every in cadences if every)])

    def one_step(self, number: int) -> tuple[StepInfo, float]:
        """Update `number` (from 0): batch, gradients, transport, updates. Also returns its FLOPs."""
        started = time.perf_counter()
        _seed_generators(derive_seed(self.seed, "step", number, self.mesh.data.rank), self.world.device)
        batch = self.batch(number)
        data_wait_s = time.perf_counter() - started
        totals, num_tokens, flops = self.count(batch)
        losses = self.compute_gradients(batch, totals)
        gradients = self.gradients()
        self.transport.reduce([local(gradient) for gradient in gradients])
        context = Context(step=number, num_steps=self.num_steps, gradients=gradients, loss=sum(losses.values()))
        for update in self.updates.values():
            update.apply(context)
        self.optimizer.zero_grad(set_to_none=True)
        return self.describe(context, losses, num_tokens, flops, data_wait_s, time.perf_counter() - started), flops

    def batch(self, number: int) -> Batch:
        """This rank's rows of a global batch; one iterator serves as long as the numbers follow one another."""
        if number != self.next_batch:
            rank, size = self.mesh.data.rank, self.mesh.data.size
            self.batches = self.objective.batches(self.model, first=number, rank=rank, world_size=size)
        self.next_batch = number + 1
        return next(self.batches)

    def count(self, batch: Batch) -> tuple[dict[str, float], int, float]:
        """What the whole batch amounts to, before any of it is computed: the normaliser of each loss term, tokens
        without padding, and the FLOPs of forward and backward.

        FLOPs are counted from the batch as it is: a token attends to itself and to what stands before it in its
        document; backward costs twice forward; what is computed again is not counted.
        """
        weights = self.objective.weights(batch)
        real = batch.segments_BT >= 0
        contexts = ((batch.positions_BT + 1) * real).sum()
        mine = [float(x) * self.mesh.speaks_for_rows for x in (*weights.values(), real.sum(), contexts)]
        *totals, num_tokens, context = self.mesh.world.sums(mine)
        flops = 3 * num_tokens * self.model.config.flops_per_token(context / max(1.0, num_tokens))
        return dict(zip(weights, totals, strict=True)), int(num_tokens), flops

    def compute_gradients(self, batch: Batch, totals: Mapping[str, float]) -> dict[str, float]:
        """This rank's share of the gradient of the whole batch, left in the parameters.

        Returns each loss term of the whole batch: its sum over all microbatches and ranks over its total weight.
        """
        scale = {name: 1.0 / total if total > 0 else 0.0 for name, total in totals.items()}
        sums = torch.zeros(len(scale), dtype=torch.float64, device=self.world.device)

        def loss_of(output: Tensor, part: Batch) -> Tensor:
            terms = self.objective.losses(output, part, self.model)
            scaled = torch.stack([terms[name] * scale[name] for name in scale])
            sums.add_(scaled.detach())
            return scaled.sum()

        self.runner.train(batch.to(self.world.device).split(self.config.num_microbatches), loss_of)
        sums *= self.mesh.tensor.is_first  # ranks of the tensor axis compute the same losses
        return dict(zip(scale, self.mesh.world.sums(sums.tolist()), strict=True))

    def gradients(self) -> list[Tensor]:
        """The gradients of this rank's trainable parameters, in one order on all ranks that hold them; zeros where
        nothing flowed."""
        for parameter in self.names:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = like_parameter(parameter.grad, parameter)
        self.runner.finish_gradients()
        return [parameter.grad for parameter in self.names if parameter.grad is not None]

    def describe(
        self,
        context: Context,
        losses: dict[str, float],
        num_tokens: int,
        flops: float,
        data_wait_s: float,
        step_time_s: float,
    ) -> StepInfo:
        """The finished step. Where several updates are made at a time, each is charged its share of the time."""
        share = self.mesh.world.size / self.world.size
        data_wait_s, step_time_s = data_wait_s * share, step_time_s * share
        return StepInfo(
            step=context.step + 1,
            loss=context.loss,
            losses=losses,
            grad_norm=context.grad_norm,
            learning_rate=context.learning_rate,
            num_tokens=num_tokens,
            tokens_per_s=num_tokens / step_time_s,
            mfu=self.utilisation(flops, step_time_s),
            data_wait_s=data_wait_s,
            step_time_s=step_time_s,
            skipped=context.skip,
            bytes_sent=self.transport.bytes_sent,
            scalars={**context.scalars, **self.turns.figures()},
        )

    def account(self, info: StepInfo, flops: float) -> None:
        """Count the step as done."""
        self.at.step = info.step
        self.at.loss = info.loss
        self.at.num_tokens += info.num_tokens
        self.at.train_time_s += info.step_time_s
        self.at.model_flops += flops

    def utilisation(self, flops: float, time_s: float) -> float:
        return flops / time_s / (self.peak_flops * self.world.size) if self.peak_flops and time_s else 0.0

    def report(self, info: StepInfo) -> None:
        """Show the step to controllers, metrics and display; hear from the checkpoint writer."""
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
        losses = heldout_losses(self.runner, self.objective, self.heldout, self.everyone)
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
        snapshot = Snapshot(
            step=self.at.step,
            weights=self.model.state_dict(),
            state=self.state(),
            gradients=list(self.names.values()),
        )
        self.checkpoints.save(snapshot, best=self.best())
        if self.recorder is not None:
            self.recorder.write(self.at.step, checkpoint_stall_s=time.perf_counter() - started)

    def finish_writing(self) -> None:
        """Return on all ranks when the last checkpoint is on disk."""
        self.checkpoints.wait()

    def state(self) -> dict[str, Any]:
        return {
            "position": dict(vars(self.at)),
            "updates": {name: update.state_dict() for name, update in self.updates.items()},
            "controllers": {name: controller.state_dict() for name, controller in self.controllers.items()},
            "transport": self.transport.state_dict(),
        }

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, whatever the layout and number of ranks that wrote it.

        All ranks read their parts of it (the run directory is shared); without one, copies of the model begin with
        the first one's weights.
        """
        self.checkpoints.prepare()
        step = self.checkpoints.latest_step(self.progress.note)
        if step:
            names = list(self.names.values())
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
        self.at = _Position(**state["position"])
        self.saved = (self.at.step, self.at.evaluated_step)
        for name, update in self.updates.items():
            update.load_state_dict(state["updates"][name])
        for name, controller in self.controllers.items():
            controller.load_state_dict(state["controllers"][name])
        if state["transport"]:  # empty when it does not fit this layout: it starts afresh
            self.transport.load_state_dict(state["transport"])

    def best(self) -> Best:
        return self.at.best if self.config.keep_best else Best()

    def result(self) -> TrainResult:
        watch, check = self.controllers.get("watch"), self.updates["finite_check"]
        return TrainResult(
            num_steps=self.at.step,
            loss=self.at.loss,
            heldout_loss=self.at.heldout_loss,
            best=self.best(),
            num_tokens=self.at.num_tokens,
            train_time_s=self.at.train_time_s,
            model_flops=self.at.model_flops,
            mfu=self.utilisation(self.at.model_flops, self.at.train_time_s),
            num_skipped=check.num_skipped if isinstance(check, FiniteCheck) else 0,
            num_events=dict(watch.num_events) if isinstance(watch, Watch) else {},
        )

    def close(self) -> None:
        self.checkpoints.close()
        if self.recorder is not None:
            self.recorder.close()


def _seed_generators(seed: int, device: torch.device) -> None:
    """Like `torch.manual_seed`, which queues a stack trace for every kind of device that is not there (2 ms)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
