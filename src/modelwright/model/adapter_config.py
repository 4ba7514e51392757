"""Settings of low-rank adapters, under the names that PEFT gives them."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from modelwright.core.compatibility import FLOAT_PRODUCTS, TRAINED_WEIGHTS, Feature, feature
from modelwright.core.config import only_for
from modelwright.core.errors import ConfigError

BaseFormat = Literal["full", "int8", "nf4"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The projections of a block."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021): the model's own weights are frozen, and each chosen projection adds
    scale * B A x to its output W x.

    A pattern is a regular expression for one or several consecutive parts of a projection's name: `q_proj`, `ffn`,
    `q_proj|v_proj`, `blocks\\.[01]`. Names are those of this project: `blocks.0.attention.q_proj`,
    `blocks.0.ffn.up_proj`.
    """

    r: int = 0
    """Rank of the adapters; 0 trains the model's own weights instead."""
    lora_alpha: float = field(default=16.0, metadata=only_for("r"))
    """The adapters' output is scaled by lora_alpha / r."""
    lora_dropout: float = field(default=0.0, metadata=only_for("r"))
    """Probability with which an adapter ignores an input feature of a token in training."""
    target_modules: tuple[str, ...] = field(default=PROJECTIONS, metadata=only_for("r"))
    """Patterns of the projections that get adapters."""
    rank_pattern: dict[str, int] = field(default_factory=dict[str, int], hash=False, metadata=only_for("r"))
    """Ranks of the projections that a pattern matches, in place of `r`; the first match counts."""
    alpha_pattern: dict[str, float] = field(default_factory=dict[str, float], hash=False, metadata=only_for("r"))
    """`lora_alpha` of the projections that a pattern matches; the first match counts."""
    use_rslora: bool = field(default=False, metadata=only_for("r"))
    """Scale by lora_alpha / sqrt(r), which keeps the size of updates at high ranks (Kalajdzievski 2023)."""
    use_dora: bool = field(default=False, metadata=only_for("r"))
    """Also train the length of each row of the adapted weights (DoRA, Liu et al. 2024)."""
    base_format: BaseFormat = field(default="full", metadata=only_for("r"))
    """Storage format of the frozen projections: `nf4`, four bits and a scale for each 64 weights, dequantized on every
    use (QLoRA, Dettmers et al. 2023); `int8`, the same in eight bits; `full`, the model's own format."""

    def __post_init__(self) -> None:
        if self.r < 0:
            raise ConfigError(f"r: must not be negative, got {self.r}; 8 is usual, 0 trains without adapters")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ConfigError(f"lora_dropout: must be at least 0 and below 1, got {self.lora_dropout}")
        if not self.target_modules:
            raise ConfigError(f"target_modules: is empty; name projections, such as {', '.join(PROJECTIONS)}")
        if wrong := [pattern for pattern, rank in self.rank_pattern.items() if rank < 1]:
            raise ConfigError(f"rank_pattern: the rank of {wrong[0]!r} must be at least 1")
        for value in (self.lora_alpha, *self.alpha_pattern.values()):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"lora_alpha, alpha_pattern: must be above 0, got {value}")
        for pattern in (*self.target_modules, *self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"target_modules: {pattern!r} is not a regular expression ({error})") from None

    def targets(self, names: Iterable[str]) -> list[str]:
        """Selects projections, in their order. Raises `ConfigError` for a pattern that matches none of them."""
        names = list(names)
        chosen = [name for name in names if any(matches(pattern, name) for pattern in self.target_modules)]
        for setting, patterns, among in (
            ("target_modules", self.target_modules, names),
            ("rank_pattern", self.rank_pattern, chosen),
            ("alpha_pattern", self.alpha_pattern, chosen),
        ):
            for pattern in patterns:
                if not any(matches(pattern, name) for name in among):
                    known = ", ".join(dict.fromkeys(name.split(".", 2)[-1] for name in among))
                    raise ConfigError(f"lora.{setting}: {pattern!r} matches no projection; there are {known}")
        return chosen

    def rank_of(self, name: str) -> int:
        """Rank of a projection's adapter."""
        return next((rank for pattern, rank in self.rank_pattern.items() if matches(pattern, name)), self.r)

    def scale_of(self, name: str) -> float:
        """Factor of an adapter's output."""
        rank = self.rank_of(name)
        alphas = (alpha for pattern, alpha in self.alpha_pattern.items() if matches(pattern, name))
        return next(alphas, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def features(self) -> list[Feature]:
        """Features of a run that adapters need or break."""
        if not self.r:
            return []
        needs = [FLOAT_PRODUCTS] if self.base_format != "full" else []
        packed = [feature("base_format", self.base_format, needs=needs)] if needs else []
        return [feature("r", self.r, breaks=[TRAINED_WEIGHTS]), *packed]


def matches(pattern: str, name: str) -> bool:
    """Returns whether a pattern matches one or several consecutive parts of a dotted name."""
    return re.search(rf"(?:^|\.)(?:{pattern})(?:\.|$)", name) is not None
