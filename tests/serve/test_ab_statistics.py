"""The statistics of A/B tests: against textbooks and brute force, false alarms under constant looking, and power."""

import itertools
import json
import math
from collections import Counter

import mpmath
import numpy as np
import pytest
from scipy import stats

from modelwright.serve.ab import experiment as guards
from modelwright.serve.ab.experiment import (
    CONTROL,
    GUARD_ALPHA,
    GUARDS,
    LATENCY_SAMPLE,
    TREATMENT,
    ExperimentState,
    RequestEvent,
    arm_of,
    mismatch,
    position,
    verdict,
)
from modelwright.serve.ab.statistics import (
    BURN_IN,
    PRIOR_SPREAD,
    Epoch,
    Moments,
    difference_interval,
    half_width,
    log_e_rate,
    log_e_value,
    log_likelihood,
    promised_requests,
    ratio_interval,
    two_proportions,
    welch,
)

MAX_ERROR_RATE = 0.01
UNITS = [f"unit {number}" for number in range(20_000)]


def moments(values) -> Moments:
    result = Moments()
    for value in values:
        result.add(float(value))
    return result


@pytest.mark.parametrize("seed", range(5))
def test_welch_is_the_textbook_formula(seed: int):
    draw = np.random.default_rng(seed)
    control, treatment = draw.normal(0.1, 1, 11 + 7 * seed), draw.normal(0.3, 2, 40)
    found = welch(moments(control), moments(treatment))
    expected = stats.ttest_ind(treatment, control, equal_var=False)
    assert found is not None
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9, abs=1e-12)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


GBSTATS_PROPORTIONS = [
    ((3, 1000), (11, 900), 0.022955745833604713, 0.0012762261670109364, 0.017168218277433506),
    ((50, 51), (49, 80), 6.407507635586285e-09, -0.4826460545126142, -0.2531382592128758),
    ((1, 9), (2, 8), 0.4677114563755005, -0.2629599353060709, 0.5407377130838487),
    ((400, 20000), (470, 20500), 0.0420649574515064, 0.00010498131618222849, 0.005748677220403136),
]
"""Events and observations of both arms, and what gbstats 0.8.0 says about them: the p-value of `TwoSidedTTest` for an
absolute difference of two `ProportionStatistic`, and its 95% interval."""
GBSTATS_MEANS = [
    ((120, 100.0, 1500.0), (125, 140.5, 1900.25), 0.5280719218314363),
    ((11, -3.0, 40.0), (40, 9.0, 160.0), 0.47234543746904833),
    ((600, 2100.0, 9000.0), (110, 430.0, 2100.0), 0.04153493561758337),
]
"""Count, sum and sum of squares of both arms, and the p-value of the same test of two `SampleMeanStatistic`."""


@pytest.mark.parametrize(("control", "treatment", "p_value", "low", "high"), GBSTATS_PROPORTIONS)
def test_two_proportions_are_those_of_gbstats(control, treatment, p_value: float, low: float, high: float):
    found = two_proportions(control, treatment)
    assert found is not None
    assert (found.p_value, found.low, found.high) == pytest.approx((p_value, low, high), rel=1e-9)


@pytest.mark.parametrize(("control", "treatment", "p_value"), GBSTATS_MEANS)
def test_means_are_those_of_gbstats(control, treatment, p_value: float):
    found = welch(Moments(*control), Moments(*treatment))
    assert found is not None
    assert found.p_value == pytest.approx(p_value, rel=1e-9)


def test_what_cannot_be_compared():
    assert welch(moments([1]), moments([1, 2])) is None
    assert welch(moments([1, 1]), moments([2, 2])) is None
    assert two_proportions((0, 10), (0, 10)) is None
    assert two_proportions((0, 1), (1, 10)) is None


def test_shares_are_kept_and_nobody_leaves_b_as_it_grows():
    shares = [0.0, 0.01, 0.1, 0.1, 0.25, 0.5, 0.99, 1.0]
    groups = [{unit for unit in UNITS if arm_of("salt", unit, share) == TREATMENT} for share in shares]
    assert all(smaller <= larger for smaller, larger in itertools.pairwise(groups))
    for share, group in zip(shares, groups, strict=True):
        assert abs(len(group) / len(UNITS) - share) < 4 * math.sqrt(0.25 / len(UNITS))
    other = {unit for unit in UNITS if arm_of("other salt", unit, 0.5) == TREATMENT}
    assert 0.48 < len(other & groups[5]) / len(groups[5]) < 0.52, "another test divides anew"
    assert min(position("salt", unit) for unit in UNITS) >= 0
    assert stats.kstest([position("salt", unit) for unit in UNITS], "uniform").pvalue > 0.001


