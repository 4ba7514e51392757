"""Claims on stable training: their verdicts, the target of a comparison, and the losses of a loss scale."""

from dataclasses import replace

import pytest

from modelwright.core.progress import SilentProgress
from modelwright_claims import (
    adaptive_clipping,
    dynamic_decay,
    larger_batches,
    loss_scaling,
    scale_to_a_loss,
    workbench,
)
from modelwright_claims import stability_bench as bench
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.experiment import Samples
from modelwright_claims.judging import judge
from modelwright_claims.loss_scaling import GRADIENT_LOST as LOST
from modelwright_claims.loss_scaling import SKIPPED, STABLE, execute_noting_losses, variant
from modelwright_claims.training_run import Outcome, Run

SIZE = workbench.Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=8, num_steps=20)
LONG = replace(SIZE, num_steps=500)


@pytest.fixture
def setting(text_folder) -> Setting:
    return Setting(quick=False, folder=text_folder, progress=SilentProgress())


def outcome(*curve: tuple[int, float]) -> Outcome:
    return Outcome(heldout_loss=curve[-1][1], seconds=1.0, curve=list(curve))


def test_the_target_is_what_the_plain_variant_reaches_at_three_quarters():
    assert bench.target_of(outcome((10, 4.0), (50, 3.0), (70, 3.2), (75, 3.1), (80, 2.0)), 100) == 3.0


def test_the_target_is_fixed_on_another_seed_and_the_reported_split(setting, monkeypatch):
    """The plain variant reaches 5 - seed / 10000 after half of its steps; it is the same at every rate."""
    made: list[Run] = []

    def all_runs(self, runs, *, at_once=1):
        made.extend(runs)
        off = [abs(run.size.learning_rate - 1e-3) for run in runs]
        return [
            outcome((10, 6.0), (50, 5 - run.seed / 10_000), (100, 2.0 + one))
            for run, one in zip(runs, off, strict=True)
        ]

    monkeypatch.setattr(bench.Runner, "all", all_runs)
    size = replace(SIZE, num_steps=100)
    variants = {name: bench.variant(size, {}) for name in ("plain", "other")}
    found = bench.steps_to_a_loss(setting, variants, plain="plain")
    assert found.target == 5 - bench.TUNING_SEED / 10_000
    assert made[-1] == replace(found.samples.tuned["plain"], seed=bench.TUNING_SEED)
    assert made[-1].heldout == "test"
    assert found.samples.tuned["plain"].size.learning_rate == 1e-3


def comparison(plain: list[float], main: list[float], rival: list[float] | None = None) -> bench.Comparison:
    """Runs that reach the target at these steps; 0 never. rival: a lower fixed limit, like the plain one without it."""

    def run(step: float) -> Outcome:
        return outcome((1, 9.0), (int(step), 2.0), (500, 2.0)) if step else outcome((1, 9.0), (500, 8.0))

    runs = {"fixed at 1.0": plain, "fixed at 0.3": rival or plain, adaptive_clipping.STUDY.main: main}
    runs |= {arm: plain for arm in adaptive_clipping.STUDY.arms if arm not in runs}
    samples = Samples(
        runs={arm: [run(step) for step in of] for arm, of in runs.items()},
        tuning={arm: {1e-3: 2.0} for arm in runs},
        tuned=dict.fromkeys(runs, Run(size=LONG)),
    )
    return bench.Comparison(target=2.0, samples=samples)


def judged(calm: bench.Comparison, wild: bench.Comparison) -> Verdict:
    found = {"calm": calm, "wild batches": wild}
    return judge(adaptive_clipping.CLAIM, bench.measurement(LONG, adaptive_clipping.STUDY, found))


PLAIN, FASTER = [300.0, 320.0, 280.0], [200.0, 221.0, 180.0]


def test_a_gain_must_be_there_among_wild_batches_and_no_loss_in_calm():
    same, slower = [300.0, 319.0, 279.0], [400.0, 421.0, 380.0]
    assert judged(comparison(PLAIN, PLAIN), comparison(PLAIN, FASTER)).kind == "met"
    assert judged(comparison(PLAIN, PLAIN), comparison(PLAIN, same)).kind == "short"
    assert judged(comparison(PLAIN, slower), comparison(PLAIN, FASTER)).kind == "short"
    assert judged(comparison(PLAIN, PLAIN), comparison(PLAIN, FASTER, rival=FASTER)).kind == "short"
    assert judged(comparison(PLAIN, PLAIN), comparison([300.0, 0.0, 280.0], PLAIN)).kind == "short"


