import math
from fractions import Fraction

import pytest

from modelwright.evaluate.scoring import log10_binomial_tail, log10_sign_test, wilson_interval


def test_wilson_interval_against_published_values() -> None:
    """Newcombe 1998, table I: 81 of 263, and 0 of 20."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("correct", "trials"), [(0, 5), (1, 5), (5, 5), (30, 60), (120, 400)])
def test_binomial_tail_is_exact(correct: int, trials: int) -> None:
    exact = sum(Fraction(math.comb(trials, k) * 3 ** (trials - k), 4**trials) for k in range(correct, trials + 1))
    assert 10 ** log10_binomial_tail(correct, trials, 0.25) == pytest.approx(float(exact), rel=1e-9)


def test_binomial_tail_reaches_where_floats_underflow() -> None:
    assert log10_binomial_tail(1000, 1000, 0.25) == pytest.approx(1000 * math.log10(0.25))


def test_sign_test() -> None:
    assert log10_sign_test(0, 0) == 0.0
    assert log10_sign_test(4, 4) == 0.0
    assert 10 ** log10_sign_test(1, 9) == pytest.approx(2 * 11 / 1024)
