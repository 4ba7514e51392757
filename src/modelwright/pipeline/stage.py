"""A stage: one arrow of the pipeline, from its parents' artifacts to its own.

`StageSpec` says all that the rest of the pipeline knows about a kind of stage; `stages/specs.py` lists them. It builds
a `Stage` for a run's configuration, a plain function of a `StageContext`. The runner decides when that runs, whether it
may be skipped, and what happens to an unfinished one.

A run's configuration and data are made of these types, so they are `Any` here: `Config` is `pipeline.config.RunConfig`,
`Results` and `StageResults` are `RunData` and `StageData` of `pipeline.report.run_data`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from modelwright.core import config as core_config
from modelwright.core.artifacts import ArtifactDraft
from modelwright.core.progress import Progress
from modelwright.core.rundir import RunDir, StageDir
from modelwright.data.document import Split

if TYPE_CHECKING:
    from modelwright.data.augment.row_copies import RowEncoder
    from modelwright.data.images.store import ImageStore
    from modelwright.data.rows.batching.augmented import PlannedRows
    from modelwright.data.rows.pack import PackConfig
    from modelwright.model.decoder import Decoder
    from modelwright.parallel.mesh import World
    from modelwright.pipeline.estimate.cost import StageEstimate
    from modelwright.pipeline.report.blocks import Block, Fact, Section
    from modelwright.train.config import TrainConfig
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

    `folder`: where checkpoints, metrics and the log go while it runs; `output`: the draft of its artifact, which only
    rank 0 may write to; `parents`: the finished artifacts by stage name; `digest`: of everything that determines the
    result, so that a checkpoint of another configuration is never used; `restart`: training whose checkpoints are all
    damaged starts over at step 0.
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
    """One step of a run.

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
        return core_config.digest(
            {
                "stage": self.name,
                "version": [FORMAT_VERSION, self.version],
                "settings": self.settings,
                "parents": {name: contents[name] for name in self.parents},
            }
        )


def nothing_else(config: Config) -> Mapping[str, Any]:
    """`RowSet.decides` of rows that only the settings of packing decide."""
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSet:
    """Rows of one kind."""

    name: str
    """Folder in the artifact of the stage pack."""
    title: str
    """What the rows are for, for tables."""
    pack: Callable[[Any, Split], None]
    """Packs the documents of one split: gets a `PackJob` of `pipeline.stages.rows` and calls its `pack` with the name
    `<name>/<split>`."""
    encoder: "Callable[[PackConfig, Path], RowEncoder] | None" = None
    """From the settings of packing and the tokenizer's folder: encodes a document as `pack` did, for augmentation while
    a model trains. None if documents of these rows cannot be augmented."""
    documents: str = "prose or code document"
    """What the rows are made from, for messages."""
    learned: Literal["tokens", "images", "completions"] = "tokens"
    """What a training learns from: the tokens of the rows, images that belong to them, or completions of them that it
    generates. Only what learns from tokens can be tried before a run on rows of random ones."""
    trained_rows: int = 1
    """Rows of a group that a training learns from, which count in `batch_tokens`; 1 where rows are not grouped."""
    if_empty: str = ""
    """Why a training without rows passes its model on unchanged; "" if that is an error."""
    stdlib_bytes: float = 0.0
    """Size of the built-in corpus as these rows."""
    decides: Callable[[Config], Mapping[str, Any]] = nothing_else
    """What decides these rows besides the settings of packing: settings of the stage that learns from them."""


@dataclass(frozen=True, kw_only=True)
class StageInputs:
    """What the objective of a training stage is made from."""

    config: Config
    training: "TrainConfig"
    """Settings of the stage."""
    loader: "BatchSource"
    """Batches of the stage's rows."""
    plan: "PlannedRows"
    """The same batches before documents in them are changed. It knows the rows of a batch before they are read."""
    images: "ImageStore | None"
    """The images of the rows, None if they have none."""
    parents: Mapping[str, Path]
    """The artifacts that the stage reads, by stage name: a reference model, for example."""
    world: "World"
    """The processes of the run, for models that work beside the one in training."""
    folder: Path
    """The folder of the stage, for what the objective keeps on disk."""
    note: Callable[[str], None]
    """Shows a line to the user."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What estimates of a run's cost are based on."""

    flops_per_s: Mapping[str, float]
    """Rate of a host's matrix products in training, by compute format."""
    num_hosts: int = 1


def needs_nothing(config: Config) -> tuple[str, ...]:
    """`StageSpec.needs` of a stage that depends on no other."""
    return ()


