import math
import statistics

import pytest

from modelwright_claims.statistics import paired_t_test, spread, two_sided_t


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
    assert spread([4.0]) == 0.0


def test_one_pair_is_no_comparison():
    with pytest.raises(ValueError, match="two pairs"):
        paired_t_test([1.0], [2.0])
