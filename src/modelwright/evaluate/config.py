"""Settings of the evaluation: its measures and the amount of text for them."""

from dataclasses import dataclass
from typing import Literal

from modelwright.core.config import ConfigError, constant

Score = Literal["byte", "token", "pmi"]


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceConfig:
    """The multiple-choice benchmark made from validation question/answer pairs."""

    num_questions: int = 600
    """Most questions; 0 leaves the benchmark out."""
    score: Score = "byte"
    """Score that ranks answers for the headline accuracy: log-likelihood per UTF-8 `byte` or per `token`, or `pmi`, its
    gain per byte over the same answer without the question (Holtzman et al. 2021)."""
    min_answer_bytes: int = constant(20)
    """Shortest answer that is asked for."""
    max_answer_bytes: int = constant(400)
    """Longest answer that is asked for."""
    seed: int = constant(0)
    """Seed of questions, distractors and positions."""

    def __post_init__(self) -> None:
        if self.num_questions < 0:
            raise ConfigError(f"num_questions: must be 0 (none) or more, got {self.num_questions}")
        if not 0 < self.min_answer_bytes <= self.max_answer_bytes:
            raise ConfigError(
                f"min_answer_bytes: {self.min_answer_bytes} must be at least 1 and at most max_answer_bytes "
                f"({self.max_answer_bytes})"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Settings of the scores of a model and of its baselines."""

    domains: tuple[str, ...] = ("prose", "code")
    """Kinds of validation documents that get bits per byte; where none of them exists, the question/answer pairs get
    them. Empty measures none. Answers get a perplexity in any case."""
    max_bytes_per_domain: int = 400_000
    """Size of a deterministic sample of whole documents; 0 takes all."""
    context_overlap: float = 0.5
    """Fraction of the context that a window shares with the one before: a token far into a document sees at least this
    fraction of the context, at 1 / (1 - overlap) times the compute."""
    max_context: int = constant(2048)
    """Most tokens of context, for models whose own would not fit in memory."""
    batch_tokens: int = constant(4096)
    """Tokens per forward pass."""
    bootstrap_resamples: int = constant(1000)
    """Resamples of documents behind the 95% intervals."""
    multiple_choice: MultipleChoiceConfig = MultipleChoiceConfig()
    bigram_tokens: int = constant(50_000_000)
    """Most training tokens for the bigram baseline; 0 takes all."""
    seed: int = constant(0)
    """Seed of the samples."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.context_overlap < 1.0:
            raise ConfigError(f"context_overlap: must be at least 0 and below 1, got {self.context_overlap}")
        for name, least in (
            ("max_bytes_per_domain", 0),
            ("max_context", 1),
            ("batch_tokens", 1),
            ("bootstrap_resamples", 1),
            ("bigram_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: must be at least {least}, got {getattr(self, name)}")
