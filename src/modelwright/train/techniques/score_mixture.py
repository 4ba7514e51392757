"""Shares of sources, such as modalities, by scores: softmax(beta * score). A score is given, by the task that a source
serves, or measured at every evaluation: the share of its first held-out loss that is left.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelwright.core.compatibility import EQUAL_REPLICAS, SYNCHRONOUS_UPDATES
from modelwright.core.errors import ConfigError
from modelwright.data.batching.config import MixtureConfig
from modelwright.data.batching.mixture import UNMEASURED, Mixture, softmax_shares
from modelwright.train.objective import Batch, Objective
from modelwright.train.runtime import Runtime
from modelwright.train.technique import StepInfo, Technique
from modelwright.train.techniques.heldout_mixture import source_losses


class ScoreMixture:
    """Updates `mixture`, which the loader of the batches reads, from the scores of its sources. Its state is the
    history of the shares and the first losses. heldout: batches of each source that is measured.
    """

    def __init__(
        self,
        config: MixtureConfig,
        run: Runtime,
        *,
        mixture: Mixture,
        objective: Objective,
        heldout: Mapping[str, Sequence[Batch]],
    ) -> None:
        self.config = config
        self.run = run
        self.mixture = mixture
        self.objective = objective
        self.heldout = heldout
        self.first_losses: dict[str, float] = {}
        self.scores = {name: config.weights.get(name, UNMEASURED) for name in mixture.names}

    def on_step_end(self, info: StepInfo) -> None:
        """Measure what has no score, and update the shares for the batches after step `info.step`."""
        if not self.heldout:
            return
        losses = source_losses(self.run, self.objective, self.heldout)
        self.first_losses = self.first_losses or losses
        for name, loss in losses.items():
            first = self.first_losses[name]
            self.scores[name] = loss / first if first > 0 else 0.0
        scores = np.array([self.scores[name] for name in self.mixture.names])
        self.mixture.update(info.step, softmax_shares(scores, beta=self.config.score_sharpness))

    def summary(self) -> dict[str, Any]:
        """The last shares and scores by source."""
        last = self.mixture.shares(self.run.num_steps).tolist()
        return {"shares": dict(zip(self.mixture.names, last, strict=True)), "scores": self.scores}

    def state_dict(self) -> dict[str, Any]:
        return {"mixture": self.mixture.state_dict(), "first_losses": self.first_losses, "scores": self.scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mixture.load_state_dict(state["mixture"])
        self.first_losses, self.scores = dict(state["first_losses"]), dict(state["scores"])


def score_mixture(
    config: MixtureConfig,
    run: Runtime,
    *,
    mixture: Mixture,
    objective: Objective,
    heldout: Mapping[str, Sequence[Batch]],
    every: int,
) -> Technique | None:
    """See `ScoreMixture`. every: steps between updates. Raises `ConfigError` if a source that is to be measured has no
    held-out batch.
    """
    if config.update != "scores":
        return None
    measured = [name for name in mixture.names if name not in config.weights]
    if missing := [name for name in measured if not len(heldout.get(name, ()))]:
        raise ConfigError(
            f"batching.mixture.weights: the source {missing[0]!r} has no score and no held-out rows to measure it on; "
            "give it a score, or raise data.validation_fraction"
        )
    technique = ScoreMixture(
        config, run, mixture=mixture, objective=objective, heldout={name: heldout[name] for name in measured}
    )
    return Technique(
        name="score_mixture",
        on_step_end=technique.on_step_end,
        every=every,
        state=technique,
        summary=technique.summary,
        needs=frozenset({SYNCHRONOUS_UPDATES, EQUAL_REPLICAS}),
    )
