"""Held-out evaluation inside a run: the objective's own losses, over a whole set, shared among the ranks."""

from collections.abc import Sequence

import numpy as np
import torch

from modelwright.data.loader import PackedRows
from modelwright.model.decoder import Decoder
from modelwright.parallel.mesh import World
from modelwright.train.objective import Batch, Objective, forward


class HeldoutBatches(Sequence[Batch]):
    """Every held-out row once, `batch_rows` at a time, in the order on disk; the last batch may have fewer."""

    def __init__(self, rows: PackedRows, *, batch_rows: int) -> None:
        self.rows = rows
        self.batch_rows = batch_rows

    def __len__(self) -> int:
        return -(-self.rows.num_rows // self.batch_rows)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self.batch_rows
        return self.rows.gather(np.arange(first, min(first + self.batch_rows, self.rows.num_rows)))


@torch.no_grad()
def heldout_losses(model: Decoder, objective: Objective, batches: Sequence[Batch], world: World) -> dict[str, float]:
    """Each loss term over all batches, divided by its weight over all batches; 0 where nothing counts.

    Rank r takes batches r, r + size, ...; every rank gets the result. The model is left in training mode.
    """
    names = list(objective.weights(batches[0]))
    sums = torch.zeros(2, len(names), dtype=torch.float64, device=world.device)
    model.eval()
    for index in range(world.rank, len(batches), world.size):
        weights = objective.weights(batches[index])
        batch = batches[index].to(world.device)
        losses = objective.losses(forward(model, batch), batch, model)
        sums[0] += torch.stack([losses[name] for name in names])
        sums[1] += torch.stack([weights[name] for name in names]).to(world.device)
    model.train()
    total, weight = world.all_reduce_sum(sums).tolist()
    return {name: total[i] / weight[i] if weight[i] > 0 else 0.0 for i, name in enumerate(names)}
