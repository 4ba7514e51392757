"""Statistics against scipy, scikit-learn and definitions written out."""

import numpy as np
import pytest
from scipy.stats import false_discovery_control, ks_2samp
from sklearn.linear_model import LogisticRegression

from modelwright_continual.drift import classifier_test
from modelwright_continual.drift.calibrate import alarm_level, run_length
from modelwright_continual.drift.classifier_test import fit_logistic, separation_test
from modelwright_continual.drift.marginal import Marginal, ResampledMarginal
from modelwright_continual.drift.sessions import Units, correlation_within, make_units, weight_limit
from modelwright_continual.drift.statistics import (
    adjusted_p_values,
    adjusted_where_moved,
    bin_shares,
    decile_edges,
    ks_distance,
    psi,
    resampling_p_value,
)


def singles(count: int) -> Units:
    return Units(np.arange(count), np.ones(count))


@pytest.mark.parametrize("digits", [0, 1, 8])  # with many ties, and with none
@pytest.mark.parametrize("seed", range(5))
def test_ks_is_that_of_scipy(seed: int, digits: int) -> None:
    dice = np.random.default_rng(seed)
    first, second = dice.normal(size=150).round(digits), dice.normal(0.3, 1.2, size=83).round(digits)
    expected = ks_2samp(first, second).statistic
    assert ks_distance(first, np.full(150, 1 / 150), second, np.full(83, 1 / 83)) == pytest.approx(expected)
    marginal = Marginal("x", "number", first, singles(150))
    assert marginal.compare(second, singles(83)).effect == pytest.approx(expected)