@pytest.mark.parametrize("one_sided", [False, True])
def test_the_e_value_is_the_integral_of_the_likelihood_ratio_over_the_priors(one_sided: bool):
    """Against numerical integration, with a share that changed and came back."""
    epochs = [Epoch(0.2, 3, 1), Epoch(0.5, 6, 5), Epoch(0.2, 4, 3)]
    means = []
    for is_narrow in (False, True):
        product = 1.0
        for share, count, hits in ((0.2, 7, 4), (0.5, 6, 5)):
            narrow = (1 / ((1 - share) * PRIOR_SPREAD**2), 1 / (share * PRIOR_SPREAD**2))
            prior = stats.beta(*(narrow if is_narrow else (0.5, 0.5)))
            low = prior.cdf(share) if one_sided else 0.0
            # equal steps of the prior's probability; the mean over them is the integral
            p = prior.ppf(low + (1 - low) * (np.arange(200_000) + 0.5) / 200_000)
            product *= np.mean((p / share) ** hits * ((1 - p) / (1 - share)) ** (count - hits))
        means.append(product)
    assert float(log_e_value(epochs, one_sided=one_sided)) == pytest.approx(math.log(np.mean(means)), abs=1e-4)
    assert float(log_e_value([], one_sided=one_sided)) == 0.0


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_expected_e_value_is_one_and_less_for_a_better_version(share: float):
    """Exact: the sum over all counts, weighted with their probability."""
    counts = np.arange(41)
    epochs = [Epoch(share, np.full(41, 40), counts)]
    for ratio, is_equal in ((1.0, True), (0.7, False)):
        weights = stats.binom.pmf(counts, 40, ratio * share / (ratio * share + 1 - share))
        expected = float(weights @ np.exp(log_e_value(epochs, one_sided=True)))
        assert expected == pytest.approx(1, rel=1e-9) if is_equal else expected < 1
        if is_equal:
            assert float(weights @ np.exp(log_e_value(epochs))) == pytest.approx(1, rel=1e-9)
    for rate, most in ((0.02, 1 + 1e-9), (0.013, 1)):
        weights = stats.binom.pmf(counts, 40, rate)
        assert float(weights @ np.exp(log_e_rate(np.full(41, 40), counts, 0.02))) <= most


def test_the_interval_of_the_ratio_is_where_the_mixture_does_not_refute():
    epochs = [Epoch(0.3, 60, 33), Epoch(0.5, 20, 14)]
    low, high = ratio_interval(epochs, 0.05)
    assert 1 < low < 2 < high
    mixture = float(log_e_value(epochs) + log_likelihood(epochs, 1.0))
    for bound in (low, high):
        assert mixture - float(log_likelihood(epochs, bound)) == pytest.approx(math.log(20), abs=1e-6)
    assert ratio_interval([], 0.05) == (0, math.inf)
    assert ratio_interval([Epoch(0.5, 4, 0)], 0.05)[0] == 0
    assert ratio_interval([Epoch(0.5, 4, 4)], 0.05)[1] == math.inf


def units_seen(share: float, count: int, in_treatment: int) -> ExperimentState:
    state = ExperimentState()
    state.events["seen"].epochs = [[share, count, in_treatment]]
    return state


def test_a_lost_eighth_of_an_arm_is_found():
    """Of 5,000,000 units to each arm B has 4,400,000: no grid with 1.33 as the neighbor of 1 finds that."""
    state = units_seen(0.5, 9_400_000, 4_400_000)
    assert verdict(state, MAX_ERROR_RATE) == "sample_ratio"
    low, high = ratio_interval(state.events["seen"].as_epochs(), 0.05)
    assert 0.87 < low < 0.88 < high < 0.89


def test_a_loss_of_5_percent_is_found_within_50_000_units():
    """At the guards' error rate, looked at every 250 units, in nine runs of ten; equal arms raise nothing."""
    alarms = {}
    for ratio in (0.95, 1 / 0.95, 1.0):
        draw = np.random.default_rng(2)
        in_treatment = draw.binomial(250, ratio / (1 + ratio), (500, 200)).cumsum(axis=1)
        log_e = log_e_value([Epoch(0.5, np.arange(250, 50_001, 250), in_treatment)])
        alarms[ratio] = (log_e >= math.log(1 / GUARD_ALPHA)).any(axis=1).mean()
    assert min(alarms[0.95], alarms[1 / 0.95]) >= 0.9, alarms
    assert alarms[1.0] <= 0.01, alarms


