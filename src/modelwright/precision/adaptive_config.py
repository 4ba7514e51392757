"""What a person chooses about formats that change while a model trains; `adaptive.py` does it."""

from dataclasses import dataclass
from typing import Literal

from modelwright.core.errors import ConfigError
from modelwright.ops.formats import Format


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """How formats are chosen while the model trains.

    kind: `rules`, `bandit` or `schedule`; every: steps between decisions, the last `window` of which are measured;
    candidates: formats to choose among, FP32 and the policy's own always. tolerance: damage that a part may take;
    min_gain: how many times as fast a change has to make it; hold: decisions that a changed part rests for.
    spike: rise of the loss over its running mean, relative, that brings the last good formats back. explore: how much
    the bandit tries what it knows little of; damage_weight: of damage against time saved in its reward. schedule:
    (step, share) pairs: from that step on, so large a share of the parts computes in `narrow`, feed-forward parts
    first.
    """

    kind: Literal["none", "rules", "bandit", "schedule"] = "none"
    every: int = 100
    window: int = 4
    candidates: tuple[Format, ...] = ("bf16", "int8")
    tolerance: float = 0.05
    min_gain: float = 1.1
    hold: int = 2
    spike: float = 0.2
    explore: float = 0.3
    damage_weight: float = 5.0
    schedule: tuple[tuple[int, float], ...] = ()
    narrow: Format = "bf16"

    def __post_init__(self) -> None:
        if self.every < 2:
            raise ConfigError(f"every: must be at least 2 steps, one to measure and one to go by it, got {self.every}")
        if not 1 <= self.window < self.every:
            raise ConfigError(f"window: must be at least 1 and below every ({self.every}), got {self.window}")
        if self.min_gain < 1:
            raise ConfigError(f"min_gain: must be at least 1, got {self.min_gain}; 1.1 asks for a tenth")
        for name in ("tolerance", "spike"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}")
        if (self.kind == "schedule") != bool(self.schedule):
            raise ConfigError("schedule: (step, share) pairs and kind schedule belong together; give both or neither")
        steps, shares = [step for step, _ in self.schedule], [share for _, share in self.schedule]
        if steps != sorted(set(steps)) or any(not 0 <= share <= 1 for share in shares):
            raise ConfigError(f"schedule: steps must rise and shares lie in [0, 1], got {self.schedule}")

    @property
    def looks(self) -> bool:
        """Whether decisions rest on indicators."""
        return self.kind in ("rules", "bandit")