def test_no_loss_in_calm_means_that_the_upper_bound_is_none():
    uneven = judged(comparison(PLAIN, [290.0, 331.0, 270.0]), comparison(PLAIN, FASTER))
    assert uneven.figures["fewer steps, calm"].value > 1.0
    assert uneven.kind == "short"
    assert "calm: steps more than fixed at 1.0" in uneven.reason


def test_what_never_gets_there_is_counted_and_named():
    never, there = [0.0] * 3, [250.0] * 3
    result = judged(comparison([300.0] * 3, [300.0] * 3), comparison(never, there))
    assert result.kind == "met"
    assert "wild batches: runs that never reached the loss: fixed at 1.0 3," in result.reason
    assert "250 steps against 500 of fixed at 1.0 (2.00x, p = 0)" in result.reason


def test_a_rival_that_was_never_measured_is_lacking():
    measurement = bench.measurement(
        LONG, adaptive_clipping.STUDY, {"calm": comparison(PLAIN, PLAIN), "wild batches": comparison(PLAIN, FASTER)}
    )
    samples = {name: of for name, of in measurement.samples.items() if "fixed at 0.3" not in name}
    lacking = judge(adaptive_clipping.CLAIM, replace(measurement, samples=samples))
    assert lacking.line.startswith("not judged: the record lacks samples 'steps, fixed at 0.3, wild batches'")


def test_every_arm_is_a_configuration():
    for study in (adaptive_clipping.STUDY, dynamic_decay.STUDY):
        configs = [bench.variant(SIZE, arm).train_config() for arm in study.arms.values()]
        assert study.main in study.arms
        assert study.main != study.plain
        assert set(study.rivals) <= set(study.arms) - {study.main, study.plain}
        assert len({str(config) for config in configs}) == len(configs)


def stability(setting: Setting, arm: str, num_steps: int) -> dict[str, float]:
    run = replace(variant(replace(SIZE, num_steps=num_steps), loss_scaling.ARMS[arm]), seed=1)
    return loss_scaling.stability(execute_noting_losses(setting, run))


def test_underflow_is_seen_without_a_scale_and_not_with_one(setting):
    """Each gradient is a share of the whole batch, which FP16 may not have; 2^32 is too large at once."""
    arms = (loss_scaling.NONE, "static 2^15", loss_scaling.STATIC, loss_scaling.FP32)
    found = {arm: stability(setting, arm, num_steps=5) for arm in arms}
    assert found[loss_scaling.FP32][LOST] == 0.0
    assert found[loss_scaling.NONE][LOST] > found["static 2^15"][LOST]
    assert found[loss_scaling.STATIC][SKIPPED] == 5
    assert found[loss_scaling.STATIC][STABLE] == 0


def scaled(*, dynamic: int = 95, none: int = 20, fitting: int = 20, lost: float = 0.5) -> Measurement:
    runs = dict.fromkeys(loss_scaling.ARMS, (95, 0.0)) | {
        loss_scaling.DYNAMIC: (dynamic, 0.0), loss_scaling.NONE: (none, lost),
        loss_scaling.FITS[0]: (fitting, 0.0), loss_scaling.STATIC: (-1, 1.0),
    }  # fmt: skip
    samples: dict[str, list[float]] = {}
    for arm, (stable, share) in runs.items():
        samples |= {STABLE + arm: [float(stable + more) for more in (0, 1, 0)], SKIPPED + arm: [5.0] * 3}
        samples |= {LOST + arm: [share] * 3, loss_scaling.LOSS + arm: [4.0] * 3}
    return Measurement(samples=samples, conditions={"steps": 20})


def test_a_dynamic_scale_has_to_beat_no_scale_and_every_static_one():
    assert judge(loss_scaling.CLAIM, scaled()).kind == "met"
    for worse in (scaled(none=50), scaled(lost=0.1), scaled(dynamic=60)):
        assert judge(loss_scaling.CLAIM, worse).kind == "short", worse
    beaten = judge(loss_scaling.CLAIM, scaled(fitting=95))
    assert beaten.kind == "short"
    assert beaten.reason.startswith("stable updates over static 2^15 1x")
    assert beaten.figures["stable updates, dynamic over static 2^32"].value > loss_scaling.TARGET


