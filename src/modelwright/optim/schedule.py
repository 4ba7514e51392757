"""Learning-rate schedules as a pure function of the step; no state. Knows no optimizer."""

import math
from dataclasses import dataclass
from typing import Literal

from modelwright.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Shape of the learning rate over the run.

    `warmup_fraction`: share of the steps in which the rate climbs linearly to its peak (also before `constant`);
    `final_fraction`: what is left of the peak at the end of the cosine or of the line.
    """

    kind: Literal["warmup_cosine", "warmup_linear", "constant"] = "warmup_cosine"
    warmup_fraction: float = 0.1
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.warmup_fraction < 1.0:
            raise ConfigError(f"warmup_fraction: must be in [0, 1), got {self.warmup_fraction}; 0.1 is usual")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ConfigError(f"final_fraction: must be in [0, 1], got {self.final_fraction}; 0 decays to zero")


def rate_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """The share of the peak rate for update `step` (from 0) of `num_steps`.

    Warmup: (step + 1) / warmup steps, so that the first update is not lost on a rate of zero. Decay: from 1 right
    after warmup towards `final_fraction` at `num_steps`; half a cosine is SGDR's first period (Loshchilov and
    Hutter 2017, equation 5).
    """
    warmup_steps = round(config.warmup_fraction * num_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if config.kind == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if config.kind == "warmup_cosine" else 1.0 - done
    return config.final_fraction + (1.0 - config.final_fraction) * left
