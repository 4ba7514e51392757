"""Held-out evaluation by reward: one completion of each held-out prompt, and its win rate against the first one.

The evaluation of a run passes batches through an objective. Here the set is a single batch of one row, which carries
the numbers of the prompts, so that all ranks generate and score it together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.rollouts import RolloutWorker, constant_metrics, rollout_metric_names, rollout_metrics
from modelwright.train.objective import Metric, ModelLayout

NUMBERS, FIGURES = "prompt_numbers_BN", "figures_BM"


def heldout_batch(row: TokenBatch, numbers: Sequence[int]) -> TokenBatch:
    """Builds the held-out set of these prompts. row: any row of tokens, for the forward pass of the evaluation."""
    return replace(row, extras={NUMBERS: torch.tensor([list(numbers)], dtype=torch.int64)})


def is_heldout(batch: TokenBatch) -> bool:
    """Returns whether a batch comes from an evaluation."""
    return FIGURES in batch.extras


@dataclass(frozen=True, kw_only=True)
class HeldoutRewards:
    """Scores the model on held-out prompts, and against its own first evaluation."""

    worker: RolloutWorker
    first_terms: list[Tensor] = field(default_factory=list[Tensor])
    """Rewards of the first evaluation by prompt and term [N, R], empty before it."""

    @property
    def metric_names(self) -> list[str]:
        win_rates = [win_rate_name(name) for name in self.worker.term_names]
        return [*rollout_metric_names(self.worker.term_names), *win_rates]

    def state_dict(self) -> dict[str, Any]:
        return {"first_terms": [*self.first_terms]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first_terms[:] = state["first_terms"]

    def prepare(self, batch: TokenBatch, model: Decoder, layout: ModelLayout) -> TokenBatch:
        """Adds the figures of this evaluation [1, M], NaN for missing ones, to a batch. All ranks call together."""
        numbers = batch.extras[NUMBERS][0].tolist()
        with layout.whole_model(model) as whole:
            greedy = self.worker.config.heldout_decoding == "greedy"
            rollout = self.worker.roll_out(
                whole, layout.world, numbers, num_generations=1, stream=("heldout",), greedy=greedy
            )
        # The first evaluation is the opponent of all later ones, also after a resumption
        if not self.first_terms:
            self.first_terms.append(rollout.terms_CR)
        names = self.worker.term_names
        rates_R = win_rates(rollout.terms_CR, self.first_terms[0])
        found = rollout_metrics(rollout, names) | dict(zip(map(win_rate_name, names), rates_R, strict=True))
        figures = [found.get(name, math.nan) for name in self.metric_names]
        device = batch.input_ids_BT.device
        return replace(batch, extras={FIGURES: torch.tensor([figures], dtype=torch.float64, device=device)})

    def weight(self, batch: TokenBatch) -> Tensor:
        """Returns 1, or 0 if no completion could be scored."""
        return self._reward(batch).isfinite().sum()

    def loss(self, batch: TokenBatch) -> Tensor:
        """Returns minus the mean reward, so that the best weights have the lowest held-out loss."""
        return -self._reward(batch).nan_to_num(0.0)

    def metrics(self, batch: TokenBatch) -> Mapping[str, Metric]:
        """Returns the figures under `metric_names`."""
        figures = dict(zip(self.metric_names, batch.extras[FIGURES][0].tolist(), strict=True))
        finite = {name: value for name, value in figures.items() if math.isfinite(value)}
        return constant_metrics(finite, self.metric_names, batch.input_ids_BT.device)

    def _reward(self, batch: TokenBatch) -> Tensor:
        return batch.extras[FIGURES][0, self.metric_names.index("reward")]


def win_rate_name(term: str) -> str:
    return f"rewards/{term}/win_rate"


def win_rates(terms_NR: Tensor, first_NR: Tensor) -> list[float]:
    """Share of prompts, for each term, with a higher reward than at first; ties count half."""
    # Prompts with a completion that could not be scored are left out; NaN if none remains
    known_NR = terms_NR.isfinite() & first_NR.isfinite()
    wins_NR = (terms_NR > first_NR).double() + 0.5 * (terms_NR == first_NR).double()
    return ((wins_NR * known_NR).sum(dim=0) / known_NR.sum(dim=0)).tolist()
