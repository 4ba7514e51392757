"""The rules of the claims about A/B tests, images and retrieval, and the instruments of their measurements."""

import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from claim_verdicts import verdict
from modelwright.serve.ab.experiment import CONTROL, REPORT_ALPHA, TREATMENT, ExperimentState, RequestEvent
from modelwright.serve.ab.statistics import ratio_interval
from modelwright_claims import ab_false_alarms, alignment_retrieval, mixup_cutmix, resnet_precision
from modelwright_claims.judging import judge
from modelwright_claims.statistics import share


def test_the_bounds_of_a_share_are_those_of_clopper_and_pearson() -> None:
    found = share([1.0] * 10 + [0.0] * 390)
    assert found.mean == 2.5
    assert stats.binom.cdf(10, 400, found.upper / 100) == pytest.approx(0.05)
    assert stats.binom.sf(9, 400, found.lower / 100) == pytest.approx(0.05)
    none = share([0.0] * 1000)
    assert (none.lower, none.upper) == (0.0, pytest.approx(100 * (1 - 0.05 ** (1 / 1000))))


def test_false_alarms_are_judged_by_their_upper_bounds() -> None:
    samples = {name: [0.0] * 1000 for name in ab_false_alarms.SIGNS}
    samples[ab_false_alarms.REPEATED + ab_false_alarms.ERRORS] = [1.0] * 300 + [0.0] * 700
    assert verdict(ab_false_alarms.CLAIM, samples).kind == "met"
    name = ab_false_alarms.ALARM + ab_false_alarms.SCORES
    assert verdict(ab_false_alarms.CLAIM, {**samples, name: [1.0] * 45 + [0.0] * 955}).kind == "short"
    rolled = {**samples, ab_false_alarms.ROLLED_BACK: [1.0] * 5 + [0.0] * 995}
    assert "rolled back" in verdict(ab_false_alarms.CLAIM, rolled).reason


def test_a_sign_is_that_the_page_shows_an_interval_without_1() -> None:
    draw, state = np.random.default_rng(2), ExperimentState()
    sign = ab_false_alarms.SIGNS[ab_false_alarms.ALARM + ab_false_alarms.ERRORS]
    seen = set()
    for number in range(600):
        arm = (CONTROL, TREATMENT)[number % 2]
        is_error = bool(draw.random() < (0.35 if arm == TREATMENT else 0.1))
        state.take_request(RequestEvent(arm=arm, share=0.5, is_error=is_error, latency_s=None), 0)
        low, high = ratio_interval(state.events["failed"].as_epochs(), REPORT_ALPHA)
        assert sign.fires(state) == (low > 1 or high < 1)
        seen.add(sign.fires(state))
    assert seen == {False, True}


def test_traffic_is_a_function_of_the_run_and_looked_at_to_its_end() -> None:
    first, again, other = (ab_false_alarms.made_up_traffic(number, 200) for number in (3, 3, 4))
    assert list(first.units) == list(again.units)
    assert np.array_equal(first.latency_s, again.latency_s, equal_nan=True)
    assert not np.array_equal(first.is_error, other.is_error) or list(first.units) != list(other.units)
    assert len(first.units) == 200
    assert max(Counter(first.units).values()) > 1, "sessions have several requests"
    assert set(ab_false_alarms.look_at_every_event(first)) == set(ab_false_alarms.SIGNS)


def test_images_are_judged_by_paired_seeds() -> None:
    accuracy = mixup_cutmix.ACCURACY
    samples = {f"{accuracy}{arm}": [96.0, 96.2, 96.1] for arm in mixup_cutmix.ALPHAS}
    better = {**samples, f"{accuracy}{mixup_cutmix.BOTH}": [97.0, 97.1, 97.2]}
    assert verdict(mixup_cutmix.CLAIM, better).kind == "met"
    assert verdict(mixup_cutmix.CLAIM, samples).kind == "short"
    arms = resnet_precision.POLICIES
    samples = {f"{resnet_precision.ACCURACY}{arm}": [96.0, 96.2, 96.1] for arm in arms}
    samples |= {
        f"{resnet_precision.PACE}{arm}": [100.0 * (1 + number), 101.0 * (1 + number)] for number, arm in enumerate(arms)
    }
    assert verdict(resnet_precision.CLAIM, samples).kind == "met"
    few_images = {**samples, f"{resnet_precision.ACCURACY}{list(arms)[-1]}": [96.0, 95.6, 96.1]}
    assert verdict(resnet_precision.CLAIM, few_images).kind == "short"


def test_retrieval_must_beat_the_bag_of_words_in_every_task() -> None:
    def recall(model: float) -> dict:
        found = {"chance": 0.01, "bag_of_words": 0.2, "model": model}
        places = {method: {"at_1": value, "at_5": value} for method, value in found.items()}
        return {"num_queries": 40, "num_candidates": 40, **places}

    def runs(code: float) -> dict:
        image, of_code = alignment_retrieval.TASKS.values()
        of_seed = [{image: recall(0.5 + seed / 100), of_code: recall(code + seed / 100)} for seed in range(3)]
        return dict.fromkeys(alignment_retrieval.WEIGHTS, of_seed)

    good, bad = (alignment_retrieval.measurement(runs(code)) for code in (0.6, 0.1))
    assert verdict(alignment_retrieval.CLAIM, dict(good.samples), dict(good.conditions)).kind == "met"
    poor = judge(alignment_retrieval.CLAIM, bad)
    assert poor.kind == "short"
    assert "text to code, recall@1 over bag of words" in poor.reason
    assert poor.figures["text to code, recall@1, chance"].value == pytest.approx(1.0)
    assert math.isfinite(poor.figures["text to image, recall@1, weights on over off"].value)
