"""The sparse claim: its verdict from given losses, the plan of its runs, and two tiny ones."""

from dataclasses import replace

import pytest

from modelwright.core.progress import SilentProgress
from modelwright_claims import sparse_updates as arms
from modelwright_claims import sparse_updates as claim
from modelwright_claims.batches import Mixture
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.experiment import Runner
from modelwright_claims.judging import judge
from modelwright_claims.training_run import Outcome, Run
from modelwright_claims.workbench import KINDS, Size

SIZE = Size(model_dim=64, num_layers=2, seq_len=32, batch_rows=4, num_steps=6)


def found(loss: float, flops: float) -> Outcome:
    return Outcome(
        heldout_loss=loss, seconds=1.0, losses={"prose": loss, "code": loss}, steps={"executed_flops": [flops]}
    )


def outcome(
    method: float,
    flops: float,
    *,
    baseline: float = 2.2,
    filtered: float = 2.1,
    regime: str = arms.UPDATE,
    uneven: float = 0.0,
) -> arms.Comparison:
    """filtered: loss of the rivals behind the same filter; uneven: of the method's losses between the seeds."""
    losses = {arms.DENSE: 2.0, arms.METHOD: method, arms.CLEANED: 1.9}
    losses |= dict.fromkeys(arms.BEHIND_THE_FILTER, filtered)
    losses |= dict.fromkeys(arms.BASELINES, baseline)
    costs = {arms.DENSE: 1.0, arms.METHOD: flops}
    final = {
        name: [
            found(loss + noise + sign * uneven * (name == arms.METHOD), costs.get(name, 0.4))
            for noise, sign in ((0.0, -1), (0.01, 0), (0.02, 1))
        ]
        for name, loss in losses.items()
    }
    return arms.Comparison(regime=regime, rates=dict.fromkeys(losses, 1e-3), final=final)


def measurement(given: arms.Comparison, time: float = 0.5, **others: arms.Comparison) -> Measurement:
    times = ([0.1 * time] * 3, [0.1] * 3)
    outcomes = {one.regime: one for one in (given, *others.values())}
    return claim.measurement(outcomes, times, base=found(2.1, 1.0), size=SIZE, before=SIZE)


def judged(given: arms.Comparison, time: float = 0.5, **others: arms.Comparison) -> Verdict:
    return judge(claim.CLAIM, measurement(given, time, **others))


def test_met_needs_flops_time_loss_and_every_baseline():
    met = judged(outcome(2.005, 0.39))
    assert met.kind == "met"
    assert met.figures["held-out loss above dense"].value == pytest.approx(0.25, abs=0.01)
    assert met.figures["executed FLOPs, method to dense"].value == pytest.approx(0.39)
    assert met.figures["loss of the code before the update"].value == 2.1
    assert "a perfect cleaner before dense training would leave -4.98%" in met.reason
    assert judged(outcome(2.005, 0.41)).kind == "short"
    assert judged(outcome(2.005, 0.39), time=0.61).kind == "short"
    assert judged(outcome(2.02, 0.39)).kind == "short"
    beaten = judged(outcome(2.005, 0.39, baseline=2.004))
    assert beaten.kind == "short"
    assert "new text: difference to dense, fewer steps 0.001 nats" in beaten.reason
    noisy = outcome(2.005, 0.39)
    noisy.final["random rows"][:] = [found(loss, 0.4) for loss in (2.0, 2.03, 2.4)]  # type: ignore[index]
    assert "not different from random rows with p < 0.05" in judged(noisy).reason


def test_the_upper_bound_of_the_loss_has_to_be_inside():
    assert judged(outcome(2.005, 0.39, uneven=0.001)).kind == "met"
    uneven = judged(outcome(2.005, 0.39, uneven=0.01))
    assert uneven.figures["held-out loss above dense"].value == pytest.approx(0.25, abs=0.01)
    assert uneven.kind == "short"


@pytest.mark.parametrize("rival", arms.BEHIND_THE_FILTER)
def test_dense_training_behind_the_same_filter_is_a_rival(rival):
    given = outcome(2.005, 0.39)
    given.final[rival][:] = [found(loss, 0.4) for loss in (2.0, 2.01, 2.02)]  # type: ignore[index]
    beaten = judged(given)
    assert beaten.kind == "short"
    assert f"both texts: difference to {rival} 0.005 nats" in beaten.reason


def test_both_texts_have_to_be_below_a_rival_too():
    given = outcome(2.005, 0.39)
    runs = [
        replace(run, losses={"prose": 1.5, "code": 2.2 + 0.01 * seed})
        for seed, run in enumerate(given.final[arms.DENSE])
    ]
    given.final["plain freezing"][:] = runs  # type: ignore[index]
    beaten = judged(given)
    assert "both texts: difference to plain freezing" in beaten.reason
    assert "new text" not in beaten.reason.split(". ")[0]


def test_flops_that_were_not_kept_are_lacking():
    found = measurement(outcome(2.005, 0.39))
    samples = {name: of for name, of in found.samples.items() if not name.startswith("executed FLOPs")}
    lacking = judge(claim.CLAIM, replace(found, samples=samples))
    assert lacking.line.startswith("not judged: the record lacks samples 'executed FLOPs, rows by change, continual")