def test_what_was_lost_of_the_gradient_has_to_be_in_the_record():
    measurement = scaled()
    samples = {name: of for name, of in measurement.samples.items() if not name.startswith("gradient lost")}
    lacking = judge(loss_scaling.CLAIM, replace(measurement, samples=samples))
    assert lacking.line.startswith("not judged: the record lacks samples 'gradient lost, ")


def test_an_update_that_is_skipped_keeps_nothing_of_its_gradient(setting):
    found = stability(setting, loss_scaling.DYNAMIC, num_steps=15)
    assert 0 < found[SKIPPED] < 15
    assert found[LOST] >= found[SKIPPED] / 15
    assert found[STABLE] <= 15 - found[SKIPPED]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("claim", "main"), [(larger_batches, larger_batches.LARGE), (scale_to_a_loss, "dynamic from 2^15")]
)
def test_paces_are_measured_and_judged_at_toy_size(setting, monkeypatch, claim, main):
    toy = replace(SIZE, num_steps=10)
    monkeypatch.setattr(bench, "study_size", lambda setting: toy)
    monkeypatch.setattr(loss_scaling, "study_size", lambda setting: replace(toy, num_steps=3))
    monkeypatch.setattr(larger_batches, "ROWS", 4)
    measured = claim.measure(replace(setting, quick=True))
    arms = [name.removeprefix(f"time {bench.FIXED}") for name in measured.samples if name.startswith("time")]
    assert main in arms
    for arm in arms:
        steps, tokens, times = (measured.samples[f"{what} {bench.FIXED}{arm}"] for what in ("steps", "tokens", "time"))
        rows = 16 if arm == larger_batches.LARGE else 4 if arm == larger_batches.SMALL else 8
        assert len(steps) == len(times) == 2
        assert tokens == pytest.approx([count * rows * toy.seq_len for count in steps])
        assert all(0 < count <= measured.conditions[f"most steps, {arm}"] for count in steps)
        assert all(time > 0 for time in times)
    found = judge(claim.CLAIM, measured)
    assert set(claim.CLAIM.headline) <= set(found.figures)
    assert f"s, {main}; " in found.reason


def paced(**changes: list[float]) -> Measurement:
    """Paces of the claim about scales: the static ones take 100 s and 100 steps, the dynamic one 70."""
    samples: dict[str, list[float]] = {}
    for arm in (scale_to_a_loss.DYNAMIC, *scale_to_a_loss.STATIC):
        needed = [70.0, 71.0, 69.0] if arm == scale_to_a_loss.DYNAMIC else [100.0, 101.0, 99.0]
        needed = changes.get(arm.replace(" ", "_").replace("^", "_"), needed)
        samples |= {f"{what} {bench.FIXED}{arm}": needed for what in ("steps", "tokens", "time")}
        samples |= {f"rates, {arm}": [1e-3, 2e-3], f"tuning, {arm}": [5.0, 4.0]}
    conditions = {f"most steps, {scale_to_a_loss.DYNAMIC}": 200, bench.TARGET: 4.0}
    return Measurement(samples=samples, conditions=conditions)


def test_a_pace_has_to_beat_every_rival_and_to_reach_the_loss():
    claim = scale_to_a_loss.CLAIM
    met = judge(claim, paced())
    assert met.kind == "met"
    assert met.figures["less time than static 2^10"].value == pytest.approx(1.43, abs=0.01)
    assert met.figures["best rate, static 2^20"].value == 2e-3
    beaten = judge(claim, paced(static_2_20=[80.0, 81.0, 79.0]))
    assert beaten.reason.startswith("less time than static 2^20 1.14x (lower bound 1.14x), not at least 1.22x")
    never = judge(claim, replace(paced(), conditions={**paced().conditions, "most steps, dynamic from 2^15": 70}))
    assert never.reason.startswith("2 runs of dynamic from 2^15 never reached the loss")
    lacking = {name: of for name, of in paced().samples.items() if name != f"time {bench.FIXED}static 2^10"}
    assert judge(claim, replace(paced(), samples=lacking)).kind == "not judged"
