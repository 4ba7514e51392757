"""The configuration of a whole run: one section per stage, and what must agree between sections.

Each section is the config of the component that the stage drives, defined beside that component. A value such as
"best" or "fastest" is a wish; `pipeline.resolve` settles it once, before the run's config.yaml is written.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from modelwright.compress.int8 import Int8WeightsConfig
from modelwright.core.errors import ConfigError
from modelwright.data.clean import CleanConfig
from modelwright.data.pack import PackConfig
from modelwright.data.sources import SourceConfig
from modelwright.data.tokenizer import TokenizerConfig
from modelwright.evaluate.config import EvaluateConfig
from modelwright.model.config import ModelConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.serve.config import ServeConfig
from modelwright.train.config import TrainConfig

StageName = Literal["clean", "tokenize", "pack", "pretrain", "sft", "evaluate", "quantize", "serve", "report"]
STAGES: tuple[StageName, ...] = get_args(StageName)
Training = Literal["pretrain", "sft"]
TRAININGS: tuple[Training, ...] = get_args(Training)
MAX_THREADS = 1024
"""OpenMP ends the process when it cannot start as many threads as it was asked for."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """`device`: "best" is CUDA where there is a card, else the CPU; `num_threads`: of all processes of this machine
    together, 0 for every core that may be used. Both are settled when the run is created."""

    device: Literal["best", "cpu", "cuda"] = "best"
    num_threads: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_threads <= MAX_THREADS:
            raise ConfigError(f"num_threads: must be from 0 (every core) to {MAX_THREADS}, got {self.num_threads}")


@dataclass(frozen=True, kw_only=True)
class ServeCheckConfig:
    """The serving stage: starts the real server, asks it `questions`, writes down the answers, stops it.

    num_heldout_questions: asked beside `questions`, drawn from the held-out question/answer pairs; temperature: 0
    always takes the likeliest token; start_timeout_s: to load the model and answer `/health`.
    """

    questions: tuple[str, ...] = ()
    num_heldout_questions: int = 6
    max_tokens: int = 64
    temperature: float = 0.0
    start_timeout_s: float = 120.0
    server: ServeConfig = field(default_factory=ServeConfig)

    def __post_init__(self) -> None:
        if not self.questions and self.num_heldout_questions < 1:
            raise ConfigError("questions: is empty and num_heldout_questions is 0; ask at least one question")
        if self.max_tokens < 1 or self.temperature < 0:
            raise ConfigError("max_tokens: must be at least 1, and temperature at least 0")
        if self.num_heldout_questions < 0:
            raise ConfigError(f"num_heldout_questions: must be 0 (none) or more, got {self.num_heldout_questions}")
        if self.start_timeout_s <= 0:
            raise ConfigError(f"start_timeout_s: must be above 0, got {self.start_timeout_s}")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """How much the report shows: examples of dropped text per reason, and benchmark questions."""

    num_dropped_examples: int = 3
    num_questions: int = 6

    def __post_init__(self) -> None:
        for name in ("num_dropped_examples", "num_questions"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must be 0 (none) or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run from raw text to a served model.

    name: of the run and, unless told otherwise, of its folder under `runs/`; stages: what the run consists of, in the
    pipeline's order; init_from: a Llama/Qwen3-type Hugging Face folder that training starts from (its tokenizer and
    shape replace the sections `tokenizer` and `model`), "" for random weights; heldout_tokens: how much of the packed
    held-out text training is judged by while it runs (a fixed random sample; the evaluation is thorough), 0 for all;
    parallel: how both trainings are laid out over the processes that torchrun started.
    """

    name: str
    seed: int = 1
    stages: tuple[StageName, ...] = STAGES
    init_from: str = ""
    heldout_tokens: int = 65_536
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: SourceConfig
    clean: CleanConfig = field(default_factory=CleanConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    model: ModelConfig
    pretrain: TrainConfig
    sft: TrainConfig
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    quantize: Int8WeightsConfig = field(default_factory=Int8WeightsConfig)
    serve: ServeCheckConfig = field(default_factory=ServeCheckConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith(".") or not self.name.isprintable():
            raise ConfigError(f"name: {self.name!r} must be usable as a folder's name, without a slash or a first dot")
        if self.heldout_tokens < 0:
            raise ConfigError(f"heldout_tokens: must be 0 (all) or more, got {self.heldout_tokens}")
        self._check_stages()
        self._check_lengths()

    def _check_stages(self) -> None:
        if not self.stages:
            raise ConfigError(f"stages: is empty; choose from {', '.join(STAGES)}")
        if len(set(self.stages)) != len(self.stages):
            raise ConfigError(f"stages: one is named twice: {', '.join(self.stages)}")
        if list(self.stages) != sorted(self.stages, key=STAGES.index):
            ordered = ", ".join(sorted(self.stages, key=STAGES.index))
            raise ConfigError(f"stages: must be in the pipeline's order: {ordered}")
        for stage in self.stages:
            for needed in self._needs(stage):
                if needed not in self.stages:
                    raise ConfigError(f"stages: {stage} needs {needed}; add it{self._way_out(needed)}")

    def _needs(self, stage: StageName) -> tuple[StageName, ...]:
        """What must come before a stage, as far as no `init_from` provides it."""
        given = bool(self.init_from)
        tokenizer: tuple[StageName, ...] = () if given else ("tokenize",)
        trained: tuple[StageName, ...] = () if given or "sft" in self.stages else ("pretrain",)
        return {
            "tokenize": ("clean",),
            "pack": ("clean", *tokenizer),
            "pretrain": ("pack",),
            "sft": ("pack", *(() if given else ("pretrain",))),
            "evaluate": ("pack", *trained),
            "quantize": ("pack", *trained),
            "serve": ("clean", *trained),
        }.get(stage, ())  # type: ignore[return-value]

    def _way_out(self, needed: str) -> str:
        return " or start from a model folder with init_from" if needed in ("pretrain", "tokenize") else ""

    def check_context(self) -> None:
        """Raise `ConfigError` when a row is longer than the model's context. With `init_from` the context is known, and
        this to be called, when `model` is that of the folder."""
        if "pack" not in self.stages or self.pack.seq_len <= self.model.max_seq_len:
            return
        if self.init_from:
            context, remedy = f"of {self.init_from} ({self.model.max_seq_len})", "lower pack.seq_len"
        else:
            context, remedy = f"(model.max_seq_len {self.model.max_seq_len})", "make one equal to the other"
        raise ConfigError(f"pack.seq_len: {self.pack.seq_len} is more than the model's context {context}; {remedy}")

    def _check_lengths(self) -> None:
        """What the sections of the stages that the run has must agree on; those of other stages do not matter."""
        if not self.init_from:
            self.check_context()
        if "tokenize" in self.stages and not self.init_from and self.tokenizer.vocab_size > self.model.vocab_size:
            raise ConfigError(
                f"model.vocab_size: {self.model.vocab_size} has no room for the tokenizer's "
                f"{self.tokenizer.vocab_size} (tokenizer.vocab_size); make it at least as large"
            )
        for name in self.trainings:
            try:
                getattr(self, name).batch_rows(self.pack.seq_len)
            except ConfigError as error:
                raise ConfigError(f"{name}.{error}") from None

    @property
    def trainings(self) -> tuple[Training, ...]:
        """The stages of the run that train, in order."""
        return tuple(name for name in TRAININGS if name in self.stages)

    @property
    def trained_stages(self) -> tuple[str, ...]:
        """The stages that hold a model, in order: the last one is the run's result."""
        first = ("init",) if self.init_from else ()
        return (*first, *self.trainings)
