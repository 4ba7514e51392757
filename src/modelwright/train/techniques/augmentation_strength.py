"""Strength of text augmentation that follows the training loss: more for a model that has much to learn, less for one
that has nearly learned its data.

What augments documents is `data/augment/augmenter.py`; it is told the strength by the function that is handed in here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from modelwright.core.errors import ConfigError
from modelwright.train.technique import Technique, Update

SetStrength = Callable[[float], None]
"""Takes the probability that a document of the next batch is augmented."""


@dataclass(frozen=True, kw_only=True)
class AugmentationStrengthConfig:
    """The rule: `probability`, times `high_factor` at a high loss, times `low_factor` at a low one."""

    probability: float = 0.3
    """Probability that a document is augmented while the loss is between the thresholds."""
    high_loss: float = 0.8
    """Upper threshold in nats per token, or as a fraction with `relative`. A small model's loss stays above 0.8 nats to
    the end of its training."""
    low_loss: float = 0.3
    """Lower threshold, in the same unit."""
    high_factor: float = 1.5
    """Factor while the loss is above the upper threshold."""
    low_factor: float = 0.7
    """Factor while the loss is below the lower threshold."""
    relative: bool = False
    """Thresholds are fractions of the mean loss over the first `window` steps."""
    window: int = 50
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


class AugmentationStrength:
    """Follows the loss, step by step. Its state is a function of the losses so far, so it resumes exactly."""

    def __init__(self, config: AugmentationStrengthConfig, set_strength: SetStrength) -> None:
        self.config = config
        self.set_strength = set_strength
        self.num_losses = 0
        self.running_loss = 0.0
        self.first_loss = 0.0
        set_strength(self.strength)

    @property
    def strength(self) -> float:
        """The probability for the next batch; the plain one before the first loss."""
        if not self.num_losses:
            return self.config.probability
        return self.config.strength(self.running_loss, self.first_loss)

    def observe(self, loss: float) -> None:
        """Take the loss of a step into account, unless it is not finite."""
        if not math.isfinite(loss):
            return
        self.num_losses += 1
        # an arithmetic mean at first, then an exponential one
        weight = 1.0 / min(self.num_losses, self.config.window)
        self.running_loss += weight * (loss - self.running_loss)
        if self.num_losses <= self.config.window:
            self.first_loss = self.running_loss

    def on_gradients(self, update: Update) -> None:
        if not update.is_empty:
            self.observe(update.loss)
        update.metrics["augmentation_strength"] = self.strength
        self.set_strength(self.strength)

    def state_dict(self) -> dict[str, Any]:
        return {"num_losses": self.num_losses, "running_loss": self.running_loss, "first_loss": self.first_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_losses = int(state["num_losses"])
        self.running_loss, self.first_loss = float(state["running_loss"]), float(state["first_loss"])
        self.set_strength(self.strength)


def augmentation_strength(config: AugmentationStrengthConfig, set_strength: SetStrength) -> Technique:
    """The technique. set_strength: called at the start, after each step and after a checkpoint is loaded."""
    follower = AugmentationStrength(config, set_strength)
    return Technique(name="augmentation_strength", on_gradients=follower.on_gradients, state=follower)
