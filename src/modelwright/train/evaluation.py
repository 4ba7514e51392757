"""Held-out evaluation inside a run: the objective's losses and metrics over a whole set, shared among the ranks."""

# PyTorch leaves the types of tolist, split and backward open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor

from modelwright.data.rows.loader import PackedRows
from modelwright.parallel.mesh import Mesh
from modelwright.train.objective import Batch, Objective, TermSums
from modelwright.train.runner import Executor, LaidOutForward


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
