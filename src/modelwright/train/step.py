"""One training step, from batch to weights. Read `TrainStep.__call__` from top to bottom.

It owns microbatching, the normaliser, backward and the update. It never sees a loss formula: an `Objective` gives sums
and weights, a `GradientTransport` moves gradients, a list of `Update`s turns them into new weights. Knows nothing
about checkpoints or evaluation.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from modelwright.core.errors import ConfigError
from modelwright.core.seeds import derive_seed
from modelwright.memory.arena_run import StepArena
from modelwright.model.decoder import Decoder
from modelwright.ops.pieces import local
from modelwright.optim.build import build_optimizer
from modelwright.parallel.strategies.optimizer_in_backward import InBackward
from modelwright.optim.update import Context, SkipEmpty, Update, load_all, standard_updates
from modelwright.parallel.pipeline.rebalance import StageBalance, balance_tokens
from modelwright.parallel.grad_norm import global_norm, holders, like_parameter, parts_norm
from modelwright.parallel.mesh import Mesh, World
from modelwright.parallel.strategies.shared_memory import OneCopy
from modelwright.parallel.pipeline.runner import Pipeline
from modelwright.parallel.pipeline.partition import flop_costs
from modelwright.parallel.gradient_sync import ExactTransport, GradientTransport, Overlapping
from modelwright.parallel.strategies.local_sgd import LocalSteps
from modelwright.parallel.topology.gradient_sync import PlannedTransport
from modelwright.parallel.strategy import Turns
from modelwright.precision.layer_scales import LayerScales
from modelwright.precision.loss_scale import LossScale, loss_scale_for
from modelwright.precision.model import FollowMaxima, ModelFormats
from modelwright.train.techniques.adaptive_precision import CHANGES, TRIAL_TOKENS, AdaptivePrecision, machine_for
from modelwright.train.config import TrainConfig
from modelwright.train.exchange import Meeting, updates_in_backward
from modelwright.train.flops import dense_flops
from modelwright.train.monitors.replica_check import Quarantine
from modelwright.train.objective import Batch, Objective, StepInfo
from modelwright.train.techniques.out_of_memory import Microbatches, give_back_memory, in_the_way, is_out_of_memory
from modelwright.train.runner import Runner
from modelwright.train.techniques.loss_scaling import FollowLayers, FollowOverflows, Unscale
from modelwright.train.techniques.layer_sparsity import SparseUpdates, trainable
from modelwright.train.techniques.loss_spikes import Spikes
from modelwright.train.monitors.stragglers import OwnTime

GO_BACK = ("clip", "decay", "optimizer")
"""Updates whose state belongs to the weights: it goes back with them."""


@dataclass(kw_only=True)
class TrainStep:
    """Makes one update after the other, on all processes of a turn together.

    names: of the trainable parameters that this rank holds; own_time: of this rank's work in forward and backward.
    """

    runner: Runner
    objective: Objective
    config: TrainConfig
    num_steps: int
    turns: Turns
    everyone: Mesh
    seed: int
    peak_flops: float
    transport: GradientTransport
    formats: ModelFormats
    folder: Path
    layer_scales: LayerScales | None = None
    arena: StepArena = field(default_factory=StepArena)
    names: dict[Tensor, str] = field(init=False)
    num_holders: list[int] = field(init=False)
    optimizer: Optimizer = field(init=False)
    updates: dict[str, Update] = field(init=False)
    meeting: Meeting | None = field(init=False)
    in_backward: InBackward | None = field(init=False)
    microbatches: Microbatches = field(init=False)
    loss_scale: LossScale | None = field(init=False)
    follow_layers: FollowLayers | None = field(init=False)
    spikes: Spikes = field(init=False)
    stage_balance: StageBalance | None = field(init=False)
    adaptive: AdaptivePrecision | None = field(init=False)
    present: tuple[Batch, Mapping[str, float]] | None = None
    sparse: SparseUpdates | None = field(init=False)
    own_time: OwnTime = field(default_factory=OwnTime)
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))
    next_batch: int = -1

    def __post_init__(self) -> None:
        config = self.config
        self.names = {p: name for name, p in self.model.named_parameters() if p.requires_grad}
        self.num_holders = [
            holders(p, self.mesh, num_stages=self.runner.num_stages_with(name)) for p, name in self.names.items()
        ]
        self.optimizer = build_optimizer(
            self.model,
            config.optimizer,
            learning_rate=config.learning_rate,
            betas=config.betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            offload=config.offload_optimizer,
        )
        scaling = self.config.precision.loss_scale
        self.loss_scale = loss_scale_for(
            scaling, uses_fp16=config.precision.uses_fp16, count=lambda: self.model.config.num_parameters
        )
        self.follow_layers = None
        if self.layer_scales is not None:
            self.loss_scale = self.layer_scales.common
            self.follow_layers = FollowLayers(self.layer_scales, self.mesh.world)
        path, mesh = self.folder / "spikes.jsonl", self.mesh
        self.spikes = Spikes(config.spikes, self.largest, path, is_first=mesh.world.is_first)
        self.adaptive = self.adaptive_precision()
        self.in_backward, clip_norm = None, config.clip_norm
        if config.updates_in_backward:
            self.in_backward, clip_norm = self.updates_in_backward(), 0.0
        self.microbatches = Microbatches(config.num_microbatches, agree=self.largest, cuts=mesh.is_only_data_parallel)
        self.updates = standard_updates(
            self.optimizer,
            self.names,
            agree=self.largest,
            norm=self.norm,
            change_weights=(lambda optimizer: None) if self.in_backward else self.turns.step,
            max_skipped=config.max_skipped_steps,
            clip_norm=clip_norm,
            adaptive_clip=config.adaptive_clip,
            dynamic_decay=config.decay_in_force,
            schedule=config.schedule,
            peak_rate=config.learning_rate,
            before_check={"unscale": Unscale(self.loss_scale)} if self.loss_scale and self.scales_sums else {},
            after_check={
                **({"fp8_maxima": FollowMaxima(self.formats, self.maxima)} if config.precision.delays else {}),
                **self.follow_overflows() | {"empty_step": SkipEmpty()},
                "quarantine": self.quarantine(),
                "spikes": self.spikes,
                **({"adaptive_precision": self.adaptive} if self.adaptive else {}),
                **({"last_norm": self.in_backward} if self.in_backward and config.clip_norm else {}),
                "microbatches": self.microbatches,
            },
        )
        self.meeting = None
        if isinstance(self.transport, LocalSteps):
            self.meeting = Meeting(self.transport, list(self.names), self.optimizer)
            self.updates["meeting"] = self.meeting
        self.stage_balance = self.balance_of_stages()
        self.sparse = self.sparse_updates()
        if self.sparse:
            self.updates["sparse"] = self.sparse

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Of all processes of a turn, value by value; those that a process does not know are 0."""
        return self.mesh.world.maxima(*values)

    def largest(self, value: float) -> float:
        return self.mesh.world.maxima(value)[0]

    def norm(self, gradients: list[Tensor]) -> float:
        """Of the whole model's gradients; with local steps the root mean square of the ranks' own, so that all clip
        by one factor."""
        if self.in_backward:
            return self.in_backward.norm()
        if self.turns.divides:
            return parts_norm(gradients, self.mesh.world)
        norm = global_norm(gradients, self.mesh, num_holders=self.num_holders)
        if not isinstance(self.transport, LocalSteps):
            return norm
        return math.sqrt(self.mesh.reduce.sums([norm * norm])[0] / self.mesh.reduce.size)

    def updates_in_backward(self) -> InBackward:
        limit, holders, turns = self.config.clip_norm, self.num_holders, self.turns
        return updates_in_backward(
            self.optimizer, self.names, clip_norm=limit, num_holders=holders, turns=turns, transport=self.transport
        )

    def quarantine(self) -> Quarantine:
        path, is_first = self.folder / "quarantine.jsonl", self.mesh.world.is_first
        return Quarantine(self.config.quarantine, self.largest, path, is_first=is_first)

    def follow_overflows(self) -> dict[str, Update]:
        if self.loss_scale is None:
            return {}
        return {"loss_scale": self.follow_layers or FollowOverflows(self.loss_scale)}

    def adaptive_precision(self) -> AdaptivePrecision | None:
        config, mesh = self.config.precision.adaptive, self.mesh
        if config.kind == "none":
            return None
        num_copies = mesh.data.size * mesh.context.size * self.config.num_microbatches
        num_rows = self.config.batch_tokens // num_copies
        return AdaptivePrecision(
            config=config,
            formats=self.formats,
            names=self.names,
            num_holders=self.num_holders,
            optimizer=self.optimizer,
            world=self.mesh.world,
            machine=machine_for(self.folder, self.formats, self.world, num_rows=num_rows, tensor=mesh.tensor.size),
            trial=self.trial_loss,
            scale=lambda: self.loss_scale.value if self.loss_scale else 1.0,
            path=self.folder / CHANGES,
        )

    def balance_of_stages(self) -> StageBalance | None:
        if not self.config.balance.stages or not isinstance(self.runner, Pipeline):
            return None
        shape = self.model.config
        costs = flop_costs(shape, mean_context=shape.max_seq_len / 2)
        return StageBalance(costs, [len(layers) for layers in self.runner.layers], self.config.balance)

    def sparse_updates(self) -> SparseUpdates | None:
        config = self.config
        if not config.sparse.is_on:
            return None
        if not self.mesh.is_only_data_parallel:
            raise ConfigError("sparse: goes with whole copies of the model; leave the axes of `parallel` but data at 1")
        return SparseUpdates(
            config=config.sparse,
            model=self.model,
            optimizer=self.optimizer,
            betas=config.betas,
            eps=config.adam_eps,
            num_steps=self.num_steps,
            num_parts=config.num_microbatches,
            seed=self.seed,
            rank=self.mesh.data.rank,
            sum_ranks=lambda value: self.mesh.world.sums([value])[0],
            formats=self.formats,
            send_rows=self.transport.send_rows if isinstance(self.transport, ExactTransport) else None,
        )

    @property
    def scales_sums(self) -> bool:
        """Whether gradients may cross scaled: not where a transport keeps what it held back for another scale, and
        not where it must be seen in which layer a rank's own ones overflow."""
        return self.follow_layers is None and isinstance(self.transport, ExactTransport | PlannedTransport | OneCopy)

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

    def begin(self, step: int) -> None:
        """Once, when everything is as it was after `step` updates."""
        of_this_process = self.turns.begin(self.optimizer, step)
        if self.in_backward:
            self.in_backward.optimizer = of_this_process
        if self.meeting:
            self.meeting.begin(self.num_steps)
        self.model.train()

    def load_updates(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint says of the updates, by their names."""
        load_all(self.updates, state)

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Take over what belongs to earlier weights, which are in place already; all else goes on."""
        for name in GO_BACK:
            if name in self.updates:
                self.updates[name].load_state_dict(state[name])

    def __call__(self, number: int) -> tuple[StepInfo, float]:
        """Update `number` (from 0): batch, gradients, transport, updates. Also returns its FLOPs."""
        started = time.perf_counter()
        seed = derive_seed(self.seed, "step", number, self.mesh.data.rank)
        _seed_generators(seed, self.world.device)
        self.formats.begin_step()
        if self.adaptive:
            self.adaptive.begin_step(number)
        batch = self.batch(number)
        data_wait_s = time.perf_counter() - started
        if self.sparse:
            batch = self.sparse.begin_step(batch, number)
        batch = batch.padded(self.config.num_microbatches)  # with rows of padding where there are fewer rows
        totals, num_tokens, flops, executed = self.count(batch)
        self.present = batch, totals
        if self.in_backward:
            self.updates["learning_rate"].apply(Context(number, self.num_steps, [], 0.0))
        while (losses := self.compute_gradients(batch, totals)) is None:
            self.begin_again(seed)
        gradients = self.gradients()
        if self.loss_scale and not self.scales_sums:
            self.unscale([local(one) for one in gradients], self.loss_scale)
        exchange_s = _seconds(lambda: self.transport.reduce([local(gradient) for gradient in gradients]))
        context = Context(
            step=number,
            num_steps=self.num_steps,
            gradients=self.turns.part(gradients),
            loss=sum(losses.values()),
            is_empty=not any(totals.values()),
            scalars={"executed_flops": executed},
        )
        for update in self.updates.values():
            took_s = _seconds(lambda update=update: update.apply(context))
            exchange_s += took_s if update is self.meeting else 0.0
        self.optimizer.zero_grad(set_to_none=True)
        times = {"data_wait_s": data_wait_s, "exchange_s": exchange_s, "step_time_s": time.perf_counter() - started}
        flops = context.scalars["executed_flops"] if self.sparse else flops
        return self.describe(context, losses, num_tokens, flops, times), flops

    def loss_scale_history(self) -> dict[str, Any]:
        """The scale's state: value, overflows, changes; of several layers under `layers` (`LayerScales`)."""
        if self.loss_scale is None:
            return {}
        layers = {"layers": self.layer_scales.state_dict()} if self.layer_scales else {}
        return self.loss_scale.state_dict() | layers

    def batch(self, number: int) -> Batch:
        """This rank's rows of a global batch; one iterator serves as long as the numbers follow one another."""
        if number != self.next_batch:
            rank, size = self.mesh.data.rank, self.mesh.data.size
            self.batches = self.objective.batches(self.model, first=number, rank=rank, world_size=size)
        self.next_batch = number + 1
        return next(self.batches)

    def count(self, batch: Batch) -> tuple[dict[str, float], int, float, float]:
        """What the whole batch amounts to, before any of it is computed: the normaliser of each loss term, tokens
        without padding, the FLOPs of forward and backward, and those that a step that leaves nothing out executes.

        FLOPs are counted from the batch as it is: a token attends to itself and to what stands before it in its
        document; backward costs twice forward; what is computed again is not counted. The first count is that of real
        tokens, the second has padding too, and a head for labels only.
        """
        weights = self.objective.weights(batch)
        real = batch.segments_BT >= 0
        contexts = ((batch.positions_BT + 1) * real).sum()
        executed = dense_flops(self.model.config, batch)
        mine = [float(x) * self.mesh.speaks_for_rows for x in (*weights.values(), real.sum(), contexts, executed)]
        *totals, num_tokens, context, executed = self.mesh.world.sums(mine)
        flops = 3 * num_tokens * self.model.config.flops_per_token(context / max(1.0, num_tokens))
        return dict(zip(weights, totals, strict=True)), int(num_tokens), flops, executed

    def compute_gradients(self, batch: Batch, totals: Mapping[str, float]) -> dict[str, float] | None:
        """This rank's share of the gradient of the whole batch, left in the parameters.

        Returns each loss term of the whole batch: its sum over all microbatches and ranks over its total weight. None
        on all ranks when memory ran out on any and the step can be made again.
        """
        scale = {name: 1.0 / total if total > 0 else 0.0 for name, total in totals.items()}
        sums, failed = torch.zeros(len(scale), dtype=torch.float64, device=self.world.device), 0.0
        num_parts, seen = self.microbatches.parts_of(batch.num_rows), itertools.count(1)

        def loss_of(output: Tensor, part: Batch) -> Tensor:
            terms = self.objective.losses(output, part, self.model)
            scaled = torch.stack([terms[name] * scale[name] for name in scale])
            sums.add_(scaled.detach())
            if next(seen) == num_parts:
                self.before_last_backward(sums)
            return scaled.sum() * (self.loss_scale.value if self.loss_scale else 1.0)

        batch = balance_tokens(batch, num_parts) if self.config.balance.tokens and num_parts > 1 else batch
        started = time.perf_counter()
        try:
            self.runner.train(batch.to(self.world.device).split(num_parts), loss_of)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or self.config.guards.out_of_memory == "stop":
                raise
            self.microbatches.failed(batch.num_rows, error, self.in_the_way)
            failed = 1.0
        self.own_time.add_step(time.perf_counter() - started)
        if self.stage_balance and isinstance(self.runner, Pipeline):
            self.stage_balance.observe(self.runner.timeline.spans())
        sums *= self.mesh.tensor.is_first  # ranks of the tensor axis compute the same losses
        *losses, num_failed = self.mesh.world.sums([*sums.tolist(), failed])
        return None if num_failed else dict(zip(scale, losses, strict=True))

    def unscale(self, gradients: list[Tensor], scale: LossScale) -> None:
        """Before they cross."""
        if self.follow_layers is not None:
            self.follow_layers.unscale(gradients, [name for p, name in self.names.items() if p.grad is not None])
        else:
            torch._foreach_mul_(gradients, 1.0 / scale.value)  # pyright: ignore

    @torch.no_grad()
    def trial_loss(self) -> float:
        """Of each rank's first rows of the present batch, with weights and formats as they are now."""
        assert self.present is not None
        batch, totals = self.present
        batch = batch.take(torch.arange(min(batch.num_rows, -(-TRIAL_TOKENS // batch.input_ids_BT.shape[1]))))
        scale = {name: 1.0 / total if total > 0 else 0.0 for name, total in totals.items()}
        found = torch.zeros((), dtype=torch.float64, device=self.world.device)

        def loss_of(output: Tensor, part: Batch) -> Tensor:
            terms = self.objective.losses(output, part, self.model)
            loss = torch.stack([terms[name] * scale[name] for name in scale]).sum()
            found.add_(loss * self.mesh.tensor.is_first)
            return loss

        self.runner.evaluate([batch.to(self.world.device)], loss_of)
        return self.mesh.world.sums([float(found)])[0]

    def before_last_backward(self, sums: Tensor) -> None:
        """Let the transport begin with gradients as they are finished, where no other part of the loop changes them, or
        weights be changed in backward, unless a loss is not finite or there is none."""
        if self.in_backward:
            assert self.present is not None
            is_wrong = not math.isfinite(float(sums.sum())) or not any(self.present[1].values())
            if self.largest(is_wrong) == 0:
                self.in_backward.arm()
        elif self.overlaps and isinstance(self.transport, Overlapping):
            self.transport.arm(trainable(self.names))

    @property
    def overlaps(self) -> bool:
        overlaps = self.config.transport.overlap and self.mesh.is_only_data_parallel
        return overlaps and isinstance(self.transport, Overlapping) and (self.loss_scale is None or self.scales_sums)

    @property
    def in_the_way(self) -> str:
        """What keeps a step that was too large from being made again, "" when nothing does."""
        if self.in_backward and self.in_backward.has_begun:
            return "update_in_backward has changed weights in this step already"
        sends = self.overlaps and not isinstance(self.transport, OneCopy)
        return in_the_way(self.mesh, sends_in_backward=sends, updates_in_backward=self.in_backward is not None)

    def begin_again(self, seed: int) -> None:
        """After a step that was too large on some rank: as if it had not been tried, but in smaller microbatches."""
        self.microbatches.cut_smaller()
        for parameter in self.names:
            parameter.grad = None
        if isinstance(self.transport, OneCopy):
            self.transport.abandon()
        if self.in_backward:
            self.in_backward.abandon()
        give_back_memory(self.world.device)
        self.arena.abandon()
        _seed_generators(seed, self.world.device)
        self.formats.begin_step()

    def gradients(self) -> list[Tensor]:
        """The gradients of the parameters that this rank trains, in one order on all ranks that hold them; zeros where
        nothing flowed. One that takes no part in the step has none, is not sent and not updated; none have where
        weights are changed in backward."""
        if self.in_backward:
            self.in_backward.finish()
            return []
        for parameter in trainable(self.names):
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
        times: Mapping[str, float],
    ) -> StepInfo:
        """The finished step. Where several updates are made at a time, each is charged its share of the time."""
        share = self.mesh.world.size / self.world.size
        times = {name: seconds * share for name, seconds in times.items()}
        return StepInfo(
            step=context.step + 1,
            loss=context.loss,
            losses=losses,
            grad_norm=context.grad_norm,
            learning_rate=context.learning_rate,
            num_tokens=num_tokens,
            tokens_per_s=num_tokens / times["step_time_s"],
            mfu=self.utilisation(flops, times["step_time_s"]),
            peak_flops=self.peak_flops,
            **times,
            skipped=context.skip,
            bytes_sent=None,  # the course counts them: not all are a step's
            scalars={**context.scalars, **self.turns.figures()},
        )

    def utilisation(self, flops: float, time_s: float) -> float:
        """0 without a peak rate. What is faster than the peak shows that it was measured too low, and becomes it."""
        if not (self.peak_flops and time_s):
            return 0.0
        reached = flops / time_s / self.world.size
        self.peak_flops = max(self.peak_flops, reached)
        return reached / self.peak_flops


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _seed_generators(seed: int, device: torch.device) -> None:
    """Like `torch.manual_seed`, which queues a stack trace for every kind of device that is not there (2 ms)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
