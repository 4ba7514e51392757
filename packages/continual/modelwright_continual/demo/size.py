"""Size of the demonstration: its texts, its traffic and its A/B test."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class DemoSize:
    """Size of the demonstration; the defaults take about a quarter of an hour on two cores."""

    fraction: float = 1.0
    """Share of the installed modules whose documentation is read."""
    most: Mapping[str, int] = field(default_factory=lambda: {"old": 5_000, "new": 1_500})
    """Maximum number of training documents by task: an update learns less than the first training."""
    most_heldout: int = 400
    """Maximum number of held-out documents per task; the benchmark splits them into halves."""
    window: int = 200
    """Number of requests in a window of the drift monitor."""
    num_windows: int = 6
    """Number of windows in the drift reference."""
    run_length: float = 50.0
    """Mean number of windows between false alarms."""
    shifted: Mapping[str, float] = field(default_factory=lambda: {"old": 0.5, "new": 0.5})
    """Shares of sessions by task after users have begun to ask about the new libraries."""
    min_units: int = 100
    """Number of sessions in each arm before the new model is promoted."""
