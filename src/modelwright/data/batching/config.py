"""Settings of batches: by rows or by tokens, curriculum, mixture of sources."""

from dataclasses import dataclass, field
from typing import Literal

from modelwright.core.config import constant
from modelwright.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Easy rows first: rows are drawn from the easiest fraction, which grows (Platanios et al. 2019)."""

    by: Literal["none", "length", "score", "loss"] = "none"
    """What makes a row difficult: its `length` in tokens, its `score` (`pack.score`), or the `loss` of `model`."""
    pacing: Literal["linear", "root"] = "root"
    """How the fraction of rows grows; `root` spends more steps on difficult rows."""
    fraction: float = 0.5
    """Fraction of the steps after which all rows take part."""
    model: str = ""
    """`loss`: Hugging Face folder of the model that judges the rows, once; the losses are kept with the run."""
    initial_competence: float = constant(0.01)
    """Fraction of the rows at the first step (Platanios et al. 2019, section 4)."""

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"fraction: must be above 0 and at most 1, got {self.fraction}; 0.5 is usual")
        if (self.by == "loss") != bool(self.model):
            remedy = "name a model folder" if self.by == "loss" else "set by to loss, or leave model empty"
            raise ConfigError(f"model: goes with by: loss, got by {self.by!r} and model {self.model!r}; {remedy}")


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Shares of the sources (`pack.group_by`) among the rows of every batch."""

    weights: dict[str, float] = field(default_factory=dict[str, float])
    """Weight of each source by name; {} takes the sources' sizes in tokens. Without `weights`, `temperature` and
    `update` rows are read once per epoch, whatever their source."""
    temperature: float = 1.0
    """Shares are proportional to weight^(1/temperature) (Raffel et al. 2020, section 3.5.2); large values make them
    equal."""
    final_weights: dict[str, float] = field(default_factory=dict[str, float])
    """Weights that the shares move to from the first step to the last, linearly; {} keeps them."""
    update: Literal["none", "heldout_loss"] = "none"
    """`heldout_loss` moves shares to sources with a high held-out loss at every evaluation (DoReMi, Xie et al. 2023,
    algorithm 1)."""
    learning_rate: float = 1.0
    """`heldout_loss`: step size of the exponentiated gradient."""
    reference_losses: dict[str, float] = field(default_factory=dict[str, float])
    """`heldout_loss`: losses of a reference model by source, of which only the excess counts; {} counts the whole loss
    (group DRO, Sagawa et al. 2020)."""
    smoothing: float = constant(1e-3)
    """Share that is distributed equally after each update (Xie et al. 2023, section 2)."""

    @property
    def is_on(self) -> bool:
        return bool(self.weights or self.final_weights) or self.temperature != 1.0 or self.update != "none"

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"temperature: must be above 0, got {self.temperature}; 1 keeps the weights")
        if self.learning_rate <= 0:
            raise ConfigError(f"learning_rate: must be above 0, got {self.learning_rate}; 1 is usual")
        if self.final_weights and self.update != "none":
            raise ConfigError("final_weights: a schedule and update exclude each other; remove one")
        for name in ("weights", "final_weights"):
            weights = getattr(self, name)
            if weights and (min(weights.values()) < 0 or sum(weights.values()) <= 0):
                raise ConfigError(f"{name}: must not be negative, and one must be above 0, got {weights}")


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """How packed rows become batches."""

    mode: Literal["rows", "token_budget"] = "rows"
    """`rows`: batches of equally many whole rows. `token_budget`: batches of rows of similar length, without most of
    their padding, as many as fit into `batch_tokens`; for `pack.mode: one_per_row`."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