@pytest.mark.parametrize("share", [0.5, 0.1, 0.99])
def test_false_alarms_of_the_check_stay_below_alpha(share: float):
    """At a level that can be counted, after every unit of 1,000 runs; the bound has a one-sided error of 1%."""
    arms = np.random.default_rng(3).random((1000, 3000)) < share
    log_e = log_e_value([Epoch(share, np.arange(1, 3001), arms.cumsum(axis=1))])
    alarms = int((log_e >= math.log(10)).any(axis=1).sum())
    assert 0 < alarms <= stats.binom.ppf(0.99, 1000, 0.1)
    tenth_lost = np.random.default_rng(4).binomial(1_000_000, 0.9 * share / (0.9 * share + 1 - share))
    assert mismatch(units_seen(share, 1_000_000, tenth_lost)), "a tenth of the units of B is lost"


def test_the_small_increase_that_a_grid_of_ratios_is_blind_to_is_found():
    """By the guards, too: 10% more errors than A, and 15% more than the limit, from enough units on."""
    state = ExperimentState()
    state.events["failed"].epochs = [[0.5, 21_000, 11_000]]
    assert GUARDS["errors"].fires(state, MAX_ERROR_RATE)
    state.events["failed"].epochs = [[0.5, 21_000, 10_000]]
    assert not GUARDS["errors"].fires(state, MAX_ERROR_RATE), "fewer errors are no reason"
    assert float(log_e_rate(300_000, 3_450, 0.01)) > math.log(1 / GUARD_ALPHA)
    assert float(log_e_rate(300_000, 2_900, 0.01)) < 0
    for failed in (0, 1, 500, 9_000):
        state.events["failed"].epochs = [[0.5, 21_000, failed]]
        assert not GUARDS["errors"].fires(state, MAX_ERROR_RATE), "however many fewer"


@pytest.mark.parametrize("share", [0.5, 0.01])
def test_a_billion_units_are_counted_exactly_enough(share: float):
    """Against 50 digits; the interval is as narrow as so many units allow, and extreme counts are no special case."""
    count = 10**9
    hits = int(count * share) + 20_000
    gains = []
    with mpmath.workdps(50):
        s, half = mpmath.mpf(share), mpmath.mpf(0.5)
        for a, b in ((half, half), (1 / ((1 - s) * PRIOR_SPREAD**2), 1 / (s * PRIOR_SPREAD**2))):
            gain = mpmath.log(mpmath.beta(a + hits, b + count - hits) / mpmath.beta(a, b))
            gains.append(gain - hits * mpmath.log(s) - (count - hits) * mpmath.log(1 - s))
        expected = float(mpmath.log(sum(map(mpmath.exp, gains)) / 2))
    assert float(log_e_value([Epoch(share, count, hits)])) == pytest.approx(expected, abs=1e-4)
    low, high = ratio_interval([Epoch(share, count, int(count * share))], 0.05)
    assert low < 1 < high
    assert high - low < 12 / math.sqrt(count * share * (1 - share))
    for hits in (0, count):
        assert float(log_e_value([Epoch(share, count, hits)])) > 1e6
    assert float(log_e_value([Epoch(share, count, 0)], one_sided=True)) == -math.inf
    assert ratio_interval([Epoch(share, count, 0)], 0.05)[1] < 1e-5


NUM_RUNS, NUM_UNITS = 400, 1500


@pytest.fixture(scope="module")
def equal_arms() -> dict[str, np.ndarray]:
    """Units in arms of equal versions: the arm, whether the unit fails, the score of its feedback; runs x units."""
    draw = np.random.default_rng(1)
    shape = (NUM_RUNS, NUM_UNITS)
    rate = 0.004 + 0.05 * (np.arange(NUM_UNITS) % 500 > 470)  # an outage of both now and then
    arms = draw.random(shape) < 0.2
    return {"arms": arms, "failed": draw.random(shape) < rate, "scores": np.sign(draw.random(shape) - 0.3)}


