"""The configuration of a whole run: one section per stage, and the checks between sections.

Each section is the config of the component that the stage drives, defined beside that component. A training stage
inherits the section `training` and sets only what differs. The value `auto` is resolved once, before the run's
config.yaml is written (`pipeline.resolve`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from modelwright.core.config import constant, difference, merge
from modelwright.core.errors import ConfigError
from modelwright.data.clean_config import CleanConfig
from modelwright.data.pack import PackConfig
from modelwright.data.sources import SourceConfig
from modelwright.data.tokenizer import TokenizerConfig
from modelwright.evaluate.config import EvaluateConfig
from modelwright.model.config import ModelConfig
from modelwright.parallel.config import ParallelConfig
from modelwright.pipeline.renamed import RENAMED, check_renamed, new_name
from modelwright.serve.config import ServeConfig
from modelwright.train.config import SharedTrainConfig, TrainConfig

StageName = Literal["clean", "tokenize", "pack", "pretrain", "sft", "evaluate", "quantize", "serve_check", "report"]
STAGES: tuple[StageName, ...] = get_args(StageName)
Training = Literal["pretrain", "sft"]
TRAININGS: tuple[Training, ...] = get_args(Training)
MAX_THREADS = 1024
"""OpenMP ends the process when it cannot start as many threads as it was asked for."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The device and threads of a run, settled when it is created."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is CUDA where there is a card, else the CPU."""
    num_threads: int = 0
    """Threads of all processes of one machine together; 0 for every core."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_threads <= MAX_THREADS:
            raise ConfigError(f"num_threads: must be from 0 (every core) to {MAX_THREADS}, got {self.num_threads}")


@dataclass(frozen=True, kw_only=True)
class ServeCheckConfig:
    """The stage `serve_check` starts the real server, asks it questions, records the answers and stops it."""

    questions: tuple[str, ...] = ()
    """Questions to ask."""
    num_validation_questions: int = 6
    """Further questions, drawn from the validation question/answer pairs."""
    max_tokens: int = 64
    """Longest answer in tokens."""
    temperature: float = 0.0
    """0 always takes the likeliest token."""
    start_timeout_s: float = constant(120.0)
    """Seconds for the server to load the model and answer `/health`."""

    def __post_init__(self) -> None:
        if not self.questions and self.num_validation_questions < 1:
            raise ConfigError("questions: is empty and num_validation_questions is 0; ask at least one question")
        if self.max_tokens < 1 or self.temperature < 0:
            raise ConfigError("max_tokens: must be at least 1, and temperature at least 0")
        if self.num_validation_questions < 0:
            raise ConfigError(
                f"num_validation_questions: must be 0 (none) or more, got {self.num_validation_questions}"
            )
        if self.start_timeout_s <= 0:
            raise ConfigError(f"start_timeout_s: must be above 0, got {self.start_timeout_s}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run from raw text to a served model."""

    name: str
    """Name of the run and of its folder under `runs/`."""
    seed: int = 1
    """Seed of everything random."""
    stages: tuple[StageName, ...] = STAGES
    """Stages of the run, in the pipeline's order."""
    init_from: str = ""
    """Hugging Face folder (Llama, Qwen2 or 3, Mistral, Gemma 2 or 3 text, Phi-3, SmolLM3) to start from; its tokenizer
    and shape replace the sections `tokenizer` and `model`. "" starts from random weights."""
    validation_tokens: int = 65_536
    """Size of the fixed random sample of validation text that training is judged by while it runs; 0 takes all."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: SourceConfig = field(default_factory=SourceConfig)
    clean: CleanConfig = field(default_factory=CleanConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    model: ModelConfig
    training: SharedTrainConfig = field(default_factory=SharedTrainConfig)
    pretrain: TrainConfig
    sft: TrainConfig
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    serve_check: ServeCheckConfig = field(default_factory=ServeCheckConfig)

    @classmethod
    def expand(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give each training stage the shared settings that it does not set itself."""
        check_renamed(data)
        shared = data.get("training", {})
        stages = {name: data[name] for name in TRAININGS if isinstance(data.get(name), Mapping)}
        if not isinstance(shared, Mapping):
            return data  # which parsing refuses
        return {**data, **{name: merge(shared, stage) for name, stage in stages.items()}}

    @classmethod
    def renamed(cls, key: str) -> str:
        """What became of a setting of an earlier version, as text; "" for one that never existed."""
        names = key.split(".")
        prefixes = [".".join(names[:count]) for count in range(len(names), 0, -1)]
        return next((new_name(prefix) for prefix in prefixes if prefix in RENAMED), "")

    @classmethod
    def compact(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Remove from each training stage what it inherits."""
        own = [field.name for field in fields(TrainConfig) if field.name not in data["training"]]
        stages = {
            name: {key: data[name][key] for key in own} | difference(data[name], data["training"], without=own)
            for name in TRAININGS
        }
        return data | stages

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith(".") or not self.name.isprintable():
            raise ConfigError(f"name: {self.name!r} must be usable as a folder name, without slashes or a leading dot")
        if self.validation_tokens < 0:
            raise ConfigError(f"validation_tokens: must be 0 (all) or more, got {self.validation_tokens}")
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
        """The stages that a stage requires, unless `init_from` provides their results."""
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
            "serve_check": ("clean", *trained),
        }.get(stage, ())  # type: ignore[return-value]

    def _way_out(self, needed: str) -> str:
        return " or start from a model folder with init_from" if needed in ("pretrain", "tokenize") else ""

    def check_context(self) -> None:
        """Raise `ConfigError` if a row is longer than the model's context. With `init_from`, call it once `model` is
        that of the folder.
        """
        if "pack" not in self.stages or self.pack.seq_len <= self.model.max_seq_len:
            return
        if self.init_from:
            context, remedy = f"of {self.init_from} ({self.model.max_seq_len})", "lower pack.seq_len"
        else:
            context, remedy = f"(model.max_seq_len {self.model.max_seq_len})", "make one equal to the other"
        raise ConfigError(f"pack.seq_len: {self.pack.seq_len} is more than the model's context {context}; {remedy}")

    def _check_lengths(self) -> None:
        """Check that the sections of the run's own stages agree; other stages do not matter."""
        if not self.init_from:
            self.check_context()
        if "tokenize" in self.stages and not self.init_from and self.tokenizer.vocab_size > self.model.vocab_size:
            raise ConfigError(
                f"model.vocab_size: {self.model.vocab_size} has no room for the tokenizer's "
                f"{self.tokenizer.vocab_size} (tokenizer.vocab_size); make it at least as large"
            )
        for name in self.trainings:
            try:
                self.stage_config(name).batch_rows(self.pack.seq_len)
            except ConfigError as error:
                raise ConfigError(f"{name}.{error}") from None

    def stage_config(self, name: str) -> TrainConfig:
        """The settings of the training stage `name`."""
        return {"pretrain": self.pretrain, "sft": self.sft}[name]

    @property
    def trainings(self) -> tuple[Training, ...]:
        """The stages of the run that train, in order."""
        return tuple(name for name in TRAININGS if name in self.stages)

    @property
    def trained_stages(self) -> tuple[str, ...]:
        """The stages that produce a model, in order: the last one is the run's result."""
        first = ("init",) if self.init_from else ()
        return (*first, *self.trainings)
