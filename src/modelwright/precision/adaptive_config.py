"""Settings of formats that change while a model trains; `controllers.py` implements them."""

from dataclasses import dataclass
from typing import Literal

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError
from modelwright.ops.lowp_linear import Format


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """Number formats that change while the model trains."""

    kind: Literal["none", "rules", "bandit", "schedule"] = "none"
    """`rules`: decide by measured speed and damage; `bandit`: a contextual bandit decides (LinUCB, Li et al. 2010);
    `schedule`: follow `schedule`; `none`."""
    decide_every_steps: int = 100
    """Steps between decisions."""
    candidates: tuple[Format, ...] = ("bf16", "int8")
    """Formats to choose among; FP32 and the policy's own are always candidates."""
    tolerance: float = constant(0.05)
    """Largest accepted damage to a submodule's gradients, as a relative error."""
    schedule: tuple[tuple[int, float], ...] = ()
    """(step, fraction) pairs: from that step on, this fraction of the submodules computes in `low_precision`,
    feed-forward first."""
    low_precision: Format = "bf16"
    """Format that `schedule` switches to."""
    measure_steps: int = constant(4)
    """Steps before each decision that are measured."""
    min_speedup: float = constant(1.1)
    """Least speedup for which a format is changed."""
    cooldown_decisions: int = constant(2)
    """Decisions for which a changed submodule is left alone."""
    revert_on_loss_rise: float = constant(0.2)
    """Relative rise of the loss over its running mean that restores the last good formats."""
    exploration: float = constant(0.3)
    """Width of the bandit's confidence bounds: a larger value favors formats that were tried less."""
    damage_penalty: float = constant(5.0)
    """Weight of damage against saved time in the bandit's reward."""

    def __post_init__(self) -> None:
        assert self.measure_steps >= 1
        if self.decide_every_steps <= self.measure_steps:
            raise ConfigError(
                f"decide_every_steps: must be at least {self.measure_steps + 1}, because the last {self.measure_steps} "
                f"steps before each decision are measured; got {self.decide_every_steps}"
            )
        if self.min_speedup < 1:
            raise ConfigError(f"min_speedup: must be at least 1, got {self.min_speedup}; 1.1 requires a tenth")
        for name in ("tolerance", "revert_on_loss_rise"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}")
        if (self.kind == "schedule") != bool(self.schedule):
            raise ConfigError("schedule: (step, share) pairs require kind schedule and vice versa; set both or neither")
        steps, shares = [step for step, _ in self.schedule], [share for _, share in self.schedule]
        if steps != sorted(set(steps)) or any(not 0 <= share <= 1 for share in shares):
            raise ConfigError(f"schedule: steps must increase and shares must be in [0, 1], got {self.schedule}")

    @property
    def looks(self) -> bool:
        """True if decisions use indicators."""
        return self.kind in ("rules", "bandit")
