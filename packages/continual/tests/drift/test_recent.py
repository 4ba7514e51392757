"""Several windows together: no false alarms more, and a small shift that lasts is found sooner."""

import json

import numpy as np
import pytest

from modelwright_continual.drift.classifier_test import SeparationTest
from modelwright_continual.drift.recent import NUM_WINDOWS, RecentWindows
from modelwright_continual.drift.statistics import resampling_p_value

PERMUTATIONS = 199


def window(rng: np.random.Generator, shift: float) -> SeparationTest:
    permuted = 0.3 + 1.2 * rng.standard_normal(PERMUTATIONS)
    statistic = 0.3 + 1.2 * (rng.standard_normal() + shift)
    return SeparationTest(statistic, resampling_p_value(statistic, permuted), 0.1, np.empty(0), permuted)


def p_values(shift: float, count: int, seed: int) -> np.ndarray:
    """Those of the third window, by itself and with those before it [count, 2]."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        recent = RecentWindows()
        for _ in range(NUM_WINDOWS - 1):
            recent.add(window(rng, shift))
        own = window(rng, shift)
        found.append((own.p_value, recent.p_value(own)))
    return np.array(found)


def test_without_a_shift_p_values_are_uniform() -> None:
    together = p_values(0.0, 3000, 1)[:, 1]
    assert together.mean() == pytest.approx(0.5, abs=0.025)
    for level in (0.01, 0.05, 0.2):
        assert (together <= level).mean() == pytest.approx(level, abs=4 * np.sqrt(level / 3000))


def test_a_small_shift_that_lasts_is_found_by_windows_together() -> None:
    alone, together = (p_values(2.5, 400, 2) <= 0.001).mean(axis=0)
    assert alone < 0.45
    assert together > 0.8


def test_a_first_window_and_one_after_an_alarm_are_by_themselves() -> None:
    rng, recent = np.random.default_rng(3), RecentWindows()
    own = window(rng, 0.0)
    assert recent.p_value(own) == own.p_value
    for _ in range(2 * NUM_WINDOWS):
        recent.add(window(rng, 0.0))
    assert len(recent.statistics) == NUM_WINDOWS - 1
    assert recent.p_value(own) != own.p_value
    again = RecentWindows(json.loads(json.dumps(recent.statistics)))
    assert again.p_value(own) == recent.p_value(own)
    recent.forget()
    assert recent.p_value(own) == own.p_value
