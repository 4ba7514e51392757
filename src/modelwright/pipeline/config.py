"""Configuration of a whole run: its stages, a section for each of them, and their shared sections.

Each section is the config of the component that the stage drives, defined next to that component. A training stage
inherits the sections `training`, `lora`, `ewc` and `energy` and sets only its differences. `pipeline.run_config` reads
such a configuration; the value `auto` is resolved once, before the run's config.yaml is written (`pipeline.resolve`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from modelwright.core.config import ConfigError, did_you_mean, difference, dump, if_missing
from modelwright.core.sinks import TrackingConfig
from modelwright.data.augment.methods import known_methods
from modelwright.data.rows.cache.row_cache import RowCacheConfig
from modelwright.data.sources.sources import SourceConfig
from modelwright.data.tokenizer.tokenizer import TokenizerConfig
from modelwright.model.config import ModelConfig
from modelwright.model.low_rank import AdapterConfig
from modelwright.model.vision.config import VisionConfig
from modelwright.objectives.rollouts import RolloutConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.pipeline.stage import StageSpec
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.train.config import SharedTrainConfig, TrainConfig
from modelwright.train.monitors.energy import EnergyConfig
from modelwright.train.techniques.augmentation_strength import AugmentationStrengthConfig
from modelwright.train.techniques.ewc import EwcConfig


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


MAX_THREADS = 1024
"""Limit of `num_threads`: OpenMP ends the process if it cannot start all requested threads."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Device and threads of a run, decided when it is created."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is CUDA if a GPU exists, else the CPU."""
    num_threads: int = 0
    """Threads of all processes of one machine together; 0 for every core, at most `OMP_NUM_THREADS` of them."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_threads <= MAX_THREADS:
            raise ConfigError(f"num_threads: must be from 0 (every core) to {MAX_THREADS}, got {self.num_threads}")


INHERITED = ("lora", "ewc", "energy")
"""Sections that every training stage inherits under the same name, in addition to the settings of `training`."""
SHARED: Mapping[str, type] = {"rollout": RolloutConfig, "vision_tower": VisionConfig}
"""Sections that those training stages inherit whose settings have a field of that name. A run has them with the first
such stage."""


def inherited(stage: StageSpec) -> tuple[str, ...]:
    """Returns the sections that a training stage inherits, in addition to the settings of `training`."""
    own = {one.name for one in fields(stage.config)} if stage.config else set[str]()
    return tuple(name for name in (*INHERITED, *SHARED) if name in own)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run from raw text to a served model."""

    name: str
    """Name of the run and of its folder under `runs/`."""
    seed: int = 1
    """Seed of everything random."""
    stages: tuple[StageSpec, ...]
    """Stages of the run, in the pipeline's order."""
    init_from: str = ""
    """Hugging Face folder (Llama, Qwen2 or 3, Mistral, Gemma 2 or 3 text, Phi-3, SmolLM3) to start from; its tokenizer
    and shape replace the sections `tokenizer` and `model`. "" starts from random weights."""
    rows_from: str = ""
    """Folder of another run, or its fsspec URL, whose clean text, tokenizer and packed rows this run uses instead of
    making its own. Its training rows and their images are not copied: they are read from there, through `cache`. ""
    makes them from `data.sources`."""
    minutes: float = 0.0
    """Minutes for the whole run, all stages included; 0 trains for the configured lengths. Steps are timed when the run
    is created, and their number follows from the expected time of the other stages; it is written into the run's
    config.yaml. A length of a training that is given in addition, on the command line or in a file over a recipe,
    replaces it."""
    validation_tokens: int = 65_536
    """Size of the fixed random sample of validation text on which training is evaluated while it runs; 0 uses all."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: SourceConfig = field(default_factory=SourceConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(metadata=if_missing("describe a model, or start from a model folder with init_from"))
    training: SharedTrainConfig = field(default_factory=SharedTrainConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    """Settings that training stages inherit as their own `lora`, like `training`."""
    ewc: EwcConfig = field(default_factory=EwcConfig)
    """Settings that training stages inherit as their own `ewc`."""
    energy: EnergyConfig = field(default_factory=EnergyConfig)
    """Settings that training stages inherit as their own `energy`."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cache: RowCacheConfig = field(default_factory=RowCacheConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    requests: RequestsConfig = field(default_factory=RequestsConfig)
    sections: Mapping[str, Any]
    """Settings of each stage that has any, by the stage's name, and those that some stages share (`SHARED`)."""
    further_sections: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    """Plain sections of stages that the run does not have, kept in case such a stage is added to it: those of a recipe
    of which `--stages` chose a part."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith(".") or not self.name.isprintable():
            raise ConfigError(f"name: {self.name!r} must be usable as a folder name, without slashes or a leading dot")
        if not 0.0 <= self.minutes < math.inf:
            raise ConfigError(f"minutes: must be above 0, or 0 for the configured lengths, got {self.minutes:g}")
        if self.validation_tokens < 0:
            raise ConfigError(f"validation_tokens: must be 0 (all) or more, got {self.validation_tokens}")

    def section(self, stage: StageSpec | str) -> Any:
        """Returns the settings of a stage of the run. Raises `KeyError` for a stage that the run does not have."""
        return self.sections[stage if isinstance(stage, str) else stage.name]

    def has(self, stage: StageSpec) -> bool:
        """Returns True if the run has the stage."""
        return any(one.name == stage.name for one in self.stages)

    def with_sections(self, sections: Mapping[str, Any]) -> "RunConfig":
        """Returns the same run with other settings of some stages."""
        return replace(self, sections={**self.sections, **sections})

    def plain(self) -> dict[str, Any]:
        """Returns the settings as in YAML: the shared sections, and one for each stage without inherited settings."""
        apart = ("sections", "further_sections")
        shared = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in apart}
        plain: dict[str, Any] = {
            name: self.stage_names if name == "stages" else dump(value) for name, value in shared.items()
        }
        sections = {name: dump(section) for name, section in self.sections.items()}
        for stage in self.trainings:
            # A training section contains only its differences, so that a change of `training` in the file reaches it.
            shared, section = {**plain, **sections}, sections[stage.name]
            base = {**plain["training"], **{name: shared[name] for name in inherited(stage) if name in shared}}
            own = [name for name in section if name not in base]
            sections[stage.name] = {name: section[name] for name in own} | difference(section, base, without=own)
        return plain | sections | dict(self.further_sections)

    @property
    def stage_names(self) -> list[str]:
        """Names of the stages that a user may name, in order."""
        return [stage.name for stage in self.stages if not stage.is_implied]

    @property
    def text_sources(self) -> tuple[str, ...]:
        """Sources of the text, as a user named them."""
        return (self.rows_from,) if self.rows_from else self.data.sources

    @property
    def trainings(self) -> tuple[StageSpec, ...]:
        """Stages of the run that train, in order."""
        return tuple(stage for stage in self.stages if stage.objective)

    @property
    def model_stages(self) -> tuple[StageSpec, ...]:
        """Stages that produce a model, in order: the last one's is the run's result."""
        return tuple(stage for stage in self.stages if stage.model_title)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of `model_stages`."""
        return tuple(stage.name for stage in self.model_stages)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the stages whose models can be served, in order."""
        return tuple(stage.name for stage in self.stages if stage.model_title or stage.reads_images)

    @property
    def first_training(self) -> TrainConfig:
        """Settings of the first training, for measurements before anything is trained; the defaults without one."""
        return self.section(self.trainings[0]) if self.trainings else TrainConfig()
