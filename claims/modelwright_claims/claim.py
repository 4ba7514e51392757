"""What a claim is: a published statement, the comparison that tests it, and the outcome of measuring it here.

A claim's target is written down before it is measured. The outcome carries the raw samples, so that a reader can
do the sums again. Knows nothing about any particular technique, nor where results are kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from modelwright.core.progress import Progress

Kind = Literal["met", "short", "cannot be tested here"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how thoroughly to measure.

    `quick`: a smaller measurement of under a minute, for a smoke test rather than for publication; `folder`: scratch
    space that the claims of one call share (the tokenized text is made once); `kept`: folder for what later calls may
    go on from, None for nothing.
    """

    quick: bool
    folder: Path
    progress: Progress
    kept: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number; `spread` is the standard deviation over its repeats (0 where there is one)."""

    value: float
    unit: str
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one measurement.

    `reason`: by how much the target was met or missed, or why it cannot be tested here, in one or two sentences;
    `conditions`: what a person needs to repeat it; `samples`: the raw values behind the figures.
    """

    kind: Kind
    reason: str
    figures: Mapping[str, Figure]
    conditions: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The verdict as one line: `met: ...`, `short: ...` or `cannot be tested here: ...`."""
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published statement and how it is tested.

    `published`: the figure as published, with its own machine and conditions; `compared`: the two sides of our
    comparison; `target`: what counts as met, fixed before measuring; `headline`: the figures that answer it, which the
    overview shows (without one, the first three).
    """

    name: str
    statement: str
    source: str
    published: str
    compared: str
    target: str
    headline: Sequence[str] = ()
    measure: Callable[[Setting], Result]
