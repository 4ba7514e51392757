"""Regular expressions that cannot hang, and the reward for answers that match one.

The package `regex` is used because it takes a timeout and has the syntax of `re`, lookaround and backreferences
included; RE2 runs in linear time but rejects those.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex

from modelwright.core.errors import ConfigError
from modelwright.reward.reward import Reward, Sample, Score

TIMEOUT_S = 0.5
"""For one match. Ordinary patterns take microseconds; more than this is catastrophic backtracking."""


def compile_pattern(pattern: str) -> Any:
    """Raises `ConfigError` that says what is wrong with the pattern."""
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(f"pattern: {pattern!r} is not a regular expression ({error})") from None


@dataclass(frozen=True, kw_only=True)
class PatternConfig:
    """A format given by a regular expression."""

    pattern: str
    """The expression, in the syntax of Python's `re`; `(?s)` at the beginning lets a dot match line breaks."""
    match: Literal["full", "search"] = "full"
    """Whether the whole answer has to match or a part of it."""

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)

    def build(self, name: str) -> Reward:
        return PatternReward(name, compile_pattern(self.pattern), self.match == "full")


@dataclass(frozen=True)
class PatternReward:
    """1 for an answer that matches, else 0. A match that takes longer than `TIMEOUT_S` is a failure."""

    name: str
    pattern: Any
    matches_whole: bool

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        function = self.pattern.fullmatch if self.matches_whole else self.pattern.search
        try:
            matches = function(sample.answer, timeout=TIMEOUT_S) is not None
        except TimeoutError:
            text = f"the pattern backtracked for {TIMEOUT_S} s; write it without nested repetition"
            return Score.failure("pattern_timeout", text)
        return Score(float(matches), "match" if matches else "no_match")
