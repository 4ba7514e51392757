"""Reward for different words within a limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from modelwright.core.config import ConfigError
from modelwright.core.texts import distinct_word_score
from modelwright.reward.reward import Reward, Sample, Score


@dataclass(frozen=True, kw_only=True)
class DistinctWordsConfig:
    """A limit of words, and as many different ones as possible within it."""

    max_words: int
    """Each different word up to this number counts, each word beyond it counts against the answer."""

    def __post_init__(self) -> None:
        if self.max_words < 1:
            raise ConfigError(f"max_words: must be at least 1, got {self.max_words}")

    def build(self, name: str) -> Reward:
        return DistinctWords(name, self.max_words)


@dataclass(frozen=True)
class DistinctWords:
    name: str
    max_words: int

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(distinct_word_score(sample.answer, self.max_words)) for sample in samples]
