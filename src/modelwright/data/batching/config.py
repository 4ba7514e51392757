"""Settings of the order of rows: curriculum, mixture of sources."""

from dataclasses import dataclass, field
from typing import Literal

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError
from modelwright.data.document import KINDS

BY_LOSS = "loss:"


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Easy rows first: rows are drawn from the easiest fraction, which grows (Platanios et al. 2019)."""

    by: str = "none"
    """What makes a row difficult: `length` in tokens; `compression_ratio`, compressed over uncompressed bytes;
    `loss:FOLDER`, the loss of the model of a Hugging Face folder; or a numeric field of the records (named in
    `data.keep_fields`)."""
    pacing: Literal["linear", "root"] = "root"
    """How the fraction of rows grows; `root` spends more steps on difficult rows."""
    fraction: float = constant(0.5)
    """Fraction of the steps after which all rows take part."""
    initial_competence: float = constant(0.01)
    """Fraction of the rows at the first step (Platanios et al. 2019, section 4)."""

    @property
    def model(self) -> str:
        """The folder of the model whose loss counts, "" if none does."""
        return self.by.removeprefix(BY_LOSS) if self.by.startswith(BY_LOSS) else ""

    @property
    def score(self) -> str:
        """The score that rows must be packed with, "" if none is needed."""
        return "" if self.by in ("none", "length") or self.model else self.by

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"fraction: must be above 0 and at most 1, got {self.fraction}; 0.5 is usual")
        if self.by in ("", "loss", BY_LOSS):
            raise ConfigError(f"by: {self.by!r} names nothing; for example length, or loss:models/small")


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Shares of sources among the rows of every batch. Without these settings, rows are read once per epoch."""

    weights: dict[str, float] = field(default_factory=dict[str, float], hash=False)
    """Weight of each source by name: of each kind (`prose`, `code`), or of each file and corpus as in the documents'
    `source`; {} takes the sources' sizes in tokens. Rows of different sources are packed apart."""
    temperature: float = 1.0
    """Shares are proportional to weight^(1/temperature) (Raffel et al. 2020, section 3.5.2); large values make them
    equal."""
    update: Literal["none", "linear", "heldout_loss", "scores"] = "none"
    """How shares change: `linear` moves them from the sources' sizes at the first step to `weights` at the last;
    `heldout_loss` moves them at every evaluation to sources with a high held-out loss (group DRO, Sagawa et al.
    2020); `scores` takes softmax(2 * score), where `weights` are the scores of sources by the task that they serve, and
    a source without one is measured at every evaluation: its held-out loss, divided by what it was at the first."""
    score_sharpness: float = constant(2.0)
    """`scores`: beta, by which scores are multiplied before the softmax."""
    learning_rate: float = constant(1.0)
    """`heldout_loss`: step size of the exponentiated gradient (Xie et al. 2023, section 2)."""
    smoothing: float = constant(1e-3)
    """Share that is distributed equally after each update (Xie et al. 2023, section 2)."""

    @property
    def is_on(self) -> bool:
        return bool(self.weights) or self.temperature != 1.0 or self.update != "none"

    @property
    def group_by(self) -> Literal["none", "kind", "source"]:
        """What a source is."""
        if not self.is_on:
            return "none"
        return "kind" if self.weights and all(name in KINDS for name in self.weights) else "source"

    @property
    def is_measured(self) -> bool:
        """Whether shares follow from held-out losses, at evaluations."""
        return self.update in ("heldout_loss", "scores")

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"temperature: must be above 0, got {self.temperature}; 1 keeps the weights")
        if self.update == "scores" and self.temperature != 1.0:
            raise ConfigError("temperature: has no effect with update scores, whose shares are a softmax; set it to 1")
        if self.update == "linear" and not self.weights:
            raise ConfigError("update: linear needs weights to move to; set them")
        if self.weights and (min(self.weights.values()) < 0 or sum(self.weights.values()) <= 0):
            raise ConfigError(f"weights: must not be negative, and one must be above 0, got {self.weights}")


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """Which packed rows come when."""

    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
