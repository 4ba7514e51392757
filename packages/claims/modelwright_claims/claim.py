"""A claim: a published statement, the comparison that tests it, and the rule that judges what was measured.

A claim's target is written down before it is measured. `measure` returns raw samples and conditions; `judge` is a pure
function of these, so that a stored measurement can be judged again. Records on disk are in `results`.
"""

import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from modelwright.core.progress import Progress

Judged = Literal["met", "short", "cannot be tested here", "not judged"]
Kind = Judged | Literal["quick, not a verdict", "quick: met", "quick: short"]
Samples = Mapping[str, Sequence[float]]
Conditions = Mapping[str, str | int | float | bool]
_TEXTS = tomllib.loads(files("modelwright_claims").joinpath("claims.toml").read_text(encoding="utf-8"))
UNTESTABLE = "cannot be tested here"
"""The condition that says why nothing could be measured on this machine."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The place and the thoroughness of a measurement.

    `quick`: a smaller measurement of under a minute, for a smoke test rather than for publication; `folder`: scratch
    space that the claims of one call share (the tokenized text is made once); `kept`: folder for what later calls may
    continue from, None for nothing.
    """

    quick: bool
    folder: Path
    progress: Progress
    kept: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A single number computed from the samples."""

    value: float
    unit: str
    spread: float = 0.0
    """Standard deviation over the repeats; 0 where there is one."""
    lower: float | None = None
    """One-sided 95% lower confidence bound of the mean, or None if it is unknown."""
    upper: float | None = None
    exact: bool | None = None
    """True for a deterministic count, which needs no bounds."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The outcome of measuring a claim, before it is judged."""

    samples: Samples = field(default_factory=dict)
    """The raw values, by name; repeats of compared arms are in the same order."""
    conditions: Conditions = field(default_factory=dict)
    """Everything needed to repeat the measurement, and figures that the rule needs in addition to the samples."""


def untestable(reason: str) -> Measurement:
    """Return the measurement of a claim that this machine cannot test."""
    return Measurement(conditions={UNTESTABLE: reason})


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgment of one measurement."""

    kind: Kind
    reason: str
    """The distance to the target, or the cause that it was not judged, in a few sentences."""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The verdict as one line: `met: ...`, `short: ...` or `cannot be tested here: ...`."""
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published statement and its test."""

    name: str
    statement: str
    source: str
    published: str
    """The figure as published, with its own machine and conditions."""
    compared: str
    """The two sides of our comparison."""
    target: str
    """The condition for "met", fixed before measuring."""
    headline: Sequence[str] = ()
    """The figures that answer it, which the overview shows; without one, the first three."""
    quick_decides: bool = False
    """True if a quick measurement gives a verdict, because its size does not affect the claim."""
    measure: Callable[[Setting], Measurement]
    judge: Callable[[Samples, Conditions], Verdict]
    """A pure function of a record. It raises `judging.Lacks` if the record lacks data that the rule needs."""


def declared(module: str, *, headline: Sequence[str] = (), quick_decides: bool = False, **texts: str) -> Claim:
    """Return the claim of a module: it has its file's name and is measured and judged by its functions.

    texts: statement, source, published, compared and target; they and the headline are by default those of claims.toml.
    """
    own = vars(sys.modules[module])
    name = Path(own["__file__"]).stem  # a worker's module is called __main__
    if not texts:
        forms = {key: form for key, form in _TEXTS[name].items() if key != "conditions"}
        headline = [form.format_map(own) for form in forms.pop("headline", ())]
        texts = {text: form.format_map(own) for text, form in forms.items()}
    return Claim(
        name=name, headline=headline, quick_decides=quick_decides, measure=own["measure"], judge=own["judge"], **texts
    )


def described(module: str, **values: Any) -> dict[str, str]:
    """Return the conditions of a module's claim that claims.toml words. values: what they name besides constants."""
    own = vars(sys.modules[module])
    forms = _TEXTS[Path(own["__file__"]).stem]["conditions"]
    return {name: form.format_map({**own, **values}) for name, form in forms.items()}
