"""Forward and backward of one batch: `Runner` splits it into microbatches and passes them to an `Executor`.

An `Executor` runs microbatches through the model, whole (`WholeModel`) or as a pipeline
(`parallel/pipeline/runner.py`); gradients end up in the parameters. `LaidOutForward` only evaluates, and
`seed_generators` makes both repeatable.
"""

# PyTorch leaves the types of tolist, split and backward open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modelwright.model.decoder import Decoder
from modelwright.model.vision.llava import inserted_images
from modelwright.parallel.config import ContextAttention
from modelwright.parallel.context_parallel import shard_sequence
from modelwright.parallel.mesh import Mesh, World
from modelwright.parallel.pipeline.balance import StageSpan
from modelwright.parallel.sharded_weights import scatter_gradients
from modelwright.train.objective import Batch

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


def seed_generators(seed: int, device: torch.device) -> None:
    """Like `torch.manual_seed`, but without the stack trace that it queues for every absent kind of device (2 ms)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that `seed_generators` seeds."""
    states = [torch.default_generator.get_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
