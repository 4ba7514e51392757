"""The rows of an objective's batches, step by step, with the extras that it measures before the step.

`LaidOutForward`: sums over rows that an objective evaluates with the model in training, before a step or in an
evaluation.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelwright.parallel.mesh import Mesh
from modelwright.train.objective import Batch, Objective
from modelwright.train.runner import Executor
from modelwright.train.runtime import Runtime


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


@dataclass
class BatchStream:
    """This rank's rows of the global batches. Consecutive steps share an iterator of the objective."""

    objective: Objective
    run: Runtime
    next_step: int = -1
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))

    def __call__(self, step: int) -> Batch:
        if step != self.next_step:  # the first one, or the first after a resume
            data = self.run.mesh.data
            self.batches = self.objective.batches(self.run.model, first=step, rank=data.rank, world_size=data.size)
        self.next_step = step + 1
        batch, run = next(self.batches), self.run
        num_parts = run.runner.num_microbatches(batch.num_groups)
        forward_sums = LaidOutForward(run.executor, run.mesh, num_parts=num_parts, evaluating=run.formats.evaluating)
        return self.objective.measure(batch, run.model, forward_sums)
