"""Calibration of reward differences against its definitions."""

import math

import numpy as np
import pytest

from modelwright.pipeline.stages.reward import calibration


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_perfect_calibration_has_no_error() -> None:
    differences = [logit(0.75)] * 3 + [-logit(0.75)] + [logit(0.9)] * 9 + [-logit(0.9)]
    found = calibration(np.array(differences))
    assert (found.num_pairs, found.accuracy) == (14, pytest.approx(12 / 14))
    assert found.expected_error == pytest.approx(0.0, abs=1e-9)
    assert [one.count for one in found.bins] == [4, 10]
    assert [one.confidence for one in found.bins] == pytest.approx([0.75, 0.9])
    right = [0.75] * 3 + [0.25] + [0.9] * 9 + [0.1]
    assert found.brier_score == pytest.approx(np.mean([(1 - one) ** 2 for one in right]))
    assert found.log_loss == pytest.approx(-np.mean(np.log(right)))


def test_too_much_confidence_is_an_error_and_equal_rewards_are_half_right() -> None:
    found = calibration(np.array([800.0, -800.0, 0.0]))
    assert found.accuracy == pytest.approx(1.5 / 3)
    assert [(one.low, one.high, one.count) for one in found.bins] == [(0.5, 0.55, 1), (0.95, 1.0, 2)]
    assert found.expected_error == pytest.approx((0.0 + 2 * 0.5) / 3)
    assert math.isfinite(found.log_loss)
    with pytest.raises(ValueError, match="at least one pair"):
        calibration(np.zeros(0))
