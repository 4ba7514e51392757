"""How large the demonstration is: its texts, its traffic and its A/B test."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class DemoSize:
    """The defaults take about a quarter of an hour on two cores."""

    fraction: float = 1.0
    """Share of the installed modules whose documentation is read."""
    most: Mapping[str, int] = field(default_factory=lambda: {"old": 5_000, "new": 1_500})
    """Documents of each task that are trained on: an update learns less than the first training."""
    most_heldout: int = 400
    """Held-out documents of each task, of which the benchmark makes its halves."""
    window: int = 200
    """Requests of a window of the drift monitor."""
    num_windows: int = 6
    """Windows of its reference."""
    run_length: float = 50.0
    """Windows between false alarms."""
    shifted: Mapping[str, float] = field(default_factory=lambda: {"old": 0.5, "new": 0.5})
    """Sessions by task once users have begun to ask about the new libraries."""
    min_units: int = 100
    """Sessions of each arm before the new model is promoted."""
