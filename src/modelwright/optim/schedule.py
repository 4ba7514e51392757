"""Learning-rate schedules as a pure function of the step, peaks as one of the batch; no state. Knows no optimizer."""

import math
from dataclasses import dataclass
from typing import Literal

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError


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
    cooldown_fraction: float = 0.2
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


@dataclass(frozen=True, kw_only=True)
class RateRuleConfig:
    """How the peak rate follows from the batch.

    kind: `none`, it is `learning_rate` as it stands; `linear`: in proportion to the batch (Goyal et al. 2017, for SGD);
    `sqrt`: to its root (Krizhevsky 2014; for Adam Malladi et al. 2022, On the SDEs and Scaling Rules for Adaptive
    Gradient Algorithms). The unit of a batch is the row: a sequence of `pack.seq_len` tokens, over all ranks and
    microbatches of an update. reference_rate belongs to a batch of reference_rows rows.
    """

    kind: Literal["none", "linear", "sqrt"] = "none"
    reference_rate: float = 3e-4
    reference_rows: int = 1024

    def __post_init__(self) -> None:
        if self.reference_rate <= 0:
            raise ConfigError(f"reference_rate: must be above 0, got {self.reference_rate}; 3e-4 is usual")
        if self.reference_rows < 1:
            raise ConfigError(f"reference_rows: must be at least 1 row, got {self.reference_rows}")

    def peak(self, batch_rows: int, learning_rate: float) -> float:
        """The peak rate for batches of so many rows; `learning_rate` without a rule."""
        if self.kind == "none":
            return learning_rate
        return self.reference_rate * (batch_rows / self.reference_rows) ** (0.5 if self.kind == "sqrt" else 1.0)


def rate_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """The share of the peak rate for update `step` (from 0) of `num_steps`.

    Warmup: (step + 1) / warmup steps, so that the first update is not lost on a rate of zero. Decay: from 1 right
    after warmup towards `final_lr_fraction` at `num_steps`; half a cosine is SGDR's first period (Loshchilov and
    Hutter 2017, equation 5), `wsd` with its root-shaped cooldown that of Haegele et al. 2024, `inverse_sqrt` that of
    Vaswani et al. 2017.
    """
    if config.kind == "exponential":
        return config.initial_lr_fraction ** (1.0 - step / max(1, num_steps - 1))
    warmup_steps = round(config.warmup_fraction * num_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if config.kind == "constant":
        return 1.0
    if config.kind == "inverse_sqrt":
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
