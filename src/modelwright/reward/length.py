"""Reward for the length of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.core.errors import ConfigError
from modelwright.reward.reward import Reward, Sample, Score


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """A range of lengths."""

    max_len: int
    """Upper end of the range."""
    min_len: int = 0
    """Lower end of the range."""
    unit: Literal["tokens", "characters"] = "tokens"
    """What is counted."""
    shape: Literal["clipped", "linear", "overlong"] = "clipped"
    """`clipped`: 1 in the range, else 0. `linear`: outside of the range it falls to 0 over `margin`. `overlong`: the
    soft overlong punishment of DAPO, which is 0 up to `max_len - margin`, falls to -1 at `max_len` and stays there."""
    margin: int = 0
    """Length over which `linear` and `overlong` fall; the cache length of DAPO."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_len <= self.max_len:
            raise ConfigError(f"min_len: {self.min_len} is not between 0 and max_len, which is {self.max_len}")
        if self.shape == "clipped" and self.margin:
            raise ConfigError("margin: has no meaning for the shape clipped; remove it or choose linear or overlong")
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
        return [self._score(s.num_tokens if self.config.unit == "tokens" else len(s.answer)) for s in samples]

    def _score(self, length: int) -> Score:
        outcome = "short" if length < self.config.min_len else "long" if length > self.config.max_len else "in_range"
        if self.config.shape == "overlong":
            return Score(overlong_punishment(length, self.config.max_len, self.config.margin), outcome)
        excess = max(self.config.min_len - length, length - self.config.max_len, 0)
        if self.config.shape == "linear":
            return Score(max(0.0, 1.0 - excess / self.config.margin), outcome)
        return Score(float(excess == 0), outcome)


def overlong_punishment(length: int, max_len: int, cache_len: int) -> float:
    """Soft overlong punishment (Yu et al. 2025, DAPO, section 3.4, equation 13), between -1 and 0."""
    return min(0.0, max(-1.0, (max_len - cache_len - length) / cache_len))
