"""The settings of `modelwright augment` beside those of the methods."""

from dataclasses import dataclass

from modelwright.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Which copies are made."""

    methods: tuple[str, ...] = ("synonym_replacement", "identifier_renaming", "comment_dropping")
    """Names of methods; each document gets one of those that take its kind. docs/augmentation.md describes them."""
    strength: float = 1.0
    """Probability, in (0, 1], that a document gets a copy in a round."""
    copies: int = 1
    """Number of rounds; each draws methods and words anew."""
    seed: int = 0
    """Seed of all random choices."""
    num_workers: int = 0
    """Worker processes, each with its own copy of a method's model; 0 uses every core."""

    def __post_init__(self) -> None:
        if not 0 < self.strength <= 1:
            raise ConfigError(f"strength: {self.strength} is not in (0, 1]")
        if self.copies < 1:
            raise ConfigError(f"copies: must be at least 1, got {self.copies}")
        if self.num_workers < 0:
            raise ConfigError(f"num_workers: must not be negative, got {self.num_workers}; 0 uses every core")
