"""Settings of cleaning."""

from dataclasses import dataclass, field

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError
from modelwright.data.deduplicate import DuplicatesConfig
from modelwright.data.steps.format import FormatConfig
from modelwright.data.steps.noise import NoiseConfig
from modelwright.data.steps.privacy import PrivacyConfig
from modelwright.data.steps.quality import QualityConfig


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """The settings of the stages, in their order."""

    format: FormatConfig = field(default_factory=FormatConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    duplicates: DuplicatesConfig = field(default_factory=DuplicatesConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    num_workers: int = 0
    """Processes that clean; 0 uses every core. The result does not depend on it."""
    shard_documents: int = constant(1000)
    """Documents that are read, measured and written at a time."""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ConfigError(f"num_workers: must not be negative, got {self.num_workers}; 0 uses every core")
