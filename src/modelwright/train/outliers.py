"""Limits above which a value is an outlier among values of the same kind. Pure Python, deterministic.

The usual limit is robust: the median and the median absolute deviation (MAD) barely move when a few values are far off
(Hampel 1974; Leys et al. 2013 recommend the MAD over the standard deviation for outliers).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAD_TO_SIGMA = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation."""


@dataclass(frozen=True)
class RobustLevel:
    """Median and robust standard deviation of some values."""

    median: float
    sigma: float

    @staticmethod
    def of(values: Sequence[float]) -> "RobustLevel":
        """Measure at least one finite value."""
        median = statistics.median(values)
        return RobustLevel(median, MAD_TO_SIGMA * statistics.median(abs(value - median) for value in values))

    def upper_limit(self, num_sigmas: float, min_rise: float) -> float:
        """The largest value that is not an outlier. min_rise: least distance from the median, relative to it, so that
        small changes of a nearly constant series, whose deviation is close to 0, are not outliers.
        """
        return self.median + max(num_sigmas * self.sigma, min_rise * abs(self.median))


class RecentValues:
    """The last `size` accepted values of a series, each with its step, and their level. The caller decides which values
    to accept: outliers should be excluded, or the level follows them. Values must be finite.
    """

    def __init__(self, size: int) -> None:
        assert size >= 1
        self.size = size
        self._entries: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def values(self) -> list[float]:
        """Accepted values, oldest first."""
        return [value for _, value in self._entries]

    @property
    def level(self) -> RobustLevel | None:
        """Level of the values; None until a third of the window is filled: fewer say too little about the series."""
        return RobustLevel.of(self.values) if len(self._entries) >= self.size / 3 else None

    def add(self, step: int, value: float) -> None:
        assert math.isfinite(value)
        self._entries = [*self._entries, (step, value)][-self.size :]

    def drop_from(self, step: int) -> None:
        """Remove the values of this step and of later ones, after a rollback."""
        self._entries = [entry for entry in self._entries if entry[0] < step]

    def clear(self) -> None:
        """Start over, because the series has reached a new level."""
        self._entries = []

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [list(entry) for entry in self._entries]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._entries = [(int(step), float(value)) for step, value in state["entries"]]


def ratio_limit(values: Sequence[float], factor: float) -> float:
    """Returns `factor` times the median: for values whose deviation is unknown or meaningless, such as ranks' times."""
    return factor * statistics.median(values)
