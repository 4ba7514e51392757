"""The scheduled learning rate, a pure function of the step, set before forward."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer

from modelwright.core.config import ConfigError, constant
from modelwright.train.objective import Batch
from modelwright.train.technique import Runtime, Technique


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over a run, relative to its peak."""

    kind: Literal["warmup_cosine", "warmup_linear", "wsd", "inverse_sqrt", "constant", "exponential"] = "warmup_cosine"
    """`warmup_cosine` (SGDR's first period, Loshchilov and Hutter 2017), `warmup_linear`, `wsd` (warmup, stable, decay
    with a 1 - sqrt cooldown, Haegele et al. 2024), `inverse_sqrt` (Vaswani et al. 2017), `constant`, or `exponential`
    growth for a learning-rate range test (Smith 2017). All but `exponential` start with a linear warmup."""
    warmup_fraction: float = 0.1
    """Fraction of the steps in which the rate rises linearly to its peak."""
    final_lr_fraction: float = 0.0
    """Fraction of the peak that is left at the end of the decay."""
    cooldown_fraction: float = constant(0.2)
    """`wsd`: fraction of the steps, at the end, in which the rate decays."""
    initial_lr_fraction: float = constant(1e-5)
    """`exponential`: fraction of the peak at the first step."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.warmup_fraction < 1.0:
            raise ConfigError(f"warmup_fraction: must be in [0, 1), got {self.warmup_fraction}; 0.1 is usual")
        if not 0.0 <= self.final_lr_fraction <= 1.0:
            raise ConfigError(f"final_lr_fraction: must be in [0, 1], got {self.final_lr_fraction}; 0 decays to zero")
        if not 0.0 < self.initial_lr_fraction <= 1.0:
            raise ConfigError(f"initial_lr_fraction: must be above 0 and at most 1, got {self.initial_lr_fraction}")
        if self.kind == "wsd" and not 0.0 < self.cooldown_fraction <= 1.0 - self.warmup_fraction + 1e-9:
            raise ConfigError(
                f"cooldown_fraction: must be above 0 and leave room for the warmup ({self.warmup_fraction:g}), got "
                f"{self.cooldown_fraction}; 0.2 is usual"
            )


def rate_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """Computes the fraction of the peak rate for update `step` (from 0) of `num_steps`.

    Warmup: (step + 1) / warmup steps, so that the first update does not have a rate of zero. Decay: from 1 right after
    warmup towards `final_lr_fraction` at `num_steps`; half a cosine is SGDR's first period (Loshchilov and Hutter 2017,
    equation 5), `wsd` with its root-shaped cooldown that of Haegele et al. 2024, `inverse_sqrt` that of Vaswani et al.
    2017.
    """
    # Without a warmup: a range test starts at the smallest rate anyway.
    if config.kind == "exponential":
        return config.initial_lr_fraction ** (1.0 - step / max(1, num_steps - 1))
    warmup_steps = round(config.warmup_fraction * num_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if config.kind == "constant":
        return 1.0
    if config.kind == "inverse_sqrt":
        # Scaled by the warmup's length, so that the rate continues from its peak.
        return math.sqrt(max(1, warmup_steps) / (step + 1))
    first = warmup_steps
    if config.kind == "wsd":
        first = num_steps - max(1, round(config.cooldown_fraction * num_steps))
        if step < first:
            return 1.0
    done = min(1.0, (step - first) / max(1, num_steps - first))
    match config.kind:
        case "warmup_cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * done))
        case "wsd":
            left = 1.0 - math.sqrt(done)
        case _:
            left = 1.0 - done
    return config.final_lr_fraction + (1.0 - config.final_lr_fraction) * left


@dataclass(eq=False)
class LearningRate:
    """Sets `peak` times the schedule's factor in all parameter groups. Its state is the rate of the last step, which
    techniques that act earlier can read in the groups.
    """

    optimizer: Optimizer
    config: ScheduleConfig
    peak: float
    num_steps: int

    def on_batch(self, step: int, batch: Batch) -> Batch:
        rate = self.peak * rate_factor(self.config, step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.optimizer.param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A new optimizer has the first rate, which earlier techniques would read in the first step after a resume.
        for group in self.optimizer.param_groups:
            group["lr"] = state["rate"]


def learning_rate(config: ScheduleConfig, run: Runtime, *, peak: float) -> Technique:
    """peak: the highest learning rate of the schedule."""
    rate = LearningRate(run.replica.optimizer, config, peak=peak, num_steps=run.num_steps)
    return Technique(name="learning_rate", on_batch=rate.on_batch, state=rate, needs=frozenset())
