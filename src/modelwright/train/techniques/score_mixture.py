"""Shares of sources, such as modalities, by scores: softmax(beta * score). A score is given, by the task that a source
serves, or measured at every evaluation: the share of its first held-out loss that is left.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelwright.data.rows.order import UNMEASURED, Mixture, MixtureConfig, softmax_shares
from modelwright.train.objective import Batch, Objective
from modelwright.train.technique import Runtime, Technique
from modelwright.train.techniques.heldout_mixture import mixture_technique


class ScoreRule:
    """Shares are the softmax of the scores of the sources `names`; those without a given score are measured."""

    remedy = "give it a score in batching.mixture.weights"

    def __init__(self, config: MixtureConfig, names: Sequence[str]) -> None:
        self.sharpness = config.score_sharpness
        self.measured: Sequence[str] = [name for name in names if name not in config.weights]
        # In the order of `names`, which must not change: shares are by position.
        self.scores = {name: config.weights.get(name, UNMEASURED) for name in names}
        self.first_losses: dict[str, float] = {}

    def shares(self, before: np.ndarray, losses: Mapping[str, float]) -> np.ndarray:
        # Losses of the first evaluation, to which later ones are related; 1 is thus a source that is not learned yet.
        self.first_losses = self.first_losses or dict(losses)
        for name, loss in losses.items():
            first = self.first_losses[name]
            self.scores[name] = loss / first if first > 0 else 0.0
        return softmax_shares(np.array(list(self.scores.values())), beta=self.sharpness)

    def summary(self) -> Mapping[str, Any]:
        return {"scores": self.scores}

    def state_dict(self) -> dict[str, Any]:
        return {"first_losses": self.first_losses, "scores": self.scores}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first_losses = dict(state["first_losses"])
        self.scores = {name: float(state["scores"][name]) for name in self.scores}


def score_mixture(
    config: MixtureConfig,
    run: Runtime,
    *,
    mixture: Mixture,
    objective: Objective,
    heldout: Mapping[str, Sequence[Batch]],
    every: int,
) -> Technique | None:
    """See `ScoreRule` and `mixture_technique`."""
    if config.update != "scores":
        return None
    rule = ScoreRule(config, mixture.names)
    return mixture_technique(
        "score_mixture", run, rule, mixture=mixture, objective=objective, heldout=heldout, every=every
    )
