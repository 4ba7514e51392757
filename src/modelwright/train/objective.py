"""`Objective`: the loss of a training; `Batch` and `BatchSource`: its data; `ModelLayout`: its model, for rollouts.

An objective returns sums and the weights that normalize them; the training step divides. It never divides itself, so
that any number of microbatches and ranks gives the gradient of the whole batch.

Forward and backward of one batch: `Runner` splits it into microbatches and passes them to an `Executor`, which runs
them through the model, whole (`WholeModel`) or as a pipeline
(`parallel/pipeline/runner.py`); gradients end up in the parameters. Forward alone: `LaidOutForward`, and the held-out
evaluation inside a run, which the ranks share. `seed_generators` makes all of it repeatable.
"""

# PyTorch leaves the types of tolist, split and backward open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, overload

import numpy as np
import torch
from torch import Tensor, nn

from modelwright.core.compatibility import WHOLE_ROWS
from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.loader import PackedRows
from modelwright.model.adapters import attach_adapters
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.model.vision.llava import inserted_images
from modelwright.parallel.context_parallel import shard_sequence
from modelwright.parallel.mesh import ContextAttention, Mesh, ParallelConfig, World, build_mesh, single
from modelwright.parallel.pipeline.balance import StageSpan
from modelwright.parallel.sharded_weights import restore_weights, scatter_gradients, whole_weights
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.policy import PrecisionConfig

Batch = TokenBatch
"""Rows with named extra tensors, which the loop splits (never within a group of rows), moves and runs the model on."""


Metric = tuple[Tensor, Tensor]
"""A sum and its count, which divides it; scalars without gradient on the device of the batch."""


class ForwardSums(Protocol):
    """Evaluates rows with the model in training, under any layout."""

    def __call__(self, rows: Batch, sums_of: Callable[[Tensor, Batch], Tensor], *, size: int) -> Tensor:
        """Returns the sum of `sums_of` over all rows, [size] in FP64, on all ranks. `sums_of` gets the hidden states
        [B, T, D] of some of the rows at a time. In training the rows are those of all replicas.
        """
        ...


@dataclass(frozen=True)
class Terms:
    """The loss terms and metrics of one microbatch."""

    losses: Mapping[str, Tensor]
    """Un-normalized sums, scalars, under the keys of `Objective.weights`."""
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    """Figures for the record, under `Objective.metric_names`. Sums and counts are added up over microbatches and ranks
    and divided once; a figure whose count is 0 is left out of the record."""


class TermSums:
    """Adds up the terms of microbatches, and afterwards of ranks: loss terms, then the sum and count of each metric.

    factors: multipliers of the loss terms. names: of the metrics.
    """

    def __init__(self, factors: Mapping[str, float], names: Sequence[str], device: torch.device) -> None:
        self.factors = factors
        self.names = names
        # FP64, because FP32 counts tokens exactly up to 2^24 only.
        self.vector = torch.zeros(len(factors) + 2 * len(names), dtype=torch.float64, device=device)
        """All sums in one tensor, for one all-reduce."""
        self.losses, self._metrics = self.vector[: len(factors)], self.vector[len(factors) :]

    def add(self, terms: Terms, *, counts: bool = True) -> Tensor:
        """The loss terms times their factors, [terms], with gradients. counts: false to leave them out of the sums."""
        losses = torch.stack([terms.losses[name] * factor for name, factor in self.factors.items()])
        self.losses.add_(losses.detach(), alpha=float(counts))
        if set(terms.metrics) != set(self.names):
            raise ValueError(
                f"the metrics {sorted(terms.metrics)} are not those that metric_names declares, {sorted(self.names)}"
            )
        if self.names:
            parts = [part.detach().double() for name in self.names for part in terms.metrics[name]]
            self._metrics.add_(torch.stack(parts), alpha=float(counts))
        return losses

    def read(self, totals: Sequence[float]) -> tuple[dict[str, float], dict[str, float]]:
        """The losses and the metrics from `vector`, added up over the ranks."""
        losses, rest = dict(zip(self.factors, totals, strict=False)), totals[len(self.factors) :]
        pairs = zip(self.names, rest[::2], rest[1::2], strict=True)
        return losses, {name: total / count for name, total, count in pairs if count}


