"""A stage: one arrow of the pipeline, from its parents' artifacts to its own.

`StageSpec` contains everything that the rest of the pipeline knows about a kind of stage; `stages/specs.py` lists them.
It builds a `Stage` for a run's configuration, a plain function of a `StageContext`. The runner decides when that
function runs, whether it may be skipped, and how an unfinished stage is treated.

A run's configuration and data are made of these types, so they are `Any` here: `Config` is `pipeline.config.RunConfig`,
`Results` and `StageResults` are `RunData` and `StageData` of `pipeline.report.run_data`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from modelwright.core import config as core_config
from modelwright.core.artifacts import ArtifactDraft, RunDir, StageDir
from modelwright.core.progress import Progress
from modelwright.data.document import Split

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