def test_the_row_says_what_the_method_costs_in_a_clean_stream():
    reason = judged(outcome(1.99, 0.39), clean=outcome(2.02, 0.38, baseline=2.01, regime=arms.CLEAN)).reason
    expected = "clean continual update: +1.00% and +1.00% from dense (dense, as much time +0.50% and +0.50%)"
    assert expected in reason


def test_both_texts_count_in_the_proportion_of_the_useful_rows():
    one = Outcome(heldout_loss=2.0, seconds=1.0, losses={"prose": 2.0, "code": 3.0})
    assert arms.mixed_loss(one, arms.UPDATE) == pytest.approx(2.5)  # a quarter each, beside a half of garbage
    assert arms.mixed_loss(one, arms.CLEAN) == pytest.approx(2.2)


def test_sparse_runs_say_what_they_executed(text_folder):
    setting = Setting(quick=True, folder=text_folder, progress=SilentProgress())
    base = Run(size=SIZE, model=arms.UNTIED, evaluated=KINDS)
    half = {"batch_selection": {"signal": "random", "keep_fraction": 0.5}}
    runs = [replace(base, start_from=base, mixture=Mixture(code=0.25)), replace(base, start_from=base, settings=half)]
    whole, less = Runner(setting).all(runs)
    assert arms.executed_flops(less) == pytest.approx(arms.executed_flops(whole) / 2, rel=0.02)
    assert set(whole.losses) == {"prose", "code"}


@pytest.mark.parametrize("quick", [False, True])
def test_every_arm_runs_at_its_best_rate_and_baselines_at_equal_compute(tmp_path, monkeypatch, quick):
    """The plan of a whole measurement, with runs that only say their cost; the rate of 1e-3 is best."""
    made: list[Run] = []

    def cost(run: Run) -> float:
        per_step = (1.0 if not run.settings else 0.3) * run.size.batch_rows / arms.SIZE.batch_rows
        return run.size.num_steps * per_step * (0.5 if run.size.model_dim < arms.SIZE.model_dim else 1.0)

    def pretend(self, runs, *, at_once=1):
        made.extend(runs)
        return [pretended(run) for run in runs]

    def pretended(run: Run) -> Outcome:
        loss = 2.0 + abs(run.size.learning_rate - 1e-3)
        step_s = (0.62 if run.settings else 1.0) * run.size.batch_rows / arms.SIZE.batch_rows
        steps = {"executed_flops": [cost(run)], "step_time_s": [step_s] * 4}
        return Outcome(heldout_loss=loss, seconds=1.0, losses=dict.fromkeys(("prose", "code"), loss), steps=steps)

    monkeypatch.setattr(Runner, "all", pretend)
    monkeypatch.setattr(Runner, "timed", pretend)
    result = judge(claim.CLAIM, claim.measure(Setting(quick=quick, folder=tmp_path, progress=SilentProgress())))
    update = [run for run in made if run.start_from and run.mixture != Mixture(code=arms.SHARE_OF_CODE[arms.CLEAN])]
    final = [run for run in update if run.seed in arms.SEEDS]
    assert {run.size.learning_rate for run in final} == {1e-3}
    assert {run.heldout for run in made if run.seed == arms.TUNING_SEED} == {"validation"}
    runs = named(final)
    num_steps = {name: run.size.num_steps for name, run in runs.items()}
    most = num_steps[arms.DENSE]
    assert num_steps["dense, fewer steps"] == num_steps[arms.CLEANED] == round(0.4 * most)
    assert num_steps["dense, as much time"] == round(0.65 * most)
    assert num_steps["dense within the limit"] == num_steps["dense within the limit, as much time"] == most // 2
    rows = {name: run.size.batch_rows * run.size.num_steps for name, run in runs.items()}
    assert rows["dense within the limit"] == pytest.approx(rows[arms.DENSE], rel=0.1)  # what there is to read
    assert num_steps["smaller dense"] == round(0.8 * most)
    assert num_steps["random rows"] == num_steps[arms.METHOD] == most
    mixtures = {name: run.mixture for name, run in runs.items()}
    assert mixtures.pop(arms.CLEANED) == Mixture(code=0.5)
    assert set(mixtures.values()) == {Mixture(code=0.25, garbage=0.5)}
    begun = {name: run.start_from.size.model_dim for name, run in runs.items() if run.start_from}
    assert set(begun.values()) == {arms.SIZE.model_dim, arms.SMALLER["model_dim"]}
    assert begun["smaller dense"] == runs["smaller dense"].size.model_dim
    assert result.kind == "short"
    assert result.figures["time of a step, method to dense"].value == pytest.approx(0.62)
    timed = [run for run in made if run.seed >= arms.FIRST_TIMED_SEED]
    assert [bool(run.settings) for run in timed] == [True, False, True] * arms.NUM_ROUNDS


def named(runs: list[Run]) -> dict[str, Run]:
    """The runs of the first seed by arm: they are made in the order of the arms."""
    first = runs[: len(arms.ARMS[arms.UPDATE])]
    return dict(zip(arms.ARMS[arms.UPDATE], first, strict=True))
