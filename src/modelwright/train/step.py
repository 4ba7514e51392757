"""One training step, from batch to weights. Read `TrainStep.__call__` from top to bottom.

The objective defines the loss, the runner executes forward and backward, the strategy decides how ranks share gradients
and updates. Everything else that can happen in a step is a `Technique` (technique.py); build.py lists them in order.
This file names none of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from modelwright.core.seeds import derive_seed
from modelwright.model.decoder import Decoder
from modelwright.parallel.strategy import Strategy
from modelwright.precision.loss_scale import LossScaler
from modelwright.train.objective import Batch, Objective
from modelwright.train.runner import Runner
from modelwright.train.seeding import seed_generators
from modelwright.train.technique import StepInfo, Technique, Update
from modelwright.train.throughput import StepTimer, Throughput, Work


@dataclass(kw_only=True)
class TrainStep:
    """One optimizer step per call; deterministic in (seed, step, data rank). model: this rank's part. techniques: in
    the order in which they act between gradients and weights.
    """

    model: Decoder
    runner: Runner
    objective: Objective
    strategy: Strategy
    optimizer: Optimizer
    loss_scaler: LossScaler
    techniques: Sequence[Technique]
    throughput: Throughput
    num_steps: int
    seed: int
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))
    next_step: int = -1

    def __call__(self, step: int) -> StepInfo:
        timer, mesh = StepTimer(), self.strategy.mesh
        seed_everything = partial(
            seed_generators, derive_seed(self.seed, "step", step, mesh.data.rank), mesh.world.device
        )
        with timer.measure("data_wait_s"):
            seed_everything()
            batch = self.batch(step)
        for technique in self.techniques:
            batch = technique.on_batch(step, batch)

        # The normalizers of all loss terms must be known before the first backward.
        weights, work = self.count(batch)
        with timer.measure("compute_s"):
            losses = self.forward_backward(batch, weights, seed_everything)
        with timer.measure("comm_s"):
            gradients = self.strategy.reduce_gradients(self.loss_scaler.unscale)

        update = Update(
            step=step,
            num_steps=self.num_steps,
            gradients=gradients,
            losses=losses,
            weights=weights,
            model_flops=work.model_flops,
            metrics={"executed_flops": work.executed_flops},
        )
        for technique in self.techniques:
            technique.on_gradients(update)
        if not update.skipped:
            self.strategy.optimizer_step()
        with timer.measure("comm_s"):
            self.strategy.after_step(step)  # local SGD synchronizes weights here
        self.optimizer.zero_grad(set_to_none=True)
        rate, scalars = self.optimizer.param_groups[0]["lr"], self.strategy.metrics()
        return self.throughput.describe(update, work, timer, learning_rate=rate, scalars=scalars)

    def batch(self, step: int) -> Batch:
        """This rank's rows of global batch `step`; one iterator serves consecutive steps."""
        if step != self.next_step:
            data = self.strategy.mesh.data
            self.batches = self.objective.batches(self.model, first=step, rank=data.rank, world_size=data.size)
        self.next_step = step + 1
        return next(self.batches)

    def count(self, batch: Batch) -> tuple[dict[str, float], Work]:
        """The normalizer of each loss term over the global batch, and the batch's counts."""
        mesh, weights = self.strategy.mesh, self.objective.weights(batch)
        counts = [*map(float, weights.values()), *Work.counts(self.model.config, batch)]
        sums = mesh.world.sums([count * mesh.speaks_for_rows for count in counts])
        return dict(zip(weights, sums, strict=False)), Work.of(self.model.config, sums[len(weights) :])

    def forward_backward(self, batch: Batch, weights: Mapping[str, float], seed_everything: Any) -> dict[str, float]:
        """Leave this rank's share of the global gradient in `.grad`; return each loss term of the global batch."""
        mesh, is_empty = self.strategy.mesh, not any(weights.values())
        scale = {name: 1.0 / weight if weight > 0 else 0.0 for name, weight in weights.items()}
        sums = torch.zeros(len(scale), dtype=torch.float64, device=mesh.world.device)

        def begin() -> None:
            seed_everything()
            sums.zero_()

        def loss_fn(output: Tensor, microbatch: Batch) -> Tensor:
            terms = self.objective.losses(output, microbatch, self.model)
            normalized = torch.stack([terms[name] * scale[name] for name in scale])
            sums.add_(normalized.detach())
            return normalized.sum() * self.loss_scaler.value

        before_last_backward = partial(self.strategy.before_last_backward, sums, is_empty=is_empty)
        self.runner.train(batch, loss_fn, begin=begin, before_last_backward=before_last_backward)
        sums *= mesh.tensor.is_first  # ranks of the tensor axis compute the same losses
        return dict(zip(scale, mesh.world.sums(sums.tolist()), strict=True))  # pyright: ignore