HEADS = "heads."
"""Prefix of the parameter names of `Decoder.heads`."""


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """The layout of the model in training, for objectives that generate with it.

    own_modules: those of the objective, which are part of the whole model.
    """

    mesh: Mesh
    precision: PrecisionConfig
    own_modules: Callable[[ModelConfig], Mapping[str, nn.Module]] = lambda config: {}

    @property
    def world(self) -> World:
        """All ranks that make one update together."""
        return self.mesh.world

    @contextmanager
    def whole_model(self, model: Decoder) -> Generator[Decoder]:
        """The whole model, with the present weights and number formats of `model`, this rank's part of it.

        Where every rank holds all weights this is `model` itself. Otherwise it is a copy for the time of the block:
        weights are gathered one at a time, by all ranks together, so that a rank needs memory for the whole model but
        not for gradients or optimizer states of it. Do not change its weights.
        """
        if self.mesh.is_only_data_parallel:
            yield model
            return
        with torch.device("meta"):
            whole = Decoder(model.config)
            for name, module in self.own_modules(model.config).items():
                whole.heads[name] = module
            # `attach_adapters` would compute the fingerprint of the base from its values, which a skeleton lacks.
            whole.base_fingerprint = model.base_fingerprint
            attach_adapters(whole, model.adapters, seed=0)
        names = {name for name, _ in whole.named_parameters()}
        restore_weights(whole, (pair for pair in whole_weights(model, self.mesh) if pair[0] in names))
        whole.requires_grad_(False)
        if model.ends.stream_dtype is not None:  # while a model is evaluated in FP32 it has no formats
            ModelPrecision(whole, self.precision)
        yield whole


def one_process() -> ModelLayout:
    """The layout of a model that this process has alone, in FP32."""
    return ModelLayout(mesh=build_mesh(single(), ParallelConfig()), precision=PrecisionConfig(policy="fp32"))


class Objective(Protocol):
    """The loss of a training, and the rows that it is computed on."""

    needs: ClassVar[frozenset[str]] = frozenset({WHOLE_ROWS})
    """Properties of a run that it relies on (`core/compatibility.py`). An objective whose terms are sums over tokens
    can do with parts of rows, and says so by an empty set."""

    trains_decoder: ClassVar[bool] = True
    """False to freeze the decoder's weights, so that only `own_modules` learn."""

    metric_names: Sequence[str] = ()
    """Names of the metrics that `losses` returns with the terms, the same in every batch: ranks that do not compute the
    loss have to know them too."""

    def own_modules(self, config: ModelConfig) -> Mapping[str, nn.Module]:
        """Modules of this objective that are trained with a model of this shape: a value head, a reward head.

        They become `model.heads`, where the optimizer, the layout and checkpoints treat them as parameters of the
        model; `losses` calls them by `model.head_output(name, hidden)`. Initial values may be drawn from PyTorch's
        default generator, which is seeded. Buffers must be equal on all ranks and are in the checkpoint; they need a
        model whose weights are in memory. Projections (`model.decoder.Linear`) in them follow the number formats of the
        run.
        """
        return {}

    def own_flops(self, batch: Batch) -> float:
        """FLOPs of `own_modules` for the batch, forward and backward; 0 where the decoder's dwarf them."""
        return 0.0

    def begin(self, layout: ModelLayout) -> None:
        """Called on all ranks whenever the model has been laid out, before the first batch. An objective that rolls out
        keeps the layout, because it generates with `layout.whole_model(model)`. Must not communicate.
        """

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's rows of the global batches `first`, `first + 1`, ..., without end.

        The global batch is a function of its number, of the weights and of this objective's state, whatever the number
        of ranks. `model` is this rank's part, with its weights at the time when a batch is requested: rollouts are
        generated here, and frozen models evaluate the rows here (`train/frozen_model.py`).
        """
        ...

    def prepare(self, batch: Batch, model: Decoder) -> Batch:
        """Returns held-out rows with the extras that `losses` reads, such as a reference model's log-probabilities;
        rows of `batches` come with them. Called on all ranks together, without gradients.
        """
        return batch

    def measure(self, batch: Batch, model: Decoder, forward_sums: ForwardSums) -> Batch:
        """Returns the batch with extras that depend on the present model and on the whole batch, such as a KL
        divergence. Called on all ranks together, without gradients, before the step and after `batches` or `prepare`.
        """
        return batch

    def weights(self, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the weight of each loss term in this batch, from masks only. Weights of parts of a batch add up."""
        ...

    def losses(self, output: Tensor, batch: Batch, model: Decoder) -> Terms:
        """Returns the loss terms and metrics of one microbatch; `output` is its hidden states [B, T, D]."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that `batches` needs to continue with the same bits: a rollout, a KL coefficient.

        Tensors and JSON values; empty by default. All values are equal on all ranks, except for tensors under the key
        `rows`, whose first dimension is this data rank's rows: a checkpoint has those of the global batch, and any
        number of data ranks can resume with them.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, before the first batch after a resume."""