def looked_at(values: np.ndarray, arms: np.ndarray) -> list[np.ndarray]:
    """Number, mean and variance of the values in an arm after every unit of a run."""
    count = arms.cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (values * arms).cumsum() / count
        variance = ((values**2 * arms).cumsum() - count * mean**2) / (count - 1)
    return [count, mean, variance]


def test_false_alarms_of_equal_versions_looked_at_after_every_unit(equal_arms):
    alarms = {"units": 0, "errors": 0, "scores": 0, "welch": 0}
    threshold = math.log(20)
    for arms, failed, scores in zip(*equal_arms.values(), strict=True):
        seen = np.arange(1, NUM_UNITS + 1)
        alarms["units"] += bool((log_e_value([Epoch(0.2, seen, arms.cumsum())]) >= threshold).any())
        counts = Epoch(0.2, failed.cumsum(), (failed & arms).cumsum())
        alarms["errors"] += bool((log_e_value([counts]) >= threshold).any())
        (n_a, mean_a, var_a), (n_b, mean_b, var_b) = (looked_at(scores, one) for one in (~arms, arms))
        is_shown = (n_a >= BURN_IN) & (n_b >= BURN_IN)
        difference = (mean_b - mean_a)[is_shown]
        variance = (var_a / n_a + var_b / n_b)[is_shown]
        half = half_width(seen[is_shown], seen[is_shown] * variance, 0.05)
        alarms["scores"] += bool((abs(difference) > half).any())
        alarms["welch"] += bool((abs(difference) > 1.96 * np.sqrt(variance)).any())
    assert max(alarms["units"], alarms["errors"], alarms["scores"]) <= 0.05 * NUM_RUNS, alarms
    assert min(alarms["units"], alarms["errors"], alarms["scores"]) > 0, "a test that never rejects is no test"
    assert alarms["welch"] > 0.15 * NUM_RUNS, "what looking does to a test for a fixed number"


def equal_verdicts(num_runs: int, num_units: int) -> Counter[str]:
    """What the product says when it is asked after every unit of runs with equal versions, until it takes one away:
    each unit asks once to three times, and every second one gives feedback. Errors have outages of both versions and
    stay below the limit; a twentieth of the answers is slow.
    """
    draw = np.random.default_rng(1)
    reasons = Counter[str]()
    for _ in range(num_runs):
        state = ExperimentState()
        for number in range(num_units):
            arm, had = TREATMENT if draw.random() < 0.2 else CONTROL, 0
            rate = 0.004 + 0.05 * (number % 500 > 470)
            for _ in range(draw.integers(1, 4)):
                is_error = bool(draw.random() < rate)
                latency_s = None if is_error else float(draw.lognormal(-1, 0.5))
                had = state.take_request(RequestEvent(arm=arm, share=0.2, is_error=is_error, latency_s=latency_s), had)
            if number % 2:
                state.take_score(arm, float(np.sign(draw.random() - 0.3)), had)
            if reason := verdict(state, MAX_ERROR_RATE):
                reasons[reason] += 1
                break
    return reasons


@pytest.mark.slow
def test_an_equal_version_is_never_rolled_back(monkeypatch: pytest.MonkeyPatch):
    """By none of the product's guards in 200 runs; guards that may err in nine of ten do, each of them."""
    assert equal_verdicts(200, 300) == {}
    monkeypatch.setattr(guards, "GUARD_ALPHA", 0.9)
    careless = equal_verdicts(80, 300)
    assert {"sample_ratio", *GUARDS} <= {*careless, "quality"}, careless
    assert sum(careless.values()) >= 6


def run_until_verdict(events, state: ExperimentState | None = None) -> tuple[str, int]:
    """The verdict and the number of requests to B until then; one unit for each request."""
    state = state or ExperimentState()
    for event in events:
        state.take_request(event, 0)
        if event.is_error and (reason := verdict(state, MAX_ERROR_RATE)):
            return reason, state.requests[TREATMENT]
    return "", state.requests[TREATMENT]


def requests(seed: int, rates: dict[str, float], count: int, share: float = 0.5):
    draw = np.random.default_rng(seed)
    for _ in range(count):
        arm = TREATMENT if draw.random() < share else CONTROL
        is_error = bool(draw.random() < rates[arm])
        yield RequestEvent(arm=arm, share=share, is_error=is_error, latency_s=None if is_error else 0.1)


