"""Held-out evaluation by reward: one greedy completion of each held-out prompt.

The evaluation of a run passes batches through an objective. Here the set is a single batch of one row, which carries
the numbers of the prompts, so that all ranks generate and score it together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelwright.data.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.rollouts import (
    RolloutWorker,
    constant_metrics,
    rollout_metric_names,
    rollout_metrics,
)
from modelwright.train.objective import Metric
from modelwright.train.whole_model import ModelLayout

NUMBERS, FIGURES = "prompt_numbers_BN", "figures_BM"


def heldout_batch(row: TokenBatch, numbers: Sequence[int]) -> TokenBatch:
    """The held-out set of these prompts. row: any row of tokens; the forward pass of the evaluation reads it."""
    return replace(row, extras={NUMBERS: torch.tensor([list(numbers)], dtype=torch.int64)})


def is_heldout(batch: TokenBatch) -> bool:
    """Whether a batch comes from an evaluation."""
    return FIGURES in batch.extras


@dataclass(frozen=True, kw_only=True)
class HeldoutRewards:
    """Scores the model on held-out prompts."""

    worker: RolloutWorker

    @property
    def metric_names(self) -> list[str]:
        return rollout_metric_names(self.worker.term_names)

    def prepare(self, batch: TokenBatch, model: Decoder, layout: ModelLayout) -> TokenBatch:
        """The batch with the figures of this evaluation [1, M], NaN for those of nothing. All ranks call together."""
        numbers = batch.extras[NUMBERS][0].tolist()
        with layout.whole_model(model) as whole:
            rollout = self.worker.roll_out(
                whole, layout.world, numbers, num_generations=1, stream=("heldout",), greedy=True
            )
        found = rollout_metrics(rollout, self.worker.term_names)
        figures = [found.get(name, math.nan) for name in self.metric_names]
        device = batch.input_ids_BT.device
        return replace(batch, extras={FIGURES: torch.tensor([figures], dtype=torch.float64, device=device)})

    def weight(self, batch: TokenBatch) -> Tensor:
        """1, or 0 if no completion could be scored."""
        return self._reward(batch).isfinite().sum()

    def loss(self, batch: TokenBatch) -> Tensor:
        """Minus the mean reward: the lowest held-out loss is that of the best weights."""
        return -self._reward(batch).nan_to_num(0.0)

    def metrics(self, batch: TokenBatch) -> Mapping[str, Metric]:
        """The figures, under `metric_names`."""
        figures = dict(zip(self.metric_names, batch.extras[FIGURES][0].tolist(), strict=True))
        finite = {name: value for name, value in figures.items() if math.isfinite(value)}
        return constant_metrics(finite, self.metric_names, batch.input_ids_BT.device)

    def _reward(self, batch: TokenBatch) -> Tensor:
        return batch.extras[FIGURES][0, self.metric_names.index("reward")]
