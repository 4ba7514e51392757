"""The rules of the claims about cost, search, federated averaging and updates, and what they measure with."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from modelwright.core.progress import SilentProgress
from modelwright.data.document import Document
from modelwright.serve.ab.state import CONTROL, REPORT_ALPHA, TREATMENT, ExperimentState, RequestEvent
from modelwright.serve.ab.statistics import ratio_interval
from modelwright_claims import (
    ab_false_alarms,
    alignment_retrieval,
    efficiency_20x,
    int8,
    mixup_cutmix,
    resnet_precision,
)
from modelwright_claims.claim import Claim, Measurement, Setting, Verdict
from modelwright_claims.int8 import FP32, INT8, decoding
from modelwright_claims.judging import judge
from modelwright_claims.statistics import share
from modelwright_continual.claims import forgetting, update_time
from modelwright_federated.claims import federated
from modelwright_plan.claims import interrupted_run, planned_cost
from modelwright_plan.claims.interrupted_run import Presence
from modelwright_plan.cost.prices import shipped_prices
from modelwright_search.claims import architecture_search


def verdict(claim: Claim, samples: dict, conditions: dict | None = None) -> Verdict:
    """The verdict; one that is met has all figures that the overview shows."""
    found = judge(claim, Measurement(samples=samples, conditions=conditions or {}))
    if found.kind == "met":
        assert set(claim.headline) <= set(found.figures)
    return found


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


def test_a_factor_of_two_halves_the_cost_of_training() -> None:
    assumed = planned_cost.Assumptions(values=planned_cost.ASSUMED, training_gain=2.0, serving_gain=1.0)
    found = planned_cost.saved(assumed, shipped_prices())
    assert found["training"] == pytest.approx(50)
    assert found["inference"] == 0
    assert found["training on spot instances too"] > 50
    bars = planned_cost.swings(assumed, shipped_prices(), "training")
    assert next(iter(bars)) == "measured factor of training"
    assert bars["measured factor of training"] == pytest.approx((100 / 3, 60), rel=1e-4)


def test_a_factor_comes_from_a_full_record_of_this_machine_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gain = planned_cost.Gain(claim="x", figure="speed")
    monkeypatch.setattr(planned_cost, "machine", lambda: {"processor": "p", "cores": 2, "instruction_set": "AVX2"})

    def record(value: float, *, cores: int = 2, date: str = "2026-01-01", quick: bool = False) -> dict:
        figure = {"value": value, "unit": "x", "spread": 0.1, "lower": value - 0.5}
        described = {"processor": "p", "cores": cores, "instruction_set": "AVX2"}
        return {
            "name": "x",
            "quick": quick,
            "date": date,
            "commit": "abc",
            "machine": described,
            "figures": {"speed": figure},
        }

    others = [record(9.0, cores=8, date="2026-02-02"), record(7.0, quick=True)]
    own = planned_cost.find_factor(gain, [*others, record(2.0)])
    assert own is not None
    assert (own.value, own.lower) == (2.0, 1.5)
    other = planned_cost.find_factor(gain, others)
    assert other is not None
    assert other.value == 9.0
    assert planned_cost.find_factor(gain, others[1:]) is None


def test_factors_are_figures_of_the_present_claims() -> None:
    assert planned_cost.TRAINING_GAIN.figure in efficiency_20x.CLAIM.headline
    pace = {f"{decoding(1)}, {name}": [speed, speed] for name, speed in ((FP32, 100.0), (INT8, 210.0))}
    found = judge(int8.CLAIM, Measurement(samples=pace))
    assert found.figures[planned_cost.SERVING_GAIN.figure].value == pytest.approx(2.1)


def test_savings_are_judged_at_the_lower_bound_of_the_factors() -> None:
    conditions = {
        "training is faster by": "4x", "inference is faster by": "2.5x", "instance": "i", "assumed": "a",
    }  # fmt: skip
    names = [planned_cost.SAVED + part for part in planned_cost.PARTS]
    good = dict(zip(names, ([75.0, 70.0], [60.0, 55.0], [90.0, 88.0]), strict=True))
    assert verdict(planned_cost.CLAIM, good, conditions).kind == "met"
    assert verdict(planned_cost.CLAIM, {**good, names[0]: [75.0, 60.0]}, conditions).kind == "short"


def documents(num_modules: int) -> list[Document]:
    dice = random.Random(0)
    return [
        Document(
            id=f"{module}.{number}", text="x" * dice.randint(50, 400), kind="prose", split="train", source="s",
            meta={"module": f"pkg{module % 5}.m{module:03d}"},
        )
        for module in range(num_modules)
        for number in range(dice.randint(1, 6))
    ]  # fmt: skip


@pytest.mark.parametrize("split", ["iid", "module"])
def test_clients_get_equally_much_and_modules_stay_whole(split: federated.Split) -> None:
    every = documents(200)
    clients = federated.dealt(every, split)
    assert len(clients) == federated.NUM_CLIENTS
    assert sorted(one.id for own in clients for one in own) == sorted(one.id for one in every)
    sizes = [sum(len(one.text) for one in own) for own in clients]
    assert max(sizes) < 1.1 * min(sizes)
    modules = [{one.meta["module"] for one in own} for own in clients]
    overlap = sum(len(a & b) for a, b in itertools.combinations(modules, 2))
    assert overlap == 0 if split == "module" else overlap > 50


def test_federated_loss_is_compared_with_the_better_central_training() -> None:
    loss = federated.LOSS
    samples = {f"{loss}iid": [2.01, 2.02, 2.01], f"{loss}module": [2.05, 2.06, 2.05]}
    samples |= {f"{loss}sgd": [2.2, 2.2, 2.2], f"{loss}adamw": [2.0, 2.01, 2.0]}
    assert verdict(federated.CLAIM, samples).kind == "met"
    assert verdict(federated.CLAIM, {**samples, f"{loss}module": [2.15, 2.16, 2.15]}).kind == "short"


def test_each_method_of_averaging_is_tuned_until_its_best_rate_lies_inside() -> None:
    best = {"iid": 0.3, "module": 3.0, "sgd": 1.0, "adamw": 1e-4}
    made: list[federated.FederatedRun] = []

    def losses(runs: Sequence[federated.FederatedRun]) -> list[float]:
        made.extend(runs)
        return [abs(math.log(run.learning_rate / best[run.method])) for run in runs]

    plan = federated.plan_of(Setting(quick=False, folder=Path(), progress=SilentProgress()))
    rates = federated._best_rates(plan, losses)
    assert rates == pytest.approx(best, rel=0.15)
    assert len(set(made)) == len(made)
    assert {run.heldout for run in made} == {"validation"}
    for method, rate in rates.items():
        tried = [run.learning_rate for run in made if run.method == method]
        assert min(tried) < rate < max(tried)
    assert sum(run.method == "iid" for run in made) == 3


def forgetting_samples(**changes: list[float]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    bits = {arm.name: 2.5 for arm in forgetting.ARMS} | {"replay 25%": 2.005}
    for name, old in (bits | {forgetting.FIRST: 1.9, forgetting.SCRATCH: 2.0}).items():
        for kind in ("old", "new", "old, validation"):
            samples[f"{kind}: {name}"] = [old, old + 0.001]
        samples[f"FLOPs: {name}"] = [10.0 if name == forgetting.FIRST else 15.0] * 2
        for number in (1, 2, 3):
            samples[f"old after update {number}: {name}"] = [old] * 2
    return samples | changes


def test_the_share_of_replay_is_chosen_on_other_documents_than_it_is_judged_on() -> None:
    conditions = {"seeds": 2}
    met = verdict(forgetting.CLAIM, forgetting_samples(), conditions)
    assert met.kind == "met", met.reason
    assert "replay 25% (chosen on the validation half)" in met.reason
    other = forgetting_samples(**{"old, validation: replay 0%": [1.0, 1.0]})
    assert verdict(forgetting.CLAIM, other, conditions).kind == "short"
    dear = forgetting_samples(**{"FLOPs: replay 25%": [18.0, 18.0]})
    assert "compute of the updates" in verdict(forgetting.CLAIM, dear, conditions).reason


def test_pieces_of_code_are_whole_lines_and_lose_nothing() -> None:
    code = "".join(f"line {number} = {'x' * (number % 90)}\n" for number in range(400))
    pieces = list(forgetting._pieces(code))
    assert "".join(pieces) == code
    assert all(forgetting.FEWEST_CHARS <= len(piece) <= forgetting.PIECE_CHARS for piece in pieces)
    assert all(piece.endswith("\n") for piece in pieces)


def test_the_searched_shape_is_judged_on_unseen_seeds() -> None:
    searched, unseen = architecture_search.SEARCHED, architecture_search.UNSEEN
    samples = {f"{searched}tpe": [2.0], f"{unseen}tpe": [2.0, 2.01, 2.0]}
    samples |= {f"{unseen}{rival}": [2.1, 2.11, 2.1] for rival in architecture_search.RIVALS}
    samples |= {architecture_search.PROMISED: [10.0], architecture_search.MEASURED: [10.5]}
    samples |= {architecture_search.BUDGET: [5.0]}
    names = (architecture_search.SEARCHING, "random", "halving", "scaled")
    samples |= {architecture_search.SPENT + name: [5.0] for name in names}
    assert verdict(architecture_search.CLAIM, samples).kind == "met"
    slow = {**samples, architecture_search.MEASURED: [11.5]}
    assert "promised 10.000 (+15.0%)" in verdict(architecture_search.CLAIM, slow).reason
    dear = {**samples, architecture_search.SPENT + "tpe": [5.5]}
    assert "tpe spent 5.500 trainings of 5" in verdict(architecture_search.CLAIM, dear).reason
    for rival in ("random", "halving"):
        early = verdict(architecture_search.CLAIM, {**samples, architecture_search.SPENT + rival: [3.9]})
        assert early.kind == "short"
        assert f"{rival} spent 3.90 trainings of 5" in early.reason
    assert "not at an equal budget" not in verdict(architecture_search.CLAIM, samples).reason
    few_shapes = verdict(architecture_search.CLAIM, {**samples, architecture_search.SPENT + "scaled": [3.9]})
    assert few_shapes.kind == "met"
    assert "not at an equal budget: scaled spent 3.90 trainings of 5, for it had no further shape" in few_shapes.reason
    tied = {**samples, f"{unseen}halving": [2.0, 2.01, 2.0]}
    assert "loss above halving" in verdict(architecture_search.CLAIM, tied).reason


def test_scripts_leave_room_for_a_recovery_and_a_notice() -> None:
    course = interrupted_run.Course(
        num_steps=1, interval_s=5.0, notice_s=30.0, num_scripts=1, num_interruptions=4, fraction=0.1
    )
    periods = interrupted_run.script(0, course, 100.0, 8.0)
    assert [period.notice_s for period in periods] == [0.0, 30.0, 0.0, 30.0]
    assert all(period.up_s - period.notice_s > 8.0 for period in periods)
    assert sum(period.up_s - period.notice_s - 8.0 for period in periods) < 100.0
    assert interrupted_run.script(1, course, 100.0, 8.0) != periods
    assert isinstance(periods[0], Presence)


def test_each_predicted_time_is_judged() -> None:
    samples = {
        interrupted_run.PREDICTED: [100.0, 114.0], interrupted_run.MEASURED: [100.0, 100.0],
        interrupted_run.SAME: [1.0, 1.0], interrupted_run.INTERRUPTIONS: [4.0, 4.0],
    }  # fmt: skip
    assert verdict(interrupted_run.CLAIM, samples).kind == "met"
    assert verdict(interrupted_run.CLAIM, {**samples, interrupted_run.MEASURED: [80.0, 100.0]}).kind == "short"
    assert "other weights" in verdict(interrupted_run.CLAIM, {**samples, interrupted_run.SAME: [1.0, 0.0]}).reason


def test_what_the_script_adds_to_both_times_does_not_thin_the_error_beside_the_target() -> None:
    samples = {
        interrupted_run.PREDICTED: [178.0, 172.0], interrupted_run.MEASURED: [168.0, 168.0],
        interrupted_run.SAME: [1.0, 1.0], interrupted_run.INTERRUPTIONS: [4.0, 4.0],
    }  # fmt: skip
    assert "without notices" not in verdict(interrupted_run.CLAIM, samples).reason
    fixed = interrupted_run.fixed_s([Presence(50.0, 2.0), Presence(50.0, 2.0, 30.0)] * 2)
    assert fixed == 68.0
    found = verdict(interrupted_run.CLAIM, {**samples, interrupted_run.FIXED: [fixed, fixed]})
    assert found.kind == "met"
    assert found.figures["largest error of the predicted wall time"].value == pytest.approx(100 * 10 / 168)
    assert found.figures["largest error without notices and absences"].value == pytest.approx(10.0)
    assert "+10.0%, +4.0% without the notices and absences that both times contain" in found.reason
    worse = {**samples, interrupted_run.PREDICTED: [188.0, 172.0], interrupted_run.FIXED: [fixed, fixed]}
    found = verdict(interrupted_run.CLAIM, worse)
    assert found.figures["largest error without notices and absences"].value == pytest.approx(20.0)
    assert found.kind == "met", "the target is about the whole time"


def test_an_update_that_is_not_promoted_is_short() -> None:
    conditions = {"ended": "refused"}
    samples = {update_time.FAILED: [0.0], update_time.ENDED: [1.0], update_time.HANDSOFF: [600.0, 610.0]}
    samples |= {f"change of {update_time.OLD}": [0.1, -0.4, 0.6], f"change of {update_time.NEW}": [-20.0, -22.0, -18.0]}
    samples |= {f"bits per byte, {name}": [2.0, 2.0, 2.0] for name in update_time.CHANGES}
    met = verdict(update_time.CLAIM, samples, conditions)
    assert met.kind == "met", met.reason
    assert met.figures["shorter than a week"].value == pytest.approx(7 * 24 * 6, rel=0.01)
    assert "whole demonstration" not in met.figures
    timed = verdict(update_time.CLAIM, {**samples, update_time.WHOLE: [780.0]}, conditions)
    assert timed.figures["whole demonstration"].value == pytest.approx(13.0)
    assert verdict(update_time.CLAIM, {**samples, update_time.ENDED: [0.0]}, conditions).kind == "short"
    worse = {**samples, f"change of {update_time.OLD}": [1.5, 1.0, 2.5]}
    assert "change of old texts" in verdict(update_time.CLAIM, worse, conditions).reason


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
