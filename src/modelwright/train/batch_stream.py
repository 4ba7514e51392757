"""The rows of an objective's batches, step by step, with what it measures of them before the step."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from modelwright.train.forward_sums import LaidOutForward
from modelwright.train.objective import Batch, Objective
from modelwright.train.runtime import Runtime


@dataclass
class BatchStream:
    """This rank's rows of the global batches. One iterator of the objective serves consecutive steps; another step
    starts a new one.
    """

    objective: Objective
    run: Runtime
    next_step: int = -1
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))

    def __call__(self, step: int) -> Batch:
        if step != self.next_step:
            data = self.run.mesh.data
            self.batches = self.objective.batches(self.run.model, first=step, rank=data.rank, world_size=data.size)
        self.next_step = step + 1
        batch, run = next(self.batches), self.run
        num_parts = run.runner.num_microbatches(batch.num_groups)
        forward_sums = LaidOutForward(run.executor, run.mesh, num_parts=num_parts, evaluating=run.formats.evaluating)
        return self.objective.measure(batch, run.model, forward_sums)