def naive_psi(reference: np.ndarray, current: np.ndarray) -> float:
    """Deciles of the reference; a value on an edge belongs to the bin below."""
    edges = np.quantile(reference, np.arange(1, 10) / 10, method="inverted_cdf")
    total = 0.0
    for low, high in zip([-np.inf, *edges], [*edges, np.inf], strict=True):
        r = max(1e-4, np.mean((reference > low) & (reference <= high)))
        c = max(1e-4, np.mean((current > low) & (current <= high)))
        total += (c - r) * np.log(c / r)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_psi_is_that_of_its_definition(seed: int) -> None:
    dice = np.random.default_rng(seed)
    reference, current = dice.lognormal(size=400), dice.lognormal(0.2, size=190)
    assert Marginal("x", "number", reference, singles(400)).compare(current, singles(190)).psi == pytest.approx(
        naive_psi(reference, current)
    )
    equal = np.full(400, 1 / 400)
    edges = decile_edges(reference, equal)
    assert bin_shares(reference, equal, edges) == pytest.approx(np.full(10, 0.1))
    assert psi(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == pytest.approx(0.5 * np.log(2) + 0.4999 * np.log(5000))


def test_the_resampled_comparison_is_the_direct_one() -> None:
    """With ties, missing values, weights, and categories."""
    dice = np.random.default_rng(0)
    sessions = np.sort(dice.integers(0, 90, 400))
    units = Units(np.unique(sessions, return_inverse=True)[1], np.ones(len(np.unique(sessions))))
    numbers = np.where(dice.random(400) < 0.3, np.nan, dice.integers(0, 12, 400).astype(float))
    for kind, values in (("number", numbers), ("category", dice.integers(0, 3, 400).astype(float))):
        marginal = Marginal("x", kind, values, units, ("a", "b", "c", "(new)") if kind == "category" else ())
        fast = ResampledMarginal.of(marginal)
        whole = fast.cumulative(np.ones(len(units.weights)))
        chosen = np.flatnonzero(sessions < 40)
        window = Units(np.unique(sessions[chosen], return_inverse=True)[1], np.ones(len(np.unique(sessions[chosen]))))
        direct = marginal.compare(values[chosen], window)
        assert fast.compare(chosen, window, whole) == pytest.approx((direct.effect, direct.statistic))


def test_adjusted_p_values_are_those_of_scipy() -> None:
    p_values = np.array([0.0001, 0.004, 0.03, 0.2, 0.9])
    assert np.minimum(adjusted_p_values(p_values), 1) == pytest.approx(false_discovery_control(p_values, method="by"))


def test_resampling_p_values() -> None:
    null = np.random.default_rng(0).normal(size=199)
    assert resampling_p_value(float(np.median(null)), null) == pytest.approx(0.5, abs=0.01)
    assert resampling_p_value(4.0, null) < 1e-3  # less than 1 / 200, which counting cannot give
    assert resampling_p_value(1.0, np.ones(199)) == 1.0


def test_sessions_count_once_however_long_they_are() -> None:
    units = Units(np.array([0] * 1000 + list(range(1, 100))), np.ones(100))
    assert units.record_weights[:1000].sum() == pytest.approx(0.01)
    assert units.record_weights[1000] == pytest.approx(0.01)


def test_the_variance_of_a_mean_of_sessions() -> None:
    """Against the variance of simulated means."""
    dice = np.random.default_rng(0)
    units = Units(np.repeat(np.arange(30), dice.integers(1, 9, 30)), np.ones(30))
    shared = np.sqrt(0.4) * dice.normal(size=(4000, 30))[:, units.of_record]
    values = shared + np.sqrt(0.6) * dice.normal(size=(4000, len(units.of_record)))
    assert np.var(values @ units.record_weights) == pytest.approx(units.variance(0.4), rel=0.1)
    many = np.repeat(np.arange(500), 4)
    noisy = np.sqrt(0.4) * dice.normal(size=500)[many] + np.sqrt(0.6) * dice.normal(size=2000)
    assert correlation_within(noisy[:, None], many) == pytest.approx(0.4, abs=0.06)


def test_a_user_weighs_at_most_the_limit() -> None:
    sessions = np.repeat(np.arange(100), 2)
    users = np.array([0] * 50 + list(range(1, 51)))
    units = make_units(sessions, users, 0.05)
    assert len(units.weights) == 51
    assert units.weights.max() / units.weights.sum() == pytest.approx(0.05)
    assert len(make_units(sessions, users, 0.5).weights) == 100
    sparse = make_units(sessions, users + 7, 0.005)  # every user weighs more: they become equal
    assert sparse.weights.tolist() == [1.0] * 51
    for weights, share in (([9, 5, 1, 1, 1], 0.3), ([4, 4, 4], 0.1), ([100, 50, 25, 1, 1, 1, 1, 1], 0.2)):
        cut = np.minimum(weights, weight_limit(np.array(weights, dtype=float), share))
        assert cut.max() <= max(share, 1 / len(weights)) * cut.sum() + 1e-9


def test_all_fits_at_once_are_those_of_scikit_learn() -> None:
    dice = np.random.default_rng(0)
    inputs, weights = dice.normal(size=(200, 12)).astype(np.float32), dice.uniform(0.2, 1, 200)
    labels = (dice.random((200, 3)) < 1 / (1 + np.exp(-2 * inputs[:, :3]))).astype(float)
    design = np.concatenate([inputs, np.ones((200, 1), np.float32)], axis=1)
    fitted = fit_logistic(design, labels, weights)
    strength = 1 / (classifier_test.RIDGE * weights.sum() / 4)
    for column in range(3):
        twin = LogisticRegression(C=strength, tol=1e-8).fit(inputs, labels[:, column], sample_weight=weights)
        assert fitted[:, column] == pytest.approx([*twin.coef_[0], *twin.intercept_], abs=2e-3)


def test_the_classifier_test_finds_a_shift_and_nothing_else() -> None:
    """Correlated sessions: a test of single records would find a difference in most of these."""
    p_values = []
    for seed in range(20):
        dice = np.random.default_rng(seed)
        sessions = np.repeat(np.arange(150), 5)
        rows = dice.normal(size=(150, 8))[sessions] + 0.3 * dice.normal(size=(750, 8))
        units, is_window = Units(sessions, np.ones(150)), np.arange(150) < 50
        p_values.append(separation_test(rows.astype(np.float32), units, is_window, dice).p_value)
        if seed < 3:
            rows[:250, 0] += 2.0
            assert separation_test(rows.astype(np.float32), units, is_window, dice).p_value < 0.001
    assert min(p_values) > 0.002
    assert 0.25 < np.median(p_values) < 0.75


@pytest.mark.parametrize("num_moved", [0, 1, 5, 50])
def test_windows_that_have_not_moved_never_alarm(num_moved: int) -> None:
    """Some of 1,000 drawn windows have an effect of the smallest size; at a run length of 200, at most 5 alarm."""
    effects, p_values = np.zeros((10, 100, 3)), np.random.default_rng(0).random((10, 100, 3))
    effects.reshape(-1, 3)[:num_moved, 1] = 0.5
    least = adjusted_where_moved(p_values, effects, 0.03).min(axis=2)
    level = alarm_level(least, 200)
    assert np.isfinite(level)
    assert int((least <= level).sum()) == min(num_moved, 5)
    stated, low, high = run_length(least <= level)
    assert low < stated < high
    assert stated == pytest.approx(1000 / max(1, min(num_moved, 5)))


def test_the_interval_of_the_run_length_covers_differences_between_references() -> None:
    alike, different = np.zeros((50, 100), dtype=bool), np.zeros((50, 100), dtype=bool)
    alike[:, :2], different[:10, :10] = True, True
    assert run_length(alike)[0] == run_length(different)[0] == pytest.approx(50)
    assert run_length(alike)[1] == pytest.approx(50)
    assert run_length(different)[1] < 20
