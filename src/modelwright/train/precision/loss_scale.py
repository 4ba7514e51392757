"""Loss scaling: the loss is multiplied by a factor so that gradients do not underflow in a narrow format (Micikevicius
et al. 2018).

The scale is a power of two in most settings, so that scaling and unscaling change no bit unless something overflows or
would have underflowed.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from modelwright.core.config import constant, only_for
from modelwright.core.errors import ConfigError

MAX_HISTORY = 1000
"""Number of changes of the scale that are kept."""
SCALE_OF_LARGE = 2.0**12
"""First scale of the largest models, where `init_scale` is 0."""


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scaling, with the names of `torch.amp.GradScaler`."""

    enabled: Literal["auto", "always", "never"] = "auto"
    """`auto`: when anything is computed in FP16."""
    dynamic: bool = field(default=True, metadata=only_for("enabled", "auto", "always"))
    """Grow and back off the scale; otherwise it stays at `init_scale`."""
    init_scale: float = field(default=2.0**15, metadata=only_for("enabled", "auto", "always"))
    """First scale; 0 chooses it by the number of parameters."""
    growth_interval: int = field(default=2000, metadata=only_for("enabled", "auto", "always"))
    """Updates in a row without overflow after which the scale grows."""
    growth_factor: float = constant(2.0)
    """Factor by which the scale grows."""
    backoff_factor: float = constant(0.5)
    """Factor on the scale after an overflow; that update is skipped."""
    min_scale: float = constant(2.0**-14)
    """Lower bound of the scale."""
    max_scale: float = constant(2.0**24)
    """Upper bound of the scale."""

    def __post_init__(self) -> None:
        if self.init_scale < 0:
            text = f"init_scale: must not be negative, got {self.init_scale}"
            raise ConfigError(f"{text}; 0 chooses by the number of parameters")
        if self.growth_factor <= 1:
            raise ConfigError(f"growth_factor: must be above 1, got {self.growth_factor}; 2 is usual, 8 grows faster")
        if not 0 < self.backoff_factor < 1:
            raise ConfigError(f"backoff_factor: must be between 0 and 1, got {self.backoff_factor}; 0.5 is usual")
        if self.growth_interval < 1:
            text = f"growth_interval: must be at least 1 update, got {self.growth_interval}"
            raise ConfigError(f"{text}; 1000 or 2000 is usual")
        if not 0 < self.min_scale <= self.max_scale:
            raise ConfigError(
                f"min_scale: must be above 0 and at most max_scale ({self.max_scale:g}), got {self.min_scale}"
            )
        if self.init_scale and not self.min_scale <= self.init_scale <= self.max_scale:
            raise ConfigError(
                f"init_scale: must be between min_scale ({self.min_scale:g}) and max_scale ({self.max_scale:g}), got "
                f"{self.init_scale}"
            )

    def scales(self, *, uses_fp16: bool) -> bool:
        """True if losses are scaled in a run that computes anything in FP16, or not."""
        return self.enabled == "always" or (self.enabled == "auto" and uses_fp16)


class LossScale:
    """The scale of the present update, and its changes; it multiplies losses before backward."""

    def __init__(self, config: LossScaleConfig, num_parameters: int) -> None:
        self.config = config
        self.value = config.init_scale
        if not self.value:
            # By size, because larger models sum more contributions into each gradient and overflow earlier: 2^15 up to
            # 100 million parameters, half of that with each tenfold increase, 2^12 from 10 billion on.
            tenfolds = math.floor(math.log10(max(num_parameters, 1)) - 8 + 1e-9) + 1 if num_parameters > 1e8 else 0
            chosen = max(2.0 ** (15 - tenfolds), SCALE_OF_LARGE)
            self.value = min(max(chosen, config.min_scale), config.max_scale)
        self.num_overflows = 0
        self.history: list[tuple[int, float]] = [(0, self.value)]
        self._num_good = 0

    def unscale(self, gradients: list[Tensor]) -> None:
        """Removes the scale in place."""
        if gradients and self.value != 1.0:
            torch._foreach_mul_(gradients, 1.0 / self.value)  # pyright: ignore

    def update(self, step: int, overflowed: bool) -> None:
        """Call after update `step` (from 0), which was skipped if it overflowed."""
        self.num_overflows += overflowed
        if not self.config.dynamic:
            return
        before = self.value
        self._num_good = 0 if overflowed else self._num_good + 1
        if overflowed:
            self.value = max(self.value * self.config.backoff_factor, self.config.min_scale)
        elif self._num_good >= self.config.growth_interval:
            self.value, self._num_good = min(self.value * self.config.growth_factor, self.config.max_scale), 0
        if self.value != before:
            self.history = [*self.history, (step + 1, self.value)][-MAX_HISTORY:]

    def state_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "num_good": self._num_good,
            "num_overflows": self.num_overflows,
            "history": [list(change) for change in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._num_good = float(state["value"]), int(state["num_good"])
        self.num_overflows = int(state["num_overflows"])
        self.history = [(int(step), float(value)) for step, value in state["history"]]
