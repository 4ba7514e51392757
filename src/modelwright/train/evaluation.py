"""Held-out evaluation inside a run: the objective's own losses, over a whole set, shared among the ranks."""

# PyTorch leaves the types of tolist, split and backward open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Callable, Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor

from modelwright.data.loader import PackedRows
from modelwright.parallel.mesh import Mesh
from modelwright.train.objective import Batch, Objective
from modelwright.train.runner import Executor


class HeldoutBatches(Sequence[Batch]):
    """Every held-out row once, `batch_rows` at a time, in the order on disk; the last batch may have fewer."""

    def __init__(self, rows: PackedRows, *, batch_rows: int) -> None:
        self.rows = rows
        self.batch_rows = batch_rows

    def __len__(self) -> int:
        return -(-self.rows.num_rows // self.batch_rows)

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
        return self.rows.gather(np.arange(first, min(first + self.batch_rows, self.rows.num_rows)))


@torch.no_grad()
def heldout_losses(
    executor: Executor, objective: Objective, batches: Sequence[Batch], mesh: Mesh, *, alive: Callable[[], None]
) -> dict[str, float]:
    """Each loss term over all batches, divided by its weight over all batches; 0 if nothing counts.

    Replica r takes batches r, r + replicas, ...; every rank gets the result. The model is left in training mode. alive:
    called before each batch.
    """
    names = list(objective.weights(batches[0]))
    sums = torch.zeros(2, len(names), dtype=torch.float64, device=mesh.world.device)
    copies, model = mesh.data, executor.model
    model.eval()
    for first in range(0, len(batches), copies.size):
        alive()
        counts = first + copies.rank < len(batches)  # all copies take part in every round: layers may be gathered
        batch = batches[first + copies.rank if counts else first].to(mesh.world.device)

        def add_losses(output: Tensor, part: Batch, counts: bool = counts) -> Tensor:
            losses = objective.losses(output, part, model)
            terms = torch.stack([losses[name] for name in names])
            sums[0] += terms * (counts and mesh.tensor.is_first)
            return terms.sum()

        executor.evaluate([batch], add_losses)
        weights = objective.weights(batch)
        sums[1] += torch.stack([weights[name] for name in names]) * (counts and mesh.speaks_for_rows)
    model.train()
    total, weight = mesh.world.all_reduce_sum(sums).tolist()
    return {name: total[i] / weight[i] if weight[i] > 0 else 0.0 for i, name in enumerate(names)}
