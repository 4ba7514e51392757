"""What the windows before one said of prompts, so that several find together a small shift that lasts."""

from dataclasses import dataclass, field

import numpy as np

from modelwright_continual.drift.classifier_test import SeparationTest
from modelwright_continual.drift.statistics import Floats, resampling_p_value

NUM_WINDOWS = 3
"""Windows that are looked at together, the newest one included."""


@dataclass
class RecentWindows:
    """The classifier test's statistics in the latest windows since the last alarm, the newest last [windows]
    [1 + permutations]: the true one first. Empty for a first window.
    """

    statistics: list[list[float]] = field(default_factory=list[list[float]])

    def p_value(self, own: SeparationTest) -> float:
        """Return the p-value of the larger of two statistics: the window's own, and its sum with those of the windows
        before it, each in standard deviations of its permutations. Windows are permuted independently, so sums of
        permuted statistics are what sums of true ones are without drift. That windows share one reference is neglected.
        """
        if not self.statistics:
            return own.p_value
        alone = np.array([own.statistic, *own.permuted])
        largest = np.maximum(_standard(alone), _standard(np.array(self.statistics).sum(axis=0) + alone))
        return resampling_p_value(float(largest[0]), largest[1:])

    def add(self, own: SeparationTest) -> None:
        self.statistics = [*self.statistics, [own.statistic, *own.permuted.tolist()]][1 - NUM_WINDOWS :]

    def forget(self) -> None:
        """Begin anew after an alarm, so that a shift that is over is not reported again."""
        self.statistics = []


def _standard(statistics: Floats) -> Floats:
    permuted = statistics[1:]
    return (statistics - permuted.mean()) / max(float(permuted.std()), 1e-30)
