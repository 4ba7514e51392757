"""Reward 1 for an answer whose number equals the reference answer's, else 0."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from modelwright.core.errors import ConfigError
from modelwright.reward.numbers import Number, boxed_number, equal, last_boxed, last_number, numbers_in
from modelwright.reward.reward import Reward, Sample, Score, read_reference

MARKER = "####"
"""Text before the final answer in GSM8K (Cobbe et al. 2021)."""


@dataclass(frozen=True, kw_only=True)
class NumericMatchConfig:
    """Equality of the final number with the reference answer's."""

    field: str = "answer"
    """The record's field with the reference answer: a number, or a text with one, such as GSM8K's whole solution."""
    number_in: Literal["any", "boxed", "marker", "last"] = "any"
    """Place of the number in the answer: the last `\\boxed{}`, after the last `####`, the last number of the text, or
    the first of the three that exists."""
    tolerance: float = 0.0
    """Largest difference, relative to the reference; 0 compares exactly, as fractions."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ConfigError(f"tolerance: must be from 0 to less than 1, got {self.tolerance}")

    def build(self, name: str) -> Reward:
        return NumericMatch(name, self)


@dataclass(frozen=True)
class NumericMatch:
    name: str
    config: NumericMatchConfig

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        scores: list[Score] = []
        for sample in samples:
            reference = read_reference(sample, self.config.field)
            right = [number for text in reference.texts if (number := final_number(text, "any"))]
            if reference.problem:
                scores.append(Score.failure("no_reference", reference.problem))
            elif not right:
                text = f"the field {self.config.field!r} holds no number: {reference.texts[0][:80]!r}"
                scores.append(Score.failure("reference_not_numeric", text))
            elif (number := final_number(sample.answer, self.config.number_in)) is None:
                scores.append(Score(0.0, "no_number"))
            else:
                is_equal = any(equal(number, one, self.config.tolerance) for one in right)
                scores.append(Score(float(is_equal), "equal" if is_equal else "different"))
        return scores


def final_number(text: str, where: str) -> Number | None:
    """Finds the number that a text gives as its result; None if this place does not have one."""
    if where in ("any", "boxed"):
        content = last_boxed(text)
        if content is not None or where == "boxed":
            return None if content is None else boxed_number(content)
    if where in ("any", "marker"):
        marker, result = text.rpartition(MARKER)[1:]
        if marker or where == "marker":
            return next(numbers_in(result.strip().partition("\n")[0]), None) if marker else None
    return last_number(text)