def test_a_version_with_5_percent_errors_goes_within_the_promised_number_of_requests():
    promised = promised_requests(0.05, MAX_ERROR_RATE, GUARD_ALPHA, power=0.99)
    assert promised is not None
    assert 150 < promised < 600
    found = [run_until_verdict(requests(seed, {"A": 0.001, "B": 0.05}, 3 * promised)) for seed in range(100)]
    assert {reason for reason, _ in found} <= {"error_limit", "errors"}
    assert sum(count <= promised for _, count in found) >= 97, "99% are promised"


def test_the_promise_is_the_probability_of_the_first_crossing():
    """Against simulation at a small scale, where the promise can be counted."""
    promised = promised_requests(0.3, 0.05, 0.05, power=0.8)
    assert promised is not None
    errors = (np.random.default_rng(3).random((4000, promised)) < 0.3).cumsum(axis=1)
    crossed = (log_e_rate(np.arange(1, promised + 1)[None], errors, 0.05) >= math.log(20)).any(axis=1)
    assert abs(crossed.mean() - 0.8) < 0.05
    earlier = (log_e_rate(np.arange(1, promised)[None], errors[:, :-1], 0.05) >= math.log(20)).any(axis=1)
    assert earlier.mean() < 0.83
    assert promised_requests(0.01, 0.01, 0.001) is None, "what is at the limit is not promised to go"


def test_each_guard_fires_for_its_own_reason():
    assert set(GUARDS) == {"error_limit", "errors", "latency", "quality"}
    assert run_until_verdict(requests(0, {"A": 0, "B": 0.5}, 200))[0] == "error_limit"
    assert run_until_verdict(requests(0, {"A": 0, "B": 0.009}, 9000, share=0.05))[0] == "errors"

    state = ExperimentState()
    for number in range(LATENCY_SAMPLE):
        state.take_request(RequestEvent(arm=CONTROL, share=0.5, is_error=False, latency_s=number / 100), 0)
    assert state.slow_s == 0.94
    assert state.latencies == []
    for number in range(300):
        arm = (CONTROL, TREATMENT)[number % 2]
        state.take_request(RequestEvent(arm=arm, share=0.5, is_error=False, latency_s=0.9 + 0.1 * (arm == "B")), 0)
    assert state.events["slow"].of_arm(TREATMENT) == 150
    assert GUARDS["latency"].fires(state, MAX_ERROR_RATE)
    assert not GUARDS["errors"].fires(state, MAX_ERROR_RATE)

    state = ExperimentState()
    for number in range(400):
        arm = (CONTROL, TREATMENT)[number % 2]
        state.take_score(arm, -1.0 if arm == TREATMENT and number % 4 == 1 else 1.0, 0)
    assert verdict(state, MAX_ERROR_RATE) == "quality"
    low, high = difference_interval(state.scores[CONTROL], state.scores[TREATMENT], 0.05)
    assert low < -1 < high < 0

    state = ExperimentState()
    for _ in range(200):
        state.take_request(RequestEvent(arm=CONTROL, share=0.5, is_error=False, latency_s=None), 0)
    assert mismatch(state)
    assert verdict(state, MAX_ERROR_RATE) == "sample_ratio"


def test_a_unit_counts_once_for_each_kind_of_event():
    state = ExperimentState()
    had = 0
    for is_error in (False, True, True, False):
        event = RequestEvent(arm=TREATMENT, share=0.5, is_error=is_error, latency_s=None)
        had = state.take_request(event, had)
    for score in (1.0, -1.0):
        had = state.take_score(TREATMENT, score, had)
    assert state.requests == {CONTROL: 0, TREATMENT: 4}
    assert state.errors == {CONTROL: 0, TREATMENT: 2}
    assert [state.events[kind].of_arm(TREATMENT) for kind in ("seen", "failed", "slow")] == [1, 1, 0]
    assert (state.scores[TREATMENT].count, state.scores[TREATMENT].mean) == (1, 1.0)


def test_the_state_survives_json_to_the_bit():
    state = ExperimentState()
    draw = np.random.default_rng(5)
    for number in range(300):
        share = 0.1 if number < 150 else 0.3
        event = RequestEvent(arm="AB"[number % 2], share=share, is_error=number % 7 == 0, latency_s=draw.random())
        state.take_request(event, 0)
        state.take_score("AB"[number % 2], float(draw.random()), 0)
    again = ExperimentState.from_json(state.to_json())
    assert again == state
    assert json.loads(again.to_json()) == json.loads(state.to_json())
    assert [epoch.share for epoch in again.events["seen"].as_epochs()] == [0.1, 0.3]
