"""A stage: one arrow of the pipeline, from its parents' artifacts to its own; and the configuration of a run of stages.

`StageSpec` contains everything that the rest of the pipeline knows about a kind of stage; `stages/specs.py` lists them.
It builds a `Stage` for a run's configuration, a plain function of a `StageContext`. The runner decides when that
function runs, whether it may be skipped, and how an unfinished stage is treated.

A run's configuration and data are made of these types, so they are `Any` here: `Config` is `RunConfig`, `Results` and
`StageResults` are `RunData` and `StageData` of `pipeline.report.run_data`.

`RunConfig` is the configuration of a whole run: its stages, a section for each of them, and their shared sections.
Each section is the config of the component that the stage drives, defined next to that component. A training stage
inherits the sections `training`, `lora`, `ewc` and `energy` and sets only its differences. `pipeline.run_config` reads
such a configuration; the value `auto` is resolved once, before the run's config.yaml is written (`pipeline.resolve`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from modelwright.core import config as core_config
from modelwright.core.artifacts import ArtifactDraft, RunDir, StageDir
from modelwright.core.config import ConfigError, did_you_mean, difference, dump, if_missing
from modelwright.core.progress import Progress
from modelwright.core.sinks import TrackingConfig
from modelwright.data.augment.methods import known_methods
from modelwright.data.document import Split
from modelwright.data.rows.cache.row_cache import RowCacheConfig
from modelwright.data.sources.sources import SourceConfig
from modelwright.data.tokenizer.tokenizer import TokenizerConfig
from modelwright.model.decoder import ModelConfig
from modelwright.model.low_rank import AdapterConfig
from modelwright.model.vision.config import VisionConfig
from modelwright.objectives.rollouts import RolloutConfig
from modelwright.parallel.mesh import ParallelConfig
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.train.config import SharedTrainConfig, TrainConfig
from modelwright.train.monitors.energy import EnergyConfig
from modelwright.train.techniques.augmentation_strength import AugmentationStrengthConfig
from modelwright.train.techniques.ewc import EwcConfig

if TYPE_CHECKING:
    from modelwright.data.augment.augmenter import RowEncoder
    from modelwright.data.images.store import ImageStore
    from modelwright.data.rows.ahead import PlannedRows
    from modelwright.data.rows.pack import PackConfig
    from modelwright.model.decoder import Decoder
    from modelwright.parallel.mesh import World
    from modelwright.pipeline.estimate.cost import StageEstimate
    from modelwright.pipeline.report.blocks import Block, Fact, Section
    from modelwright.train.objective import BatchSource, Objective

Config: TypeAlias = Any
Results: TypeAlias = Any
StageResults: TypeAlias = Any

FORMAT_VERSION = 1
"""Raised when the meaning of any artifact changes: every stage of an older run is then made again."""


class Ranks(Protocol):
    """The processes that work on this run together (implemented by `parallel.mesh.World`)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def barrier(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Arguments of a stage's function.

    `folder`: folder of checkpoints, metrics and the log while the stage runs; `output`: draft of its artifact, which
    only rank 0 may write to; `parents`: finished artifacts by stage name; `digest`: digest of everything that
    determines the result, so that a checkpoint of another configuration is never used; `restart`: training whose
    checkpoints are all damaged starts over at step 0.
    """

    folder: StageDir
    output: ArtifactDraft
    parents: Mapping[str, Path]
    digest: str
    ranks: Any
    progress: Progress
    restart: bool = False


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of a run.

    `settings`: plain data, everything that determines the result besides the parents' contents; `every_rank`: whether
    all processes take part (training) or only the first (data); `version`: increased when this stage's output changes
    meaning.
    """

    name: str
    title: str
    settings: Any
    parents: tuple[str, ...]
    run: Callable[[StageContext], None]
    every_rank: bool = False
    version: int = 1

    def digest(self, contents: Mapping[str, str]) -> str:
        """Digest of the settings, the versions and the parents' content digests (`contents`, by name)."""
        # Contents instead of the parents' settings: a parent that was made again with equal contents changes nothing.
        return core_config.digest(
            {
                "stage": self.name,
                "version": [FORMAT_VERSION, self.version],
                "settings": self.settings,
                "parents": {name: contents[name] for name in self.parents},
            }
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSet:
    """Rows of one kind."""

    name: str
    """Folder in the artifact of the stage pack."""
    title: str
    """Name of the rows in tables."""
    pack: Callable[[Any, Split], object]
    """Packs the documents of one split: gets a `PackJob` of `pipeline.stages.rows` and calls its `pack` with the name
    `<name>/<split>`."""
    encoder: "Callable[[PackConfig, Path], RowEncoder] | None" = None
    """Makes, from the settings of packing and the tokenizer's folder, an encoder that encodes documents as `pack` did,
    for augmentation during training. None if documents of these rows cannot be augmented."""
    documents: str = "prose or code document"
    """Singular name of the documents that become rows, for messages."""
    learned: Literal["tokens", "images", "completions"] = "tokens"
    """Training data: the tokens of the rows, images that belong to them, or completions of them that the stage
    generates. Only trainings on tokens can be timed before a run, on rows of random tokens."""
    trained_rows: int = 1
    """Number of rows of a group that count in `batch_tokens`, because training learns from them; 1 without groups."""
    if_empty: str = ""
    """Why a training without rows passes its model on unchanged; "" if that is an error."""
    stdlib_bytes: float = 0.0
    """Size of the part of the built-in corpus that becomes these rows."""
    decides: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    """Further settings that decide these rows, in addition to those of packing: those of the stage that trains on
    them."""


@dataclass(frozen=True, kw_only=True)
class StageInputs:
    """Arguments from which a training stage builds its objective."""

    config: Config
    training: Any
    """Settings of the stage: a `TrainConfig`, as `StageSpec.config` defines it."""
    loader: "BatchSource"
    """Batches of the stage's rows."""
    plan: "PlannedRows"
    """The same batches before augmentation. It knows the rows of a batch before they are read."""
    images: "ImageStore | None"
    """Images of the rows; None for rows without images."""
    parents: Mapping[str, Path]
    """Artifacts that the stage reads, by stage name: a reference model, for example."""
    world: "World"
    """Processes of the run, over which further models may be divided."""
    folder: Path
    """Folder of the stage, for files of the objective."""
    note: Callable[[str], None]
    """Shows a line to the user."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Compute rates on which estimates of a run's cost are based."""

    flops_per_s: Mapping[str, float]
    """Rate of a host's matrix products in training, by compute format."""
    num_hosts: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class StageSpec:
    """A kind of stage, with everything that a run needs to check, plan, execute and report it."""

    name: str
    """Name in `stages` and on the command line, of the folder in the run directory, and of the section of settings."""
    title: str
    """Activity, for the log: `Training the tokenizer`."""
    build: Callable[[Config, RunDir, Sequence[str]], Stage]
    """Makes the stage for a resolved configuration. The last argument names the stages that are finished or will be
    worked on: a stage may read the ones among them that it does not need."""
    estimate: "Callable[[Config, RunDir, Rates], StageEstimate]"
    """Estimates the cost of the stage, for `--dry-run`, from the configuration and finished artifacts alone."""
    config: type | None = None
    """Dataclass of its section, which must be valid with its defaults; None for a stage without settings."""
    reads: "tuple[StageSpec, ...]" = ()
    """Other stages whose sections it reads; a run with this stage has these sections."""
    needs: Callable[[Config], tuple[str, ...]] = lambda config: ()
    """Names of the stages that a run must have for this one."""
    extras: Callable[[Config], Mapping[str, str]] = lambda config: {}
    """Extras whose libraries must be installed before a run with the stage begins, by the setting that needs them."""
    only_if_named: bool = False
    """Leave it out of a run whose `stages` are not set."""
    with_init_from: Literal["kept", "only", "never"] = "kept"
    """`only`: part of every run with `init_from`, without being named in `stages`; `never`: `init_from` replaces it."""
    report: "Callable[[Results, StageResults], Section | None]" = lambda data, stage: None
    """Section of the report about the finished stage."""
    headline: "Callable[[Results, StageResults], Sequence[Fact]]" = lambda data, stage: ()
    """Figures of the finished stage at the top of the report."""
    highlight: "Callable[[Results, StageResults], Sequence[Block]]" = lambda data, stage: ()
    """Blocks about the finished stage on the first screen of the report, below the figures."""
    closing: Callable[[Results, StageResults], Sequence[str]] = lambda data, stage: ()
    """Lines that the terminal shows when the run ends; without any it shows the figures of `headline`."""
    warnings: Callable[[StageResults], Sequence[str]] = lambda stage: ()
    """Warnings about the finished stage at the top of the report."""
    model_title: str = ""
    """Name of the model that the stage produces, for tables: `fine-tuned`; "" for a stage that produces none."""
    objective: "Callable[[StageInputs], Objective] | None" = None
    """Makes the objective of a training stage, whose section is a `TrainConfig`. None for a stage without training."""
    reads_images: bool = False
    """True if its artifact is a model that reads images: it is served, while later stages continue with the language
    model from before it."""
    is_reward_model: bool = False
    """True if its artifact is a reward model, with which later stages may score answers."""
    run_needs: frozenset[str] = frozenset()
    """Properties of a run (`core/compatibility.py`) that the objective and the techniques of a training stage rely on,
    in addition to those that its settings need."""
    rows: RowSet | None = None
    """Rows of tokens that a training stage learns from."""
    fresh: "Callable[[Config], Decoder] | None" = None
    """Makes the model with random weights that a training stage starts from if no stage before it has made one."""
    time_weight: float = 1.0
    """Share of the time budget (`--minutes`) that a training stage gets, relative to the other training stages."""
    follows: str = ""
    """Stage of this package that a stage from another package follows in the pipeline's order."""

    def new_objective(self, inputs: StageInputs) -> "Objective":
        """Returns the objective of a training stage: the one that its settings name, or its own."""
        from modelwright.train.outside import named_objectives  # imports PyTorch

        assert self.objective is not None
        for spec, settings in named_objectives(inputs.training.objective).values():  # at most one
            return spec.build(settings, inputs)
        return self.objective(inputs)

    @property
    def trained_rows(self) -> int:
        """Number of rows that a training stage learns from together: those of a group, or one."""
        return self.rows.trained_rows if self.rows else 1

    @property
    def is_implied(self) -> bool:
        """True if users cannot name the stage, because `init_from` alone decides whether a run has it."""
        return self.with_init_from == "only"


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
