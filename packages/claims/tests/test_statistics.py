import math

import pytest

from modelwright_claims.statistics import differences, estimate, exact, paired_t_test, percent_above, ratios


def test_paired_test_looks_at_differences_only():
    baseline = [3.0, 2.0, 5.0]
    method = [2.9, 1.88, 4.91]
    result = paired_t_test(method, baseline)
    assert result.mean == pytest.approx(-0.31 / 3)
    assert result.p_value < 0.05
    t = result.mean / (result.std / math.sqrt(3))
    assert result.p_value == pytest.approx(1 - abs(t) / math.sqrt(2 + t * t)), "Student's t of 2 degrees in closed form"


def test_equal_differences():
    assert paired_t_test([1.0, 2.0], [1.0, 2.0]).p_value == 1.0
    assert paired_t_test([2.0, 3.0], [1.0, 2.0]).p_value == 0.0


def test_one_pair_is_no_comparison():
    with pytest.raises(ValueError, match="two pairs"):
        paired_t_test([1.0], [2.0])


@pytest.mark.parametrize(
    ("degrees", "quantile", "p_value"),
    # Tables of Student's t: one-sided 0.95, which is two-sided 0.10.
    [(1, 6.314, 0.10), (2, 2.920, 0.10), (4, 2.132, 0.10), (10, 1.812, 0.10), (30, 1.697, 0.10)],
)
def test_bounds_and_p_values_against_tables(degrees, quantile, p_value):
    values = [float(number) for number in range(degrees + 1)]
    found = estimate(values)
    error = found.spread / math.sqrt(degrees + 1)
    assert (found.mean - found.lower) / error == pytest.approx(quantile, abs=1e-3)
    at_the_bound = [value - found.lower for value in values]
    assert paired_t_test(at_the_bound, [0.0] * len(values)).p_value == pytest.approx(p_value, abs=1e-9)


def test_bounds_are_one_sided_by_student_s_t():
    found = estimate([1.0, 2.0, 3.0])
    margin = 2.920 * 1.0 / math.sqrt(3)
    assert (found.mean, found.spread, found.count) == (2.0, 1.0, 3)
    assert found.lower == pytest.approx(2.0 - margin, abs=1e-3)
    assert found.upper == pytest.approx(2.0 + margin, abs=1e-3)
    assert found.figure("x").upper == found.upper


def test_one_repeat_has_no_bound_and_a_count_needs_none():
    one = estimate([2.0])
    assert (one.lower, one.upper) == (-math.inf, math.inf)
    assert one.figure("x").lower is None
    assert (exact(2.0).lower, exact(2.0).upper) == (2.0, 2.0)
    assert exact(2.0).figure("x").upper is None


def test_a_run_that_diverged_leaves_no_bound():
    assert estimate([1.0, math.inf, 1.0]).upper == math.inf
    assert differences([math.inf, 1.0], [1.0, 1.0]).lower == -math.inf


def test_estimates_are_paired():
    method, baseline = [1.1, 2.2, 4.4], [1.0, 2.0, 4.0]
    assert ratios(method, baseline).lower == pytest.approx(1.1)
    assert percent_above(method, baseline).upper == pytest.approx(10.0)
    assert differences(method, baseline).mean == pytest.approx(0.7 / 3)
    with pytest.raises(ValueError, match="shorter"):
        ratios(method, baseline[:2])
