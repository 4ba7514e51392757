"""Adapts the strength of text augmentation to the training loss: more for a model that has much to learn, less for one
that has nearly learned its data.

`data/rows/ahead.py` augments the documents, by these strengths. It makes batches ahead of the step that
needs them, so a loss takes effect `AHEAD` batches later.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from modelwright.core.compatibility import EQUAL_REPLICAS, SYNCHRONOUS_UPDATES
from modelwright.core.config import ConfigError, constant
from modelwright.data.rows.ahead import AHEAD, AugmentationCost, AugmentedLoader
from modelwright.train.technique import Runtime, Technique, Update

NEEDS = frozenset({SYNCHRONOUS_UPDATES, EQUAL_REPLICAS})


@dataclass(frozen=True, kw_only=True)
class AugmentationStrengthConfig:
    """The rule: `probability`, times `high_factor` at a high loss, times `low_factor` at a low one."""

    probability: float = 0.3
    """Probability that a document is augmented while the loss is between the thresholds."""
    high_loss: float = constant(0.8)
    """Upper threshold in nats per token, or as a fraction with `relative`. A small model's loss stays above 0.8 nats to
    the end of its training."""
    low_loss: float = constant(0.3)
    """Lower threshold, in the same unit."""
    high_factor: float = constant(1.5)
    """Factor while the loss is above the upper threshold."""
    low_factor: float = constant(0.7)
    """Factor while the loss is below the lower threshold."""
    relative: bool = False
    """Thresholds are fractions of the mean loss over the first `window` steps."""
    window: int = constant(50)
    """Steps over which the loss is averaged: the time constant of an exponential mean."""

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"probability: {self.probability} is not between 0 and 1")
        if not 0 <= self.low_loss <= self.high_loss:
            raise ConfigError(f"low_loss: {self.low_loss} is not between 0 and high_loss, which is {self.high_loss}")
        if self.low_factor < 0 or self.high_factor < 0:
            raise ConfigError("low_factor, high_factor: must not be negative")
        if self.window < 1:
            raise ConfigError(f"window: {self.window} is not positive; for example 50")

    def strength(self, loss: float, first_loss: float) -> float:
        """The probability at a running loss. first_loss: mean over the first `window` steps."""
        unit = first_loss if self.relative else 1.0
        factor = self.high_factor if loss > self.high_loss * unit else 1.0
        factor = self.low_factor if loss < self.low_loss * unit else factor
        return min(1.0, self.probability * factor)


@dataclass(eq=False)
class AugmentationStrength:
    """Follows the loss, step by step, and tells `loader` the strength of each batch. Its state is a function of the
    losses so far, so it resumes exactly.
    """

    config: AugmentationStrengthConfig
    loader: AugmentedLoader
    num_losses: int = 0
    running_loss: float = 0.0
    first_loss: float = 0.0
    next_batch: int = 0
    planned: list[float] = field(default_factory=list[float])
    """The decided strengths of the batches from `next_batch` on."""
    reported: AugmentationCost = field(default_factory=AugmentationCost)

    def __post_init__(self) -> None:
        self.planned = [self.strength] * (AHEAD + 1)
        self.tell()

    @property
    def strength(self) -> float:
        """The probability at the losses so far; the plain one before the first loss."""
        if not self.num_losses:
            return self.config.probability
        return self.config.strength(self.running_loss, self.first_loss)

    def tell(self) -> None:
        """Pass the decided strengths to the loader."""
        for place, strength in enumerate(self.planned):
            self.loader.set_strength(self.next_batch + place, strength)

    def observe(self, loss: float) -> None:
        """Take the loss of a step into account, unless it is not finite."""
        if not math.isfinite(loss):
            return
        self.num_losses += 1
        # An arithmetic mean over the first window, then an exponential one.
        weight = 1.0 / min(self.num_losses, self.config.window)
        self.running_loss += weight * (loss - self.running_loss)
        if self.num_losses <= self.config.window:
            self.first_loss = self.running_loss

    def on_gradients(self, update: Update) -> None:
        """Decide the strength of one more batch; record that of this one, and the number and cost of its copies."""
        if not update.is_empty:
            self.observe(update.loss)
        cost = self.loader.cost
        update.metrics["augmentation_strength"] = self.planned[0]
        update.metrics["augmented_pieces"] = float(cost.num_copies - self.reported.num_copies)
        update.metrics["augmentation_cpu_s"] = cost.cpu_s - self.reported.cpu_s
        self.reported = replace(cost)  # a copy, because the loader goes on counting
        # The batches of the next `AHEAD` steps are being made already, so this loss decides the one after them.
        self.next_batch = update.step + 1
        self.planned = [*self.planned[1:], self.strength]
        self.tell()

    def summary(self) -> dict[str, Any]:
        """Cost of augmentation on this rank since the run was started or resumed, in total and by method."""
        cost = self.loader.cost
        return {**vars(cost), "methods": {name: vars(method) for name, method in cost.methods.items()}}

    def state_dict(self) -> dict[str, Any]:
        names = ("num_losses", "running_loss", "first_loss", "next_batch", "planned")
        return {name: vars(self)[name] for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_losses, self.next_batch = int(state["num_losses"]), int(state["next_batch"])
        self.running_loss, self.first_loss = float(state["running_loss"]), float(state["first_loss"])
        self.planned = [float(strength) for strength in state["planned"]]
        self.tell()


def augmentation_strength(config: AugmentationStrengthConfig, loader: AugmentedLoader, run: Runtime) -> Technique:
    """See `AugmentationStrength`. All ranks must see the same loss, because each of them decides the strength."""
    follower = AugmentationStrength(config, loader)
    run.on_exit.callback(loader.close)
    return Technique(
        name="augmentation_strength",
        on_gradients=follower.on_gradients,
        state=follower,
        summary=follower.summary,
        needs=NEEDS,
    )
