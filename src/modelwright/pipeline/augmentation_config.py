"""The section `augmentation`: documents that change while a model trains on them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelwright.core.errors import ConfigError
from modelwright.core.suggest import did_you_mean
from modelwright.data.augment.methods import known_methods
from modelwright.train.techniques.augmentation_strength import AugmentationStrengthConfig


@dataclass(frozen=True, kw_only=True)
class AugmentationConfig:
    """Text augmentation of the training stages that learn from texts or conversations. docs/augmentation.md describes
    the methods; `modelwright augment` shows their effect.
    """

    methods: tuple[str, ...] = ()
    """Names of methods; each document is changed by one of those for its kind. Empty turns augmentation off."""
    settings: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """Settings of methods by their names: `{random_swap: {fraction: 0.2}}`."""
    strength: AugmentationStrengthConfig = field(default_factory=AugmentationStrengthConfig)
    num_workers: int = 1
    """Worker processes of each training process, each with its own copy of a method's model; 0 augments in the training
    process."""

    def __post_init__(self) -> None:
        known = [method.name for method in known_methods()] if self.methods or self.settings else []
        for key, names in (("methods", self.methods), ("settings", self.settings)):
            for name in names:
                if name not in known:
                    raise ConfigError(f"{key}: {name!r} is unknown{did_you_mean(name, known)} ({', '.join(known)})")
        for name, settings in self.settings.items():
            if not isinstance(settings, Mapping):
                raise ConfigError(f"settings.{name}: expected a mapping, got {settings!r}")
        if self.num_workers < 0:
            raise ConfigError(f"num_workers: must not be negative, got {self.num_workers}")

    @property
    def is_on(self) -> bool:
        return bool(self.methods)
