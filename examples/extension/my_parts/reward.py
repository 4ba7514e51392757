# A kind of reward for GRPO and PPO, with an option: the share of an answer's sentences that are short enough.
# modelwright run my.yaml --grpo.rewards '{sentences: {most_words: 12}}'
# A reward that is one function needs no package: examples/python/grpo.py.
import re
from collections.abc import Sequence
from dataclasses import dataclass

from modelwright.core.config import ConfigError
from modelwright.reward.reward import Reward, Sample, Score


@dataclass(frozen=True)
class Sentences:
    name: str
    most_words: int

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        scores = []
        for sample in samples:
            lengths = [len(one.split()) for one in re.split(r"[.!?]+", sample.answer) if one.strip()]
            if lengths:
                scores.append(Score(sum(length <= self.most_words for length in lengths) / len(lengths)))
            else:
                scores.append(Score(0.0, "no_sentence"))  # outcomes are counted in the metrics
        return scores


@dataclass(frozen=True, kw_only=True)
class SentencesConfig:
    most_words: int = 20

    def __post_init__(self) -> None:
        if self.most_words < 1:
            raise ConfigError(f"most_words: must be at least 1, got {self.most_words}")

    def build(self, name: str) -> Reward:
        return Sentences(name, self.most_words)
