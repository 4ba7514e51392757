"""Settings of cleaning, and the list of its steps."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from modelwright.core.config import dump
from modelwright.core.errors import ConfigError
from modelwright.core.extensions import configured
from modelwright.data.clean.duplicates.corpus import DuplicatesConfig
from modelwright.data.clean.noise.cascade import NoiseConfig
from modelwright.data.clean.step_files import load_step, package_step
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
"""The steps in their order. A user's own steps (`CleanConfig.steps`) follow the first."""
STEPS_GROUP = "modelwright.steps"
"""Entry points of other packages: each a `StepSpec`."""


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """The settings of the steps, in their order."""

    format: FormatConfig = field(default_factory=FormatConfig)
    steps: tuple[str | dict[str, Any], ...] = field(default=(), hash=False)
    """Further steps, each `FILE.py:NAME` of your own, or `NAME` or `{NAME: {SETTINGS}}` of another installed package
    (docs/extending.md). They run in this order, after `format`."""
    urls: UrlsConfig = field(default_factory=UrlsConfig)
    decontamination: DecontaminationConfig = field(default_factory=DecontaminationConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    duplicates: DuplicatesConfig = field(default_factory=DuplicatesConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    engine: Literal["local", "ray"] = "local"
    """Engine that processes shards: `local` uses processes of this machine, `ray` uses Ray, on this machine or on the
    cluster at `RAY_ADDRESS`. The result does not depend on it."""
    num_workers: int = 0
    """Number of processes that clean; 0 uses every core. The result does not depend on it."""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ConfigError(f"num_workers: must not be negative, got {self.num_workers}; 0 uses every core")
        steps = list[str | dict[str, Any]]()
        for entry in self.steps:
            one = {entry: {}} if isinstance(entry, str) and re.fullmatch(r"[\w-]+", entry) else entry
            if isinstance(one, dict):
                if len(one) != 1:
                    text = f"steps: {one} has {len(one)} names"
                    raise ConfigError(f"{text}; write an entry {{NAME: {{SETTINGS}}}} for each")
                # With all settings written out, cleaned data does not change with the defaults of another package.
                one = {name: dump(settings) for name, (_, settings) in _named(one).items()}
            steps.append(one)
        object.__setattr__(self, "steps", tuple(steps))

    def specs(self) -> list[tuple[StepSpec, Any]]:
        """All steps except those of files, each with its settings: this package's, then those of other packages."""
        named = [one for entry in self.steps if isinstance(entry, dict) for one in _named(entry).values()]
        return [*((spec, spec.settings_of(self)) for spec in STEPS), *named]

    def replace_paths(self, source: Callable[[str], str], path: Callable[[str], str]) -> "CleanConfig":
        """Returns the settings with one function applied to each source that a step reads, and another to each path."""
        own = [spec for spec in STEPS if not spec.section]
        sections = {spec.name: spec.replace_paths(spec.settings_of(self), source, path) for spec in own}
        steps = list[str | dict[str, Any]]()
        for entry in self.steps:
            if isinstance(entry, str):
                steps.append(path(entry))
                continue
            ((name, (spec, settings)),) = _named(entry).items()
            steps.append({name: dump(spec.replace_paths(settings, source, path))})
        return replace(self, **sections, steps=tuple(steps))


def _named(entry: dict[str, Any]) -> dict[str, tuple[StepSpec, Any]]:
    return configured(STEPS_GROUP, StepSpec, entry, "steps")


def build_steps(config: CleanConfig, *, seed: int = 1) -> list[Step | CorpusStep]:
    """Builds the steps of the settings. Raises `ConfigError` for one that cannot be loaded or whose name is taken."""
    own = list[Step | CorpusStep]()
    for entry in config.steps:
        if isinstance(entry, str):
            own.append(load_step(entry))
        else:
            ((name, (spec, settings)),) = _named(entry).items()
            if (step := spec.build(settings, seed)) is not None:
                own.append(package_step(name, step))
    known = {spec.name for spec in STEPS}
    for step in own:
        if step.name in known:
            raise ConfigError(f"steps: there are two steps called {step.name!r}; rename one of them")
        known.add(step.name)
    first, *others = (step for spec in STEPS if (step := spec.build(spec.settings_of(config), seed)) is not None)
    return [first, *own, *others]
