"""Types of a probe: a bounded measurement of a part of the machine, with figures in SI units and a line of text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


class ProbeUnavailable(Exception):
    """Raised if a probe cannot measure this machine or folder; the text names the missing part."""


@dataclass(frozen=True, kw_only=True)
class ProbeSetting:
    """Place and duration of a probe's measurement."""

    folder: Path
    """Existing folder on the disk in question; the probe leaves no file in it."""
    budget_s: float
    """Seconds that the probe may use, apart from the start of a process and one call of the system."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Figures and facts that a probe has measured."""

    state: str
    """`measured`, `left out`, or `none: ` with the reason."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers by name with unit (`_s`, `_bytes_per_s`, `_per_s`, `_bytes`), if they can be measured here."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Facts in words: versions, the file system, the way in which the page cache was avoided."""
    seconds: float = 0.0
    """Duration of the measurement."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A part of the survey. `PROBES` in `survey.py` is the only list."""

    name: str
    budget_s: float
    measure: Callable[[ProbeSetting], ProbeResult]
    """Measures; raises `ProbeUnavailable`, `OSError` or `RuntimeError` if it cannot."""
    text: Callable[[ProbeResult], str]
    """Formats the figures of a measured result as a line."""


def rate_text(result: ProbeResult, name: str) -> str:
    """Formats a rate in GB/s, or a dash without it."""
    return f"{result.figures[name] / 1e9:.2f} GB/s" if name in result.figures else "-"


def time_text(result: ProbeResult, name: str) -> str:
    """Formats a time in microseconds, or a dash without it."""
    return f"{1e6 * result.figures[name]:,.0f} us" if name in result.figures else "-"
