"""Moves the shares of sources in the batches to those with a high held-out loss, at every evaluation."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from modelwright.core.compatibility import EQUAL_REPLICAS, SYNCHRONOUS_UPDATES
from modelwright.core.errors import ConfigError
from modelwright.data.batching.config import MixtureConfig
from modelwright.data.batching.mixture import Mixture, exponentiated_gradient
from modelwright.train.evaluation import evaluate_heldout
from modelwright.train.objective import Batch, Objective
from modelwright.train.runtime import Runtime
from modelwright.train.technique import StepInfo, Technique


def source_losses(run: Runtime, objective: Objective, heldout: Mapping[str, Sequence[Batch]]) -> dict[str, float]:
    """The held-out loss of each source, all terms together. All ranks call it with the same sources in one order."""
    with run.formats.evaluating(), run.memory.resting():
        return {
            name: evaluate_heldout(run.executor, objective, batches, run.global_mesh, alive=run.alive).loss
            for name, batches in heldout.items()
        }


class HeldoutMixture:
    """Updates `mixture`, which the loader of the batches reads, from the held-out loss of each source. Its state is the
    history of the shares. heldout: batches by source. reference_losses: of another model by source, of which only the
    excess counts (DoReMi); {} counts the whole loss (group DRO).
    """

    def __init__(
        self,
        config: MixtureConfig,
        run: Runtime,
        *,
        mixture: Mixture,
        objective: Objective,
        heldout: Mapping[str, Sequence[Batch]],
        reference_losses: Mapping[str, float],
    ) -> None:
        self.config = config
        self.run = run
        self.mixture = mixture
        self.objective = objective
        self.heldout = heldout
        self.reference_losses = reference_losses
        self.losses: dict[str, float] = {}

    def on_step_end(self, info: StepInfo) -> None:
        """Update the shares for the batches after step `info.step`."""
        self.losses = self.evaluate()
        references = self.reference_losses
        excess = np.array([self.losses[name] - references.get(name, 0.0) for name in self.mixture.names])
        shares = exponentiated_gradient(
            self.mixture.shares(info.step), excess, rate=self.config.learning_rate, smoothing=self.config.smoothing
        )
        self.mixture.update(info.step, shares)

    def evaluate(self) -> dict[str, float]:
        """The held-out loss of each source, all terms together."""
        return source_losses(self.run, self.objective, {name: self.heldout[name] for name in self.mixture.names})

    def summary(self) -> dict[str, Any]:
        """The last shares and held-out losses by source."""
        last = self.mixture.shares(self.run.num_steps).tolist()
        return {"shares": dict(zip(self.mixture.names, last, strict=True)), "heldout_losses": self.losses}

    def state_dict(self) -> dict[str, Any]:
        return {"mixture": self.mixture.state_dict(), "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mixture.load_state_dict(state["mixture"])
        self.losses = dict(state["losses"])


def heldout_mixture(
    config: MixtureConfig,
    run: Runtime,
    *,
    mixture: Mixture,
    objective: Objective,
    heldout: Mapping[str, Sequence[Batch]],
    every: int,
    reference_losses: Mapping[str, float] = MappingProxyType({}),
) -> Technique | None:
    """See `HeldoutMixture`. every: steps between updates. Raises `ConfigError` if a source has no held-out batch."""
    if config.update != "heldout_loss":
        return None
    if missing := [name for name in mixture.names if not len(heldout.get(name, ()))]:
        raise ConfigError(
            f"batching.mixture.update: the source {missing[0]!r} has no held-out rows to measure its loss on; raise "
            "data.validation_fraction, or set it to none"
        )
    technique = HeldoutMixture(
        config, run, mixture=mixture, objective=objective, heldout=heldout, reference_losses=reference_losses
    )
    return Technique(
        name="heldout_mixture",
        on_step_end=technique.on_step_end,
        every=every,
        state=technique,
        summary=technique.summary,
        needs=frozenset({SYNCHRONOUS_UPDATES, EQUAL_REPLICAS}),
    )
