"""What is evaluated and how much of it."""

from dataclasses import dataclass
from typing import Literal

from modelwright.core.errors import ConfigError

Score = Literal["byte", "token", "gain"]


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceConfig:
    """The multiple-choice benchmark made from held-out question/answer documents.

    `num_questions`: at most this many, 0 leaves the benchmark out. `min_answer_bytes`, `max_answer_bytes`: answers
    outside are not asked. `score`: what the headline accuracy ranks by, fixed before the run (see
    `multiple_choice`): log-likelihood of the answer per UTF-8 `byte` or per `token`, or its `gain` per byte over
    the same answer without the question. The first two come from one pass and are both reported; `gain` costs a
    second pass and is computed only when it is chosen. `seed` draws questions, distractors and positions.
    """

    num_questions: int = 600
    min_answer_bytes: int = 20
    max_answer_bytes: int = 400
    score: Score = "byte"
    seed: int = 0

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
    """How a model and its baselines are scored.

    `kinds`: kinds of held-out documents that get bits per byte; where none of them is held out, the text of the
    question/answer pairs gets them. `max_bytes_per_kind`: a deterministic sample of
    whole documents up to this size, 0 takes all. `context_overlap`: how much of the model's context a window shares
    with the one before it: a token far into a document sees at least this fraction of the context, at
    1 / (1 - overlap) times the compute. `max_context`: cap on that context for models with a very long one, whose
    rows would not fit in memory. `batch_tokens`: tokens per forward pass. `bootstrap_resamples`: resamples of
    documents behind the 95% intervals. `bigram_tokens`: at most this many training tokens train the bigram, 0 takes
    all.
    """

    kinds: tuple[str, ...] = ("prose", "code")
    max_bytes_per_kind: int = 400_000
    context_overlap: float = 0.5
    max_context: int = 2048
    batch_tokens: int = 4096
    bootstrap_resamples: int = 1000
    bigram_tokens: int = 50_000_000
    seed: int = 0
    multiple_choice: MultipleChoiceConfig = MultipleChoiceConfig()

    def __post_init__(self) -> None:
        if not 0.0 <= self.context_overlap < 1.0:
            raise ConfigError(f"context_overlap: must be at least 0 and below 1, got {self.context_overlap}")
        for name, least in (
            ("max_bytes_per_kind", 0),
            ("max_context", 1),
            ("batch_tokens", 1),
            ("bootstrap_resamples", 1),
            ("bigram_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: must be at least {least}, got {getattr(self, name)}")
