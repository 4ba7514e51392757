"""`Objective`: the loss of a training; `Batch` and `BatchSource`: its data; `ModelLayout`: its model, for rollouts.

An objective returns sums and the weights that normalize them; the training step divides. It never divides itself, so
that any number of microbatches and ranks gives the gradient of the whole batch.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from modelwright.core.compatibility import WHOLE_ROWS
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.adapters import attach_adapters
from modelwright.model.attention import packed_attend
from modelwright.model.config import ModelConfig
from modelwright.model.decoder import Decoder
from modelwright.model.vision.llava import inserted_images
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import Mesh, World, build_mesh, single
from modelwright.parallel.sharded_weights import restore_weights, whole_weights
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