class BatchSource(Protocol):
    """The source that objectives read from: a pure function from a batch number to its rows."""

    @property
    def num_batches_per_epoch(self) -> int: ...

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch: ...


def forward(model: Decoder, batch: Batch) -> Tensor:
    """Hidden states [B, T, D] of packed rows; attention stays within each document."""
    insert = inserted_images(model, batch.input_ids_BT, batch.extras)
    attend = packed_attend(batch.segments_BT, model.config.windows)
    return model(batch.input_ids_BT, batch.positions_BT, attend, insert=insert)


LossFn = Callable[[Tensor, Batch], Tensor]
"""Maps the model's output and the rows (or the slice of them) that it belongs to to a scalar to differentiate."""


class Executor(Protocol):
    """`loss_of` is called once for each microbatch, in order, on the ranks that hold the model's output."""

    model: Decoder
    """This rank's part of the model; its parameters have the names of the whole model."""

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Layers of each pipeline stage; empty without a pipeline."""
        ...

    def stage_spans(self) -> list[StageSpan]:
        """The spans of this rank's pipeline stages in the newest training step."""
        ...

    def num_stages_with(self, name: str) -> int:
        """Number of pipeline stages that hold this parameter."""
        ...

    def train(self, parts: Sequence[Batch], loss_of: LossFn) -> None:
        """Forward and backward of all microbatches of a step."""
        ...

    def finish_gradients(self) -> None:
        """Called after the last backward: sum the gradients of a parameter that several stages hold."""
        ...

    def evaluate(self, parts: Sequence[Batch], loss_of: LossFn) -> None:
        """Forward only; call under `no_grad`. Microbatches must have the same number of rows on all ranks."""
        ...


class Runner(Protocol):
    """Forward and backward of one batch on this rank."""

    @property
    def microbatches(self) -> int:
        """The configured number of microbatches."""
        ...

    def num_microbatches(self, num_groups: int) -> int:
        """The number of microbatches for a batch of this many groups of rows."""
        ...

    def train(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        begin: Callable[[], None],
        before_last_backward: Callable[[], None],
        num_parts: int = 0,
    ) -> bool:
        """Leave this rank's gradients in `.grad`. Returns whether the batch fitted into memory on this rank; if it did
        not on any, the step calls `shrink_microbatches` on all, drops the gradients and calls this method again.

        loss_fn: called once for each microbatch, on the ranks that hold the model's output.
        begin: called before the first microbatch.
        before_last_backward: called once `loss_fn` has seen the last microbatch.
        num_parts: microbatches of this batch; 0 for `num_microbatches`.
        """
        ...

    def shrink_microbatches(self) -> None:
        """Agree with the other ranks on smaller microbatches for the next attempt and all later batches."""
        ...


