"""Regular expressions that cannot hang, and the reward for answers that match one.

The package `regex` is used because it takes a timeout and has the syntax of `re`, lookaround and backreferences
included; RE2 runs in linear time but rejects those.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex

from modelwright.core.config import ConfigError
from modelwright.reward.reward import Reward, Sample, Score

TIMEOUT_S = 0.5
"""Time limit of one match. Ordinary patterns take microseconds; more than this is catastrophic backtracking."""


def compile_pattern(pattern: str) -> Any:
    """Compiles a regular expression. Raises `ConfigError` with the fault of the pattern."""
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(f"pattern: {pattern!r} is not a regular expression ({error})") from None


@dataclass(frozen=True, kw_only=True)
class PatternConfig:
    """A format described by a regular expression."""

    pattern: str
    """The expression, in the syntax of Python's `re`; `(?s)` at the beginning lets a dot match line breaks."""
    match: Literal["full", "search"] = "full"
    """Part of the answer that has to match: all of it (`full`), or any part (`search`)."""

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)

    def build(self, name: str) -> Reward:
        return PatternReward(name, compile_pattern(self.pattern), self.match == "full")


@dataclass(frozen=True)
class PatternReward:
    """Gives 1 to an answer that matches, else 0. A match that takes longer than `TIMEOUT_S` is a failure."""

    name: str
    pattern: Any
    matches_whole: bool

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        function, scores = self.pattern.fullmatch if self.matches_whole else self.pattern.search, list[Score]()
        for sample in samples:
            try:
                matches = function(sample.answer, timeout=TIMEOUT_S) is not None
                scores.append(Score(float(matches), "match" if matches else "no_match"))
            except TimeoutError:
                text = f"the pattern backtracked for {TIMEOUT_S} s; write it without nested repetition"
                scores.append(Score.failure("pattern_timeout", text))
        return scores
