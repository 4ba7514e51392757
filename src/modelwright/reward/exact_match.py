"""Reward 1 for an answer that equals the reference answer after normalization, else 0."""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.reward.reward import Reward, Sample, Score, read_reference

Normalization = Literal["none", "whitespace", "squad"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True)
class ExactMatchConfig:
    """Equality with the reference answer."""

    field: str = "answer"
    """The record's field with the reference answer, or a list of alternatives."""
    marker: str = ""
    """Text, such as `####` in GSM8K, after whose last occurrence answers are compared; empty compares everything."""
    normalization: Normalization = "squad"
    """`squad`: case, punctuation, articles and white space do not count; `whitespace`: only white space; `none`."""

    def build(self, name: str) -> Reward:
        return ExactMatch(name, self)


@dataclass(frozen=True)
class ExactMatch:
    name: str
    config: ExactMatchConfig

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        marker, scores = self.config.marker, list[Score]()
        for sample in samples:
            reference = read_reference(sample, self.config.field)
            if reference.problem:
                scores.append(Score.failure("no_reference", reference.problem))
            # Without the marker, `rpartition` below would return the whole answer
            elif marker and marker not in sample.answer:
                scores.append(Score(0.0, "no_marker"))
            else:
                texts = (sample.answer, *reference.texts)
                compared = (text.rpartition(marker)[2] if marker else text for text in texts)
                answer, *right = (normalize(text, self.config.normalization) for text in compared)
                is_equal = answer in right
                scores.append(Score(float(is_equal), "equal" if is_equal else "different"))
        return scores


def normalize(text: str, normalization: Normalization) -> str:
    """Normalizes an answer. `squad` is `normalize_answer` of the official script for SQuAD 1.1, except for a text of
    articles or punctuation alone, which keeps them: the choice "A" would become the empty text, and equal an empty
    answer.
    """
    if normalization == "none":
        return text
    if normalization == "whitespace":
        return " ".join(text.split())
    lowered = text.lower()
    bare = _ARTICLES.sub(" ", lowered.translate(_NO_PUNCTUATION))
    return " ".join(bare.split()) or " ".join(lowered.translate(_NO_PUNCTUATION).split()) or lowered.strip()