@dataclass(kw_only=True)
class MicrobatchRunner:
    """Splits each batch into `microbatches` parts of consecutive row groups, with padding if there are too few."""

    executor: Executor
    microbatches: int
    device: torch.device

    def num_microbatches(self, num_groups: int) -> int:
        return self.microbatches

    def train(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        begin: Callable[[], None],
        before_last_backward: Callable[[], None],
        num_parts: int = 0,
    ) -> bool:
        """See `Runner`."""
        num_parts = num_parts or self.microbatches
        num_seen = 0

        # The last loss is known: its backward completes the gradients, so the strategy can start to send them while
        # they come. A pipeline's schedule interleaves passes, so only counting the losses tells which is the last.
        def last_aware(output: Tensor, microbatch: Batch) -> Tensor:
            nonlocal num_seen
            loss = loss_fn(output, microbatch)
            num_seen += 1
            if num_seen == num_parts:
                before_last_backward()
            return loss

        begin()
        self.executor.train(batch.padded(num_parts).to(self.device).split(num_parts), last_aware)
        return True

    def shrink_microbatches(self) -> None:
        """Never called: `train` returns true or raises."""
        raise AssertionError("this runner cannot repeat a batch")


@dataclass(eq=False)
class WholeModel:
    """The ranks of `context` share the tokens of each row; all layers are on this rank. context_attention: how they
    attend to each other's tokens. scatters_each: gradients that FSDP shards are scattered after each microbatch (ZeRO-2
    and 3), not once per step.
    """

    model: Decoder
    context: World
    scatters_each: bool
    context_attention: ContextAttention = "all_gather"
    layers_per_stage: tuple[int, ...] = ()

    def stage_spans(self) -> list[StageSpan]:
        return []

    def num_stages_with(self, name: str) -> int:
        return 1

    def finish_gradients(self) -> None: ...

    def train(self, parts: Sequence[Batch], loss_of: LossFn) -> None:
        for number, part in enumerate(parts, start=1):
            # FSDP must know before the backward whether it scatters: otherwise whole gradients add up locally.
            scatter_gradients(self.model, self.scatters_each or number == len(parts))
            self._loss(part, loss_of).backward()

    def evaluate(self, parts: Sequence[Batch], loss_of: LossFn) -> None:
        for part in parts:
            self._loss(part, loss_of)

    def _loss(self, part: Batch, loss_of: LossFn) -> Tensor:
        attend, part = shard_sequence(part, self.context, self.context_attention, self.model.config.windows)
        insert = inserted_images(self.model, part.input_ids_BT, part.extras)
        return loss_of(self.model(part.input_ids_BT, part.positions_BT, attend, insert=insert), part)


@dataclass(frozen=True)
class LaidOutForward:
    """A `ForwardSums` by an executor. num_parts: microbatches of the rows. own_replica: sum over the rows of this
    rank's replica alone. evaluating: context of the evaluation, which sets number formats.
    """

    executor: Executor
    mesh: Mesh
    num_parts: int = 1
    own_replica: bool = False
    evaluating: Callable[[], AbstractContextManager[None]] = nullcontext

    @torch.no_grad()
    def __call__(self, rows: Batch, sums_of: Callable[[Tensor, Batch], Tensor], *, size: int) -> Tensor:
        """See `ForwardSums`. All ranks call it together."""
        mesh, model = self.mesh, self.executor.model
        # A row of sums for each replica, so that one all-reduce serves both kinds of sums.
        sums_RN = torch.zeros(mesh.data.size, size, dtype=torch.float64, device=mesh.world.device)

        def add(output: Tensor, part: Batch) -> Tensor:
            sums_N = sums_of(output, part).double()
            sums_RN[mesh.data.rank].add_(sums_N, alpha=float(mesh.tensor.is_first))  # its ranks compute the same
            return sums_N.sum()

        was_training = model.training
        model.eval()
        with self.evaluating():
            parts = rows.padded(self.num_parts).to(mesh.world.device).split(self.num_parts)
            self.executor.evaluate(parts, add)
        model.train(was_training)
        mesh.world.all_reduce_sum(sums_RN)
        return sums_RN[mesh.data.rank] if self.own_replica else sums_RN.sum(dim=0)


