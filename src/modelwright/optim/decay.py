"""Weight decay that eases off while gradients are large. Knows no optimizer step and no rank."""

from dataclasses import dataclass

from modelwright.core.compatibility import WHOLE_GRADIENTS, Feature, feature
from modelwright.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DynamicDecayConfig:
    """When weight decay is lowered, as published (0.01, and 0.001 while the gradient norm is above 5).

    above_norm: gradient norm, before clipping, above which decay is `factor` times what it is otherwise; 0 never.
    release: decay comes back once the norm has fallen below this share of `above_norm`, so that norms about the
    threshold do not switch it to and fro.
    """

    above_norm: float = 0.0
    factor: float = 0.1
    release: float = 0.8

    def __post_init__(self) -> None:
        if self.above_norm < 0:
            raise ConfigError(f"above_norm: must not be negative, got {self.above_norm}; 0 keeps decay as it is")
        if not 0.0 <= self.factor <= 1.0:
            raise ConfigError(f"factor: must be in [0, 1], got {self.factor}; 0.1 is the published ratio")
        if not 0.0 < self.release <= 1.0:
            raise ConfigError(f"release: must be above 0 and at most 1, got {self.release}; 1 is no hysteresis")

    @classmethod
    def published(cls) -> "DynamicDecayConfig":
        """A tenth above a norm of 5."""
        return cls(above_norm=5.0)

    def features(self) -> list[Feature]:
        """What this needs of a run."""
        return [feature("above_norm", needs=[WHOLE_GRADIENTS])] if self.above_norm else []

    def is_low(self, norm: float, was_low: bool) -> bool:
        """Whether decay is lowered at an update with this gradient norm."""
        if not self.above_norm:
            return False
        return norm > self.above_norm * (self.release if was_low else 1.0)
