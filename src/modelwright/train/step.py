"""One training step, from batch to weights. Read `TrainStep.__call__` from top to bottom.

The objective defines the loss, the runner executes forward and backward, the strategy decides how ranks share gradients
and updates. Everything else that can happen in a step is a `Technique` (technique.py); build.py lists them in order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from modelwright.core.config import derive_seed
from modelwright.train.interruption import Requests, vote
from modelwright.train.objective import Batch, Objective, TermSums, seed_generators
from modelwright.train.technique import Runtime, StepInfo, Technique, Update
from modelwright.train.work import BatchStream, StepTimer, Throughput, Work


@dataclass(kw_only=True)
class TrainStep:
    """Makes one optimizer step per call; deterministic in (seed, step, data rank). Techniques act in their order."""

    run: Runtime
    objective: Objective
    batches: BatchStream
    techniques: Sequence[Technique]
    throughput: Throughput
    own_requests: Callable[[], Requests] = Requests
    requests: Requests = field(default_factory=Requests)
    """Union of all ranks' `own_requests` in the newest step."""
    skipped_last: bool = False

    def __call__(self, step: int) -> StepInfo:
        timer, run, mesh, strategy = StepTimer(), self.run, self.run.mesh, self.run.strategy
        optimizer = run.replica.optimizer
        # By data rank: the ranks that share rows (tensor, context, pipeline) draw the same dropout and noise.
        seed_everything = partial(
            seed_generators, derive_seed(run.seed, "step", step, mesh.data.rank), mesh.world.device
        )
        with timer.measure("data_wait_s"):
            seed_everything()
            batch = self.batches(step)
        for technique in self.techniques:
            batch = technique.on_batch(step, batch)

        # The normalizers of all loss terms must be known before the first backward.
        own_weights = {name: float(weight) for name, weight in self.objective.weights(batch).items()}
        counts = [*own_weights.values(), *Work.counts(run.model, batch, self.objective.own_flops(batch))]
        totals = mesh.world.sums([count * mesh.speaks_for_rows for count in counts])
        weights = dict(zip(own_weights, totals, strict=False))
        work = Work.of(run.model, totals[len(weights) :])
        with timer.measure("compute_s"):
            sums = self.forward_backward(batch, weights, seed_everything)
        with timer.measure("comm_s"):
            gradients = strategy.reduce_gradients(run.scaler.unscale)

        update = Update(
            step=step,
            num_steps=run.num_steps,
            gradients=gradients,
            sums=sums,
            weights=weights,
            model_flops=work.model_flops,
            metrics={"executed_flops": work.executed_flops},
        )
        for technique in self.techniques:
            technique.on_gradients(update)
        if not update.skipped:
            strategy.optimizer_step()
        self.skipped_last = update.skipped  # compared among the ranks by the next vote
        with timer.measure("comm_s"):
            strategy.after_step(step)  # local SGD synchronizes weights here
        optimizer.zero_grad(set_to_none=True)
        rate, scalars = optimizer.param_groups[0]["lr"], strategy.metrics()
        return self.throughput.describe(update, work, timer, learning_rate=rate, scalars=scalars)

    def forward_backward(self, batch: Batch, weights: Mapping[str, float], seed_everything: Any) -> TermSums:
        """Leave this rank's share of the global gradient in `.grad`; return the loss terms and metrics of the global
        batch. A batch that does not fit into memory on some rank is repeated on all, in smaller microbatches.
        """
        run, mesh, is_empty = self.run, self.run.mesh, not any(weights.values())
        scale = {name: 1.0 / weight if weight > 0 else 0.0 for name, weight in weights.items()}
        sums = TermSums(scale, self.objective.metric_names, mesh.world.device)

        # Each attempt starts from the same seeds and empty sums, so that a repeated batch has the same gradient.
        def begin() -> None:
            seed_everything()
            sums.vector.zero_()

        def loss_fn(output: Tensor, microbatch: Batch) -> Tensor:
            return sums.add(self.objective.losses(output, microbatch, run.model)).sum() * run.scaler.value

        before_last_backward = partial(run.strategy.before_last_backward, sums.losses, is_empty=is_empty)
        while True:
            fits = run.runner.train(batch, loss_fn, begin=begin, before_last_backward=before_last_backward)
            # Ranks of the tensor axis compute the same losses, so only one of them may count.
            sums.vector *= mesh.tensor.is_first
            outcome = vote(
                mesh.world, sums.vector, out_of_memory=not fits, skipped_last=self.skipped_last, own=self.own_requests()
            )
            if not outcome.out_of_memory:
                self.requests = outcome.requests
                sums.vector = outcome.sums
                return sums
            run.runner.shrink_microbatches()
            run.replica.optimizer.zero_grad(set_to_none=True)
            run.strategy.abandon_step()
            for technique in self.techniques:
                technique.on_retry()
