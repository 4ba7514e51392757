"""The prompt statistics of recent windows, which together detect a small shift that lasts."""

from dataclasses import dataclass, field

import numpy as np

from modelwright_continual.drift.classifier_test import SeparationTest
from modelwright_continual.drift.statistics import Floats, resampling_p_value

NUM_WINDOWS = 3
"""Number of windows that are tested together, the newest one included."""


@dataclass
class RecentWindows:
    """Statistics of the classifier test in the windows since the last alarm, newest last [windows][1 + permutations],
    the true one first in each. Empty before the first window.
    """

    statistics: list[list[float]] = field(default_factory=list[list[float]])

    def p_value(self, own: SeparationTest) -> float:
        """Returns the p-value of the larger of two statistics: the window's own, and its sum with those of the windows
        before it, each in standard deviations of its permutations. Windows are permuted independently, so without
        drift, sums of permuted statistics are distributed like sums of true ones. The dependence of windows through
        their common reference is neglected.
        """
        if not self.statistics:
            return own.p_value
        alone = np.array([own.statistic, *own.permuted])
        largest = np.maximum(_standard(alone), _standard(np.array(self.statistics).sum(axis=0) + alone))
        return resampling_p_value(float(largest[0]), largest[1:])

    def add(self, own: SeparationTest) -> None:
        # One fewer than NUM_WINDOWS, since the next window is added to them.
        self.statistics = [*self.statistics, [own.statistic, *own.permuted.tolist()]][1 - NUM_WINDOWS :]

    def forget(self) -> None:
        """Drops all statistics after an alarm, so that a shift that is over is not reported again."""
        self.statistics = []


def _standard(statistics: Floats) -> Floats:
    permuted = statistics[1:]
    return (statistics - permuted.mean()) / max(float(permuted.std()), 1e-30)
