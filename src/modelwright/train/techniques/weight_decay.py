"""Weight decay that is lowered while gradients are large."""

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from modelwright.core.compatibility import WHOLE_GRADIENTS, Feature, feature
from modelwright.core.config import ConfigError, constant
from modelwright.train.technique import Runtime, Technique, Update


@dataclass(frozen=True, kw_only=True)
class WeightDecayScheduleConfig:
    """Lower weight decay while gradients are large, as published for DeepSeekAdam (0.01; 0.001 above a norm of 5)."""

    grad_norm_threshold: float = 0.0
    """Gradient norm, before clipping, above which weight decay is lowered (published: 5); 0 never lowers it."""
    factor: float = constant(0.1)
    """Factor on the weight decay while it is lowered."""
    release_fraction: float = constant(0.8)
    """Decay returns to its full value once the norm falls below this fraction of the threshold. Below 1, norms near
    the threshold do not switch it back and forth."""

    def __post_init__(self) -> None:
        if self.grad_norm_threshold < 0:
            text = f"grad_norm_threshold: must not be negative, got {self.grad_norm_threshold}"
            raise ConfigError(f"{text}; 0 disables the schedule")
        if not 0.0 <= self.factor <= 1.0:
            raise ConfigError(f"factor: must be in [0, 1], got {self.factor}; 0.1 is the published ratio")
        if not 0.0 < self.release_fraction <= 1.0:
            text = f"release_fraction: must be above 0 and at most 1, got {self.release_fraction}"
            raise ConfigError(f"{text}; 1 disables hysteresis")

    def features(self) -> list[Feature]:
        """Requirements of the schedule on a run."""
        return [feature("grad_norm_threshold", needs=[WHOLE_GRADIENTS])] if self.grad_norm_threshold else []

    def is_low(self, norm: float, was_low: bool) -> bool:
        """True if decay is lowered at an update with this gradient norm."""
        if not self.grad_norm_threshold:
            return False
        return norm > self.grad_norm_threshold * (self.release_fraction if was_low else 1.0)


class WeightDecaySchedule:
    """Lowers the weight decay of all parameter groups while gradients are large."""

    def __init__(self, optimizer: Optimizer, config: WeightDecayScheduleConfig) -> None:
        self.optimizer = optimizer
        self.config = config
        # Groups differ: norms do not decay.
        self.usual = [group["weight_decay"] for group in optimizer.param_groups]
        self.low = False

    def on_gradients(self, update: Update) -> None:
        if update.skipped:
            return
        self.low = self.config.is_low(update.grad_norm, self.low)
        factor = self.config.factor if self.low else 1.0
        for group, usual in zip(self.optimizer.param_groups, self.usual, strict=True):
            group["weight_decay"] = factor * usual
        update.metrics["decay_factor"] = factor

    def state_dict(self) -> dict[str, Any]:
        return {"low": self.low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.low = bool(state["low"])


def dynamic_weight_decay(config: WeightDecayScheduleConfig, run: Runtime) -> Technique | None:
    if not config.grad_norm_threshold:
        return None
    decay = WeightDecaySchedule(run.replica.optimizer, config)
    return Technique(
        name="dynamic_weight_decay",
        on_gradients=decay.on_gradients,
        state=decay,
        belongs_to_weights=True,
        needs=frozenset(),
    )