@dataclass(eq=False)
class HeldoutBatches(Sequence[Batch]):
    """Every held-out row once, in the order on disk, in batches of at most `batch_rows` rows or groups."""

    rows: PackedRows
    batch_rows: int

    def __len__(self) -> int:
        return -(-self.rows.num_groups // self.batch_rows)

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self.batch_rows
        return self.rows.gather(np.arange(first, min(first + self.batch_rows, self.rows.num_groups)))


@dataclass(frozen=True)
class HeldoutResult:
    """The losses and metrics of a held-out set."""

    losses: Mapping[str, float]
    """Each loss term over all batches, divided by its weight over all batches; 0 if nothing counts."""
    metrics: Mapping[str, float]
    """The objective's figures over all batches."""

    def as_record(self) -> dict[str, float]:
        """Returns loss terms as `heldout_loss/<name>` if there are several, and metrics as `heldout/<name>`."""
        losses = self.losses if len(self.losses) > 1 else {}
        terms = {f"heldout_loss/{name}": value for name, value in losses.items()}
        return terms | {f"heldout/{name}": value for name, value in self.metrics.items()}

    @property
    def loss(self) -> float:
        """The sum of all terms."""
        return sum(self.losses.values())


@torch.no_grad()
def evaluate_heldout(
    executor: Executor, objective: Objective, batches: Sequence[Batch], mesh: Mesh, *, alive: Callable[[], None]
) -> HeldoutResult:
    """Losses and metrics of the objective over all batches.

    Replica r takes batches r, r + replicas, ...; every rank gets the result. The model is left in training mode. alive:
    called before each batch.
    """
    copies, model, device = mesh.data, executor.model, mesh.world.device
    sums, weight_sums = TermSums({}, (), device), torch.zeros(0, dtype=torch.float64, device=device)
    is_own = True

    # A term is weighed where it is computed, by the same part of the rows: one that does not depend on the token, such
    # as a reward, comes once from every rank of the context axis, and so does its weight.
    def add(output: Tensor, part: Batch) -> Tensor:
        counts, weights = is_own and mesh.tensor.is_first, objective.weights(part)
        weight_sums.add_(torch.stack([weights[name] for name in sums.factors]), alpha=float(counts))
        return sums.add(objective.losses(output, part, model), counts=counts).sum()

    model.eval()
    for first in range(0, len(batches), copies.size):
        alive()
        # All copies take part in every round, because layers may be gathered; past the end they repeat a batch that
        # another copy counts.
        is_own = first + copies.rank < len(batches)
        batch = objective.prepare(batches[first + copies.rank if is_own else first].to(device), model)
        batch = objective.measure(batch, model, LaidOutForward(executor, mesh, own_replica=True))
        if not sums.factors:  # known from any batch, on ranks that compute no loss, too: all of them add up
            names = objective.weights(batch)
            sums = TermSums(dict.fromkeys(names, 1.0), objective.metric_names, device)
            weight_sums = weight_sums.new_zeros(len(names))
        executor.evaluate([batch], add)
    model.train()
    totals = mesh.world.all_reduce_sum(torch.cat([sums.vector, weight_sums])).tolist()
    losses, metrics = sums.read(totals[: len(sums.vector)])
    weights = dict(zip(losses, totals[len(sums.vector) :], strict=True))
    return HeldoutResult(
        {name: loss / weights[name] if weights[name] > 0 else 0.0 for name, loss in losses.items()}, metrics
    )


def seed_generators(seed: int, device: torch.device) -> None:
    """Like `torch.manual_seed`, but without the stack trace that it queues for every absent kind of device (2 ms)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that `seed_generators` seeds."""
    states = [torch.default_generator.get_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
