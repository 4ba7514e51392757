"""Scaling of rotary frequencies for contexts longer than those of training (settings; formulas: `ops/rope.py`)."""

from dataclasses import dataclass
from typing import Literal

from modelwright.core.errors import ConfigError

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
"""Names and formulas of `transformers`. `default`: unscaled (Su et al. 2021); `linear`: position interpolation (Chen et
al. 2023); `dynamic`: NTK-aware, by the length of the sequence; `yarn`: Peng et al. 2023; `longrope`: Ding et al. 2024,
one set of factors for short sequences and one for long ones; `llama3`: Llama 3.1."""
BY_LENGTH: frozenset[RopeKind] = frozenset({"dynamic", "longrope"})
"""Kinds whose frequencies depend on the length of the sequence."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Settings of one kind of scaling; each kind reads its own fields."""

    kind: RopeKind = "default"
    """Formula."""
    factor: float = 1.0
    """Factor by which the context grows: all kinds but default."""
    original_max_len: int = 0
    """Context in tokens before scaling: all kinds but default and linear."""
    attention_factor: float = 0.0
    """Factor on rotated queries and keys, of yarn and longrope; 0 derives it from the lengths as the papers do."""
    beta_fast: float = 32.0
    """Rotations over the original context from which on a frequency is not scaled: yarn."""
    beta_slow: float = 1.0
    """Rotations up to which a frequency is interpolated: yarn."""
    truncate: bool = True
    """Round the bounds between these two to whole dimensions: yarn."""
    low_freq_factor: float = 1.0
    """Rotations up to which a frequency is divided by `factor`: llama3."""
    high_freq_factor: float = 4.0
    """Rotations from which on a frequency is not scaled: llama3."""
    short_factor: tuple[float, ...] = ()
    """Divisor of each frequency in sequences within the original context: longrope."""
    long_factor: tuple[float, ...] = ()
    """Divisor of each frequency in longer sequences: longrope."""

    def __post_init__(self) -> None:
        if self.kind != "default" and self.factor < 1:
            raise ConfigError(f"factor: must be at least 1, got {self.factor}")
        if self.kind not in ("default", "linear") and self.original_max_len < 1:
            raise ConfigError(f"original_max_len: {self.kind} needs the context before scaling, in tokens")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"high_freq_factor: must be above low_freq_factor ({self.low_freq_factor}), got {self.high_freq_factor}"
            )

    @property
    def depends_on_length(self) -> bool:
        """True if the frequencies of tokens depend on the length of their sequence."""
        return self.kind in BY_LENGTH

    def check_dim(self, rotary_dim: int) -> None:
        """Raises `ConfigError` unless the lists have one factor per pair of rotated dimensions."""
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            num_given = len(getattr(self, name))
            if num_given != rotary_dim // 2:
                raise ConfigError(f"{name}: has {num_given} factors for {rotary_dim // 2} frequencies; give one each")
