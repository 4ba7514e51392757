"""Reward for the length of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.core.config import ConfigError
from modelwright.reward.reward import Reward, Sample, Score


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """A range of lengths."""

    max_len: int
    """Upper end of the range."""
    min_len: int = 0
    """Lower end of the range."""
    unit: Literal["tokens", "characters"] = "tokens"
    """Unit of length."""
    shape: Literal["clipped", "linear", "overlong"] = "clipped"
    """`clipped`: 1 in the range, else 0. `linear`: outside of the range it falls to 0 over `margin`. `overlong`: the
    soft overlong punishment of DAPO, which is 0 up to `max_len - margin`, falls to -1 at `max_len` and stays there."""
    margin: int = 0
    """Length over which `linear` and `overlong` fall; the cache length of DAPO."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_len <= self.max_len:
            raise ConfigError(f"min_len: {self.min_len} is not between 0 and max_len, which is {self.max_len}")
        if self.shape == "clipped" and self.margin:
            raise ConfigError("margin: is not used by the shape clipped; remove it or choose linear or overlong")
        if self.shape != "clipped" and self.margin < 1:
            raise ConfigError(f"margin: must be at least 1 for the shape {self.shape}, got {self.margin}")
        if self.shape == "overlong" and (self.margin > self.max_len or self.min_len):
            raise ConfigError("margin: must be at most max_len for the shape overlong, which takes no min_len")

    def build(self, name: str) -> Reward:
        return Length(name, self)


@dataclass(frozen=True)
class Length:
    name: str
    config: LengthConfig

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        config, scores = self.config, list[Score]()
        for sample in samples:
            length = sample.num_tokens if config.unit == "tokens" else len(sample.answer)
            outcome = "short" if length < config.min_len else "long" if length > config.max_len else "in_range"
            excess = max(config.min_len - length, length - config.max_len, 0)
            if config.shape == "overlong":
                # Soft overlong punishment (Yu et al. 2025, DAPO, section 3.4, equation 13), between -1 and 0.
                value = min(0.0, max(-1.0, (config.max_len - config.margin - length) / config.margin))
            elif config.shape == "linear":
                value = max(0.0, 1.0 - excess / config.margin)
            else:
                value = float(excess == 0)
            scores.append(Score(value, outcome))
        return scores
