import math
import statistics

import pytest

from modelwright_claims.statistics import (
    differences,
    estimate,
    exact,
    paired_t_test,
    percent_above,
    ratios,
    t_quantile,
    two_sided_t,
)


@pytest.mark.parametrize(
    ("t", "degrees", "p_value"),
    # Tables of Student's t: critical values at two-sided 0.10, 0.05, 0.02, 0.01.
    [(6.314, 1, 0.10), (4.303, 2, 0.05), (4.541, 3, 0.02), (2.776, 4, 0.05), (4.032, 5, 0.01), (2.228, 10, 0.05)],
)
def test_t_distribution_against_tables(t, degrees, p_value):
    assert two_sided_t(t, degrees) == pytest.approx(p_value, abs=2e-4)
    assert two_sided_t(-t, degrees) == two_sided_t(t, degrees)


def test_t_distribution_is_normal_in_the_limit():
    normal = 2 * (1 - statistics.NormalDist().cdf(1.5))
    assert two_sided_t(1.5, 4000) == pytest.approx(normal, abs=1e-4)


def test_paired_test_looks_at_differences_only():
    baseline = [3.0, 2.0, 5.0]
    method = [2.9, 1.88, 4.91]
    result = paired_t_test(method, baseline)
    assert result.mean == pytest.approx(-0.31 / 3)
    assert result.p_value < 0.05
    t = result.mean / (result.std / math.sqrt(3))
    assert result.p_value == pytest.approx(two_sided_t(t, 2))


def test_equal_differences():
    assert paired_t_test([1.0, 2.0], [1.0, 2.0]).p_value == 1.0
    assert paired_t_test([2.0, 3.0], [1.0, 2.0]).p_value == 0.0


def test_one_pair_is_no_comparison():
    with pytest.raises(ValueError, match="two pairs"):
        paired_t_test([1.0], [2.0])


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    # Tables of Student's t: one-sided 0.95.
    [(1, 6.314), (2, 2.920), (4, 2.132), (10, 1.812), (30, 1.697)],
)
def test_quantiles_against_tables(degrees, quantile):
    assert t_quantile(0.95, degrees) == pytest.approx(quantile, abs=1e-3)


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
