"""`Reward`: gives each sample a score. The objectives decide how a model learns from the scores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An answer to a prompt, with the fields of its record that describe the right answer."""

    prompt: Sequence[Mapping[str, str]]
    """The turns before the answer, each with `role` and `content`."""
    answer: str
    """The generated text, without special tokens."""
    num_tokens: int
    """Generated tokens, the end-of-sequence token included."""
    finish_reason: str = "stop"
    """Reason that generation ended: `stop`, or `length` at the limit of tokens."""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The record's other fields: the reference answer, test cases, a JSON schema."""


@dataclass(frozen=True)
class Score:
    """The value of one sample, or the reason that it could not be computed."""

    value: float
    """NaN for a failure."""
    outcome: str = ""
    """A short label from a fixed set, such as `cpu_time`; outcomes are counted. For a failure its reason."""
    failed: bool = False
    """The reward could not be computed, so the sample must not be trained on. A wrong answer is not a failure."""
    detail: str = ""
    """Details of this sample for the log."""

    @classmethod
    def failure(cls, reason: str, detail: str = "") -> "Score":
        """reason: short and from a fixed set, because reasons become counters."""
        return cls(math.nan, reason, failed=True, detail=detail)


class Reward(Protocol):
    """Scores samples by a rule."""

    @property
    def name(self) -> str:
        """The name in metrics, unique among the terms of a sum."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Returns one score for each sample, in order. An exception fails all samples of the call."""
        ...


class RewardConfig(Protocol):
    """The options of a kind of reward: a frozen dataclass that checks itself."""

    def build(self, name: str) -> Reward:
        """Builds the reward. Raises `ConfigError` if it cannot work on this machine."""
        ...


@dataclass(frozen=True)
class Reference:
    """The right answers of a record, or the reason that they are missing."""

    texts: tuple[str, ...] = ()
    problem: str = ""


def read_reference(sample: Sample, field_name: str) -> Reference:
    """Reads the field as text: a string, a number, or a list of alternatives of which any is right."""
    value = sample.fields.get(field_name)
    alternatives: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    texts = tuple(str(one) for one in alternatives if isinstance(one, (str, int, float)) and not isinstance(one, bool))
    texts = tuple(text for text in texts if text.strip())
    if texts:
        return Reference(texts)
    known = ", ".join(sample.fields) or "none"
    return Reference(problem=f"the record has no text in the field {field_name!r} (fields with values: {known})")
