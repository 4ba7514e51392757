"""Updates the shares of sources in the batches by held-out losses, at every evaluation. The rule of this module gives
more to sources with a high loss; the rule by scores is in `score_mixture.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from modelwright.core.config import ConfigError
from modelwright.data.rows.order import Mixture, MixtureConfig, exponentiated_gradient
from modelwright.train.objective import Batch, Objective, evaluate_heldout
from modelwright.train.technique import Runtime, StepInfo, Technique


class ShareRule(Protocol):
    """Computes shares from held-out losses. `state_dict` returns the state for its next update."""

    measured: Sequence[str]
    """Sources whose held-out loss it needs; without any, shares never change."""
    remedy: str
    """Advice for an error, how to avoid measuring a source without held-out rows."""

    def shares(self, before: np.ndarray, losses: Mapping[str, float]) -> np.ndarray:
        """The next shares [S]. losses: those of the measured sources."""
        ...

    def summary(self) -> Mapping[str, Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(eq=False)
class HeldoutMixture:
    """Updates `mixture`, which the loader of the batches reads, by a rule. Its state is the history of the shares and
    the state of the rule. heldout: batches by source.
    """

    run: Runtime
    rule: ShareRule
    mixture: Mixture
    objective: Objective
    heldout: Mapping[str, Sequence[Batch]]

    def on_step_end(self, info: StepInfo) -> None:
        """Update the shares for the batches after step `info.step`."""
        if not self.rule.measured:
            return
        before, run, losses = self.mixture.shares(info.step), self.run, dict[str, float]()
        with run.formats.evaluating():
            for name in self.rule.measured:  # the same order on all ranks: an evaluation is collective
                rows = self.heldout[name]
                result = evaluate_heldout(run.executor, self.objective, rows, run.global_mesh, alive=run.alive)
                losses[name] = result.loss
        self.mixture.update(info.step, self.rule.shares(before, losses))

    def summary(self) -> dict[str, Any]:
        """The last shares by source, and the rule's own figures."""
        last = self.mixture.shares(self.run.num_steps).tolist()
        return {"shares": dict(zip(self.mixture.names, last, strict=True)), **self.rule.summary()}

    def state_dict(self) -> dict[str, Any]:
        return {"mixture": self.mixture.state_dict(), **self.rule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mixture.load_state_dict(state["mixture"])
        self.rule.load_state_dict(state)


@dataclass(eq=False)
class ExcessLossRule:
    """Shares grow with the held-out loss of their source beyond `reference_losses`, those of another model (DoReMi, Xie
    et al. 2023); {} counts the whole loss (group DRO, Sagawa et al. 2020).
    """

    config: MixtureConfig
    measured: Sequence[str]
    reference_losses: Mapping[str, float]
    losses: dict[str, float] = field(default_factory=dict[str, float])
    remedy: str = "set it to none"

    def shares(self, before: np.ndarray, losses: Mapping[str, float]) -> np.ndarray:
        self.losses = dict(losses)
        # Without a reference loss of its own a source counts with its whole loss.
        excess = np.array([losses[name] - self.reference_losses.get(name, 0.0) for name in self.measured])
        return exponentiated_gradient(before, excess, rate=self.config.learning_rate, smoothing=self.config.smoothing)

    def summary(self) -> Mapping[str, Any]:
        return {"heldout_losses": self.losses}

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = dict(state["losses"])


def mixture_technique(
    name: str,
    run: Runtime,
    rule: ShareRule,
    *,
    mixture: Mixture,
    objective: Objective,
    heldout: Mapping[str, Sequence[Batch]],
    every: int,
) -> Technique:
    """See `HeldoutMixture`. every: steps between updates. Raises `ConfigError` for a source without held-out rows."""
    if missing := [source for source in rule.measured if not len(heldout.get(source, ()))]:
        raise ConfigError(
            f"batching.mixture.update: the source {missing[0]!r} has no held-out rows to measure its loss on; raise "
            f"data.validation_fraction, or {rule.remedy}"
        )
    technique = HeldoutMixture(run, rule, mixture=mixture, objective=objective, heldout=heldout)
    return Technique(
        name=name,
        on_step_end=technique.on_step_end,
        every=every,
        state=technique,
        summary=technique.summary,
        needs=frozenset(),
    )


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
    """See `ExcessLossRule` and `mixture_technique`."""
    if config.update != "heldout_loss":
        return None
    rule = ExcessLossRule(config, mixture.names, reference_losses)
    return mixture_technique(
        "heldout_mixture", run, rule, mixture=mixture, objective=objective, heldout=heldout, every=every
    )
