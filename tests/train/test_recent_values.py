"""Limits for outliers agree, to the last bit, with formulas written out by hand."""

import math
import random

import pytest

from modelwright.train.techniques.gradient_clipping import AdaptiveClipConfig
from modelwright.train.techniques.loss_spikes import RecentValues, RobustLevel


def naive_median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def naive_limit(values, num_sigmas, min_rise):
    median = naive_median(values)
    sigma = 1.4826 * naive_median([abs(value - median) for value in values])
    return median + max(num_sigmas * sigma, min_rise * abs(median))


def series(seed, count):
    """A level that falls, with noise and a few values that are far off."""
    draw = random.Random(seed)
    return [4.0 - 0.01 * i + draw.gauss(0, 0.05) + (draw.random() < 0.1) * draw.uniform(0.2, 9.0) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5, 6, 41])
@pytest.mark.parametrize(("num_sigmas", "min_rise"), [(6.0, 0.0), (6.0, 0.1), (0.0, 0.1), (3.0, 1.0)])
def test_the_robust_limit_is_the_naive_one(count, num_sigmas, min_rise):
    for seed in range(20):
        values = series(seed, count)
        assert RobustLevel.of(values).upper_limit(num_sigmas, min_rise) == naive_limit(values, num_sigmas, min_rise)


def test_a_rise_counts_away_from_a_negative_median():
    assert RobustLevel.of([-2.0, -2.0, -2.0]).upper_limit(6.0, 0.5) == -1.0


@pytest.mark.parametrize("size", [6, 7, 30])
def test_a_window_judges_as_the_naive_detector_does(size):
    window, accepted, verdicts = RecentValues(size), [], []
    for step, value in enumerate(series(size, 200)):
        recent = accepted[-size:]
        is_outlier = len(recent) >= size / 3 and value > naive_limit(recent, 6.0, 0.1)
        level = window.level
        assert (level is not None and value > level.upper_limit(6.0, 0.1)) == is_outlier
        verdicts.append(is_outlier)
        if not is_outlier:
            accepted.append(value)
            window.add(step, value)
    assert window.values == accepted[-size:]
    assert 5 < sum(verdicts) < 50, "the series must have outliers, and be usual most of the time"


def test_nothing_is_judged_before_a_third_of_the_window():
    window = RecentValues(7)
    for step in range(3):
        assert window.level is None
        window.add(step, 1.0)
    assert window.level == RobustLevel(1.0, 0.0)
    window.clear()
    assert (len(window), window.level) == (0, None)


def test_a_rollback_takes_values_back_and_a_checkpoint_keeps_them():
    window = RecentValues(6)
    for step in range(4, 9):
        window.add(step, float(step))
    window.drop_from(7)
    assert window.values == [4.0, 5.0, 6.0]
    resumed = RecentValues(6)
    resumed.load_state_dict(window.state_dict())
    for one in (window, resumed):
        one.add(7, 9.0)
    assert resumed.values == window.values == [4.0, 5.0, 6.0, 9.0]
    resumed.drop_from(6)
    assert resumed.values == [4.0, 5.0]


def test_limits_of_clipping():
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    for percent, limit in ((1.0, 1.0), (20.0, 1.0), (21.0, 2.0), (60.0, 3.0), (100.0, 5.0)):
        clip = AdaptiveClipConfig(kind="percentile", percentile=percent, window_steps=6)
        assert clip.limit(values, 0.0) == limit
    clip = AdaptiveClipConfig(kind="zscore", num_stddev=2.0, window_steps=6)
    assert clip.limit(values, 0.0) == pytest.approx(3.0 + 2.0 * math.sqrt(2.0))
    assert clip.limit([7.0, 7.0], 0.0) == 7.0
