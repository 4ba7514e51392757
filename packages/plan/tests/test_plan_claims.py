"""The claims about cost and about interrupted runs: their rules, and what they measure with."""

import pytest

from claim_verdicts import verdict
from modelwright_claims import serving_qps
from modelwright_claims.claim import Claim, Measurement, Samples, Verdict
from modelwright_claims.judging import Judgment, judge
from modelwright_claims.serving_qps import FP32, INT8, NAIVE, RATE, USUAL
from modelwright_claims.statistics import estimate
from modelwright_plan.claims import interrupted_run, planned_cost
from modelwright_plan.claims.interrupted_run import Presence
from modelwright_plan.cost.prices import shipped_prices


def test_a_factor_of_two_halves_the_cost_of_training() -> None:
    assumed = {**planned_cost.ASSUMED, planned_cost.TRAINING_FACTOR: 2.0, planned_cost.SERVING_FACTOR: 1.0}
    found = planned_cost.saved(assumed, shipped_prices())
    assert found["training"] == pytest.approx(50)
    assert found["inference"] == 0
    assert shipped_prices().price("compute", "aws", "us-east-1", planned_cost.INSTANCE, "on_demand").usd == "0.1785"
    assert found["training on spot instances too"] > 50
    bars = planned_cost.swings(assumed, shipped_prices(), "training")
    assert next(iter(bars)) == "measured factor of training"
    assert bars["measured factor of training"] == pytest.approx((100 / 3, 60), rel=1e-4)


def test_a_factor_comes_from_a_full_record_of_this_machine_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(samples: Samples, conditions: object) -> Verdict:
        judgment = Judgment()
        judgment.note("speed", lambda: estimate(samples["speed"]), "x")
        return judgment.verdict()

    texts = dict.fromkeys(("statement", "source", "published", "compared", "target"), "")
    claim = Claim(name="x", **texts, measure=lambda setting: Measurement(), judge=rule)  # type: ignore[arg-type]
    gain = planned_cost.Gain(claim=claim, figure="speed")
    monkeypatch.setattr(planned_cost, "machine", lambda: {"processor": "p", "cores": 2, "instruction_set": "AVX2"})

    def record(value: float, *, cores: int = 2, date: str = "2026-01-01", quick: bool = False) -> dict:
        described = {"processor": "p", "cores": cores, "instruction_set": "AVX2"}
        return {
            "name": "x",
            "quick": quick,
            "date": date,
            "commit": "abc",
            "machine": described,
            "samples": {"speed": [value - 0.1, value + 0.1]},
            "conditions": {},
            "figures": {"speed": {"value": 99.0}},  # of the rule of its time
        }

    others = [record(9.0, cores=8, date="2026-02-02"), record(7.0, quick=True)]
    own = planned_cost.find_factor(gain, [*others, record(2.0)])
    assert own is not None
    assert own.value == pytest.approx(2.0)
    assert own.lower == pytest.approx(2.0 - 6.314 * 0.1, abs=1e-3)
    other = planned_cost.find_factor(gain, others)
    assert other is not None
    assert other.value == pytest.approx(9.0)
    assert planned_cost.find_factor(gain, others[1:]) is None


def test_factors_are_figures_of_the_present_claims() -> None:
    rates = {f"{RATE}{side}{USUAL}": [rate, rate] for side, rate in ((NAIVE, 10.0), (FP32, 100.0), (INT8, 170.0))}
    found = judge(serving_qps.CLAIM, Measurement(samples=rates))
    assert found.figures[planned_cost.SERVING_GAIN.figure].value == pytest.approx(1.7)


def test_savings_are_judged_at_the_lower_bound_of_the_factors() -> None:
    conditions = {
        "training is faster by": f"4x: {planned_cost.TRAINING_GAIN.figure} (record)",
        "inference is faster by": f"2.5x: {planned_cost.SERVING_GAIN.figure} (record)", "instance": "i", "assumed": "a",
    }  # fmt: skip
    names = [planned_cost.SAVED + part for part in planned_cost.PARTS]
    good = dict(zip(names, ([75.0, 70.0, 80.0], [60.0, 55.0, 65.0], [90.0, 88.0, 92.0]), strict=True))
    assert verdict(planned_cost.CLAIM, good, conditions).kind == "met"
    short = verdict(planned_cost.CLAIM, {**good, names[0]: [75.0, 60.0, 90.0]}, conditions)
    assert short.kind == "short"
    shown = short.figures["cost saved, training"]
    assert (shown.lower, shown.upper) == (60.0, 90.0)
    dropped = conditions | {
        "training is faster by": "4x: one host: faster, everything (against PyTorch's own products)"
    }
    assert verdict(planned_cost.CLAIM, good, dropped).kind == "not judged", "a baseline that the ledger has dropped"


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
        interrupted_run.PREDICTED: [112.0, 114.0], interrupted_run.MEASURED: [101.0, 102.0],
        interrupted_run.SAME: [1.0, 1.0], interrupted_run.INTERRUPTIONS: [4.0, 4.0],
    }  # fmt: skip
    assert verdict(interrupted_run.CLAIM, samples).kind == "met"
    alone = {name: values[:1] for name, values in samples.items()}
    assert verdict(interrupted_run.CLAIM, alone).kind == "not judged", "one run gives no bound"
    assert verdict(interrupted_run.CLAIM, {**samples, interrupted_run.MEASURED: [80.0, 100.0]}).kind == "short"
    assert "other weights" in verdict(interrupted_run.CLAIM, {**samples, interrupted_run.SAME: [1.0, 0.0]}).reason


def test_what_the_script_adds_to_both_times_does_not_thin_the_error_beside_the_target() -> None:
    samples = {
        interrupted_run.PREDICTED: [178.0, 176.0], interrupted_run.MEASURED: [168.0, 168.0],
        interrupted_run.SAME: [1.0, 1.0], interrupted_run.INTERRUPTIONS: [4.0, 4.0],
    }  # fmt: skip
    assert "without notices" not in verdict(interrupted_run.CLAIM, samples).reason
    fixed = interrupted_run.fixed_s([Presence(50.0, 2.0), Presence(50.0, 2.0, 30.0)] * 2)
    assert fixed == 68.0
    found = verdict(interrupted_run.CLAIM, {**samples, interrupted_run.FIXED: [fixed, fixed]})
    assert found.kind == "met"
    assert found.figures["largest error of the predicted wall time"].value == pytest.approx(100 * 10 / 168)
    assert found.figures["largest error without notices and absences"].value == pytest.approx(10.0)
    assert "+10.0%, +8.0% without the notices and absences that both times contain" in found.reason
    worse = {**samples, interrupted_run.PREDICTED: [188.0, 187.0], interrupted_run.FIXED: [fixed, fixed]}
    found = verdict(interrupted_run.CLAIM, worse)
    assert found.figures["largest error without notices and absences"].value == pytest.approx(20.0)
    assert found.kind == "met", "the target is about the whole time"
