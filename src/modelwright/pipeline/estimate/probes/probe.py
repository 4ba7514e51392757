"""What a probe is: one bounded measurement of a part of the machine, with figures in SI units and a line of text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


class ProbeUnavailable(Exception):
    """This machine or folder does not offer what a probe measures; the text says what is missing."""


@dataclass(frozen=True, kw_only=True)
class ProbeSetting:
    """Where and how long a probe measures."""

    folder: Path
    """An existing folder on the disk in question. Nothing stays in it."""
    budget_s: float
    """Seconds that the probe may take, apart from the start of a process and one call of the system."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a probe found."""

    state: str
    """`measured`, `left out`, or `none: ` and why."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """By name with its unit (`_s`, `_bytes_per_s`, `_per_s`, `_bytes`); without those that cannot be measured here."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What is no number: versions, the file system, how the page cache was avoided."""
    seconds: float = 0.0
    """What measuring took."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One part of the survey. `PROBES` in `survey.py` is the only list."""

    name: str
    budget_s: float
    measure: Callable[[ProbeSetting], ProbeResult]
    """Raises `ProbeUnavailable`, `OSError` or `RuntimeError` where it cannot measure."""
    text: Callable[[ProbeResult], str]
    """The figures of a measured result as a line."""


def rate_text(result: ProbeResult, name: str) -> str:
    """A rate in GB/s, or a dash."""
    return f"{result.figures[name] / 1e9:.2f} GB/s" if name in result.figures else "-"


def time_text(result: ProbeResult, name: str) -> str:
    """A time in microseconds, or a dash."""
    return f"{1e6 * result.figures[name]:,.0f} us" if name in result.figures else "-"
