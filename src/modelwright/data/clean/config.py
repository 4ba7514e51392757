"""Settings of cleaning, and the list of its steps."""

from dataclasses import dataclass, field
from typing import Literal

from modelwright.core.errors import ConfigError
from modelwright.data.clean.duplicates.corpus import DuplicatesConfig
from modelwright.data.clean.noise.cascade import NoiseConfig
from modelwright.data.clean.step_files import load_step
from modelwright.data.clean.steps.decontamination import DECONTAMINATION, DecontaminationConfig
from modelwright.data.clean.steps.duplicates import DUPLICATES
from modelwright.data.clean.steps.format import FORMAT, FormatConfig
from modelwright.data.clean.steps.images import IMAGES
from modelwright.data.clean.steps.noise import NOISE
from modelwright.data.clean.steps.privacy import PRIVACY, PrivacyConfig
from modelwright.data.clean.steps.quality import QUALITY, QualityConfig
from modelwright.data.clean.steps.step import CorpusStep, Step, StepSpec
from modelwright.data.clean.steps.urls import URLS, UrlsConfig

STEPS: tuple[StepSpec, ...] = (FORMAT, URLS, DECONTAMINATION, QUALITY, NOISE, DUPLICATES, IMAGES, PRIVACY)
"""The steps in their order. Those of a user's own (`CleanConfig.steps`) follow the first."""


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """The settings of the steps, in their order."""

    format: FormatConfig = field(default_factory=FormatConfig)
    steps: tuple[str, ...] = ()
    """Steps of your own, each `FILE.py:NAME`. They run in this order, after `format`."""
    urls: UrlsConfig = field(default_factory=UrlsConfig)
    decontamination: DecontaminationConfig = field(default_factory=DecontaminationConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    duplicates: DuplicatesConfig = field(default_factory=DuplicatesConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    engine: Literal["local", "ray"] = "local"
    """Where shards are processed: processes of this machine, or Ray, on this machine or on the cluster at
    `RAY_ADDRESS`. The result does not depend on it."""
    num_workers: int = 0
    """Processes that clean; 0 uses every core. The result does not depend on it."""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ConfigError(f"num_workers: must not be negative, got {self.num_workers}; 0 uses every core")


def build_steps(config: CleanConfig, *, seed: int = 1) -> list[Step | CorpusStep]:
    """The steps that the settings ask for. Raises `ConfigError` for a step of a user's own that cannot be loaded or has
    the name of another one.
    """
    own = [load_step(reference) for reference in config.steps]
    known = {spec.name for spec in STEPS}
    for step in own:
        if step.name in known:
            raise ConfigError(f"steps: there are two steps called {step.name!r}; rename one of them")
        known.add(step.name)
    first, *others = (step for spec in STEPS if (step := spec.build(spec.settings_of(config), seed)) is not None)
    return [first, *own, *others]