def no_section(data: Results, stage: StageResults) -> "Section | None":
    """`StageSpec.report` of a stage with no section of its own."""
    return None


def no_facts(data: Results, stage: StageResults) -> "Sequence[Fact]":
    """`StageSpec.headline` of a stage with no figure at the top of the report."""
    return ()


def no_blocks(data: Results, stage: StageResults) -> "Sequence[Block]":
    """`StageSpec.highlight` of a stage that the first screen of the report leaves out."""
    return ()


def no_lines(data: Results, stage: StageResults) -> Sequence[str]:
    """`StageSpec.closing` of a stage whose figures are all that there is to say."""
    return ()


def no_warnings(stage: StageResults) -> Sequence[str]:
    """`StageSpec.warnings` of a stage about whose result nobody has to be warned."""
    return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class StageSpec:
    """A kind of stage: what a run has to know to check, plan, carry out and report it."""

    name: str
    """Its name in `stages` and on the command line, its folder in the run directory, and the key of its section."""
    title: str
    """What it does, for the log."""
    build: Callable[[Config, RunDir, Sequence[str]], Stage]
    """Makes the stage for a resolved configuration. The last argument names the stages that are finished or will be
    worked on: a stage may read the ones among them that it does not need."""
    estimate: "Callable[[Config, RunDir, Rates], StageEstimate]"
    """Cost of the stage, for `--dry-run`. Must not need more than configuration and finished artifacts."""
    config: type | None = None
    """Dataclass of its section, which must be valid with its defaults; None for a stage without settings."""
    reads: "tuple[StageSpec, ...]" = ()
    """Other stages whose sections it reads; a run with this stage has these sections."""
    needs: Callable[[Config], tuple[str, ...]] = needs_nothing
    """Names of the stages that a run must have for this one."""
    only_if_named: bool = False
    """Whether a run whose `stages` are not set leaves it out."""
    with_init_from: Literal["kept", "only", "never"] = "kept"
    """`only`: part of every run with `init_from`, without being named in `stages`; `never`: `init_from` replaces it."""
    report: "Callable[[Results, StageResults], Section | None]" = no_section
    """The section of the report about the finished stage."""
    headline: "Callable[[Results, StageResults], Sequence[Fact]]" = no_facts
    """Figures of the finished stage at the top of the report."""
    highlight: "Callable[[Results, StageResults], Sequence[Block]]" = no_blocks
    """What the first screen of the report shows of the finished stage, below the figures."""
    closing: Callable[[Results, StageResults], Sequence[str]] = no_lines
    """Lines that the terminal shows when the run ends; without any it shows the figures of `headline`."""
    warnings: Callable[[StageResults], Sequence[str]] = no_warnings
    """What the top of the report warns about in the finished stage."""
    model_title: str = ""
    """The model that the stage produces, for tables: `fine-tuned`; "" for a stage that produces none."""
    objective: "Callable[[StageInputs], Objective] | None" = None
    """What a training stage learns; its section is a `TrainConfig`. None for a stage that does not train."""
    reads_images: bool = False
    """Whether its artifact is a model that reads images: it is served, while later stages go on with the language model
    before."""
    is_reward_model: bool = False
    """Whether its artifact is a reward model, which later stages may score answers with."""
    run_needs: frozenset[str] = frozenset()
    """Properties of a run (`core/compatibility.py`) that the objective and the techniques of a training stage rely on,
    besides those that its settings need."""
    rows: RowSet | None = None
    """The rows of tokens that a training stage learns from."""
    fresh: "Callable[[Config], Decoder] | None" = None
    """Makes the model with random weights that a training stage starts from if no stage before it has made one."""
    time_weight: float = 1.0
    """Share of the time budget (`--minutes`) that a training stage gets, relative to the other training stages."""
    follows: str = ""
    """The stage after which a stage from another package comes in the pipeline's order."""

    def new_objective(self, inputs: StageInputs) -> "Objective":
        """What a training stage learns: the objective that its settings name, or its own."""
        from modelwright.train.outside import named_objectives  # imports PyTorch

        assert self.objective is not None
        for spec, settings in named_objectives(inputs.training.objective).values():  # at most one
            return spec.build(settings, inputs)
        return self.objective(inputs)

    @property
    def trained_rows(self) -> int:
        """Rows that a training stage learns from together: those of a group, or one."""
        return self.rows.trained_rows if self.rows else 1

    @property
    def is_implied(self) -> bool:
        """Whether a user cannot name it, because `init_from` alone decides whether a run has it."""
        return self.with_init_from == "only"
