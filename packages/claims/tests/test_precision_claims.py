"""Verdicts of the claims on number formats, and that their arms match their names."""

from dataclasses import dataclass, replace

import pytest

from modelwright.core.config import parse
from modelwright.core.progress import SilentProgress
from modelwright.train.monitors import energy as monitors_energy
from modelwright.train.precision.policy import PrecisionConfig
from modelwright_claims import adaptive_precision, bf16_mixed, energy, large_runs, precision_policies
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.experiment import Experiment, Samples
from modelwright_claims.judging import judge
from modelwright_claims.large_runs import BY_ONEDNN, FP32, NO_ONEDNN
from modelwright_claims.training_run import Outcome, Run, execute
from modelwright_claims.workbench import Size

SIZE = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=10)
PRODUCTS = {"fp32": 1.0, "bf16": 2.5, "fp16": 0.1, "fp8": 0.1, "int8": 4.0}


NO_RIVAL = {NO_ONEDNN: "none here"}


def test_every_format_has_a_speed(tmp_path):
    found = precision_policies.product_speeds(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    assert set(found) == set(precision_policies.FORMATS)
    assert found["fp32"] == 1.0
    assert all(ratio > 0 for ratio in found.values())


def test_arms_are_configurations():
    for arms in (precision_policies.ARMS, adaptive_precision.ARMS):
        found = [parse(PrecisionConfig, arm, constants=True) for arm in arms.values()]
        assert len(set(found)) == len(arms)
    assert set(precision_policies.EIGHT_BITS) < set(precision_policies.ARMS)


def samples(paces: dict[str, float], losses: dict[str, float], peaks: dict[str, float], uneven: float = 0.0):
    """Three seeds of every arm, FP32's all alike. uneven: share by which the others' values differ between them."""

    def three(name: str, value: float) -> list[float]:
        return [value * (1 + sign * uneven * (name != FP32)) for sign in (-1, 0, 1)]

    return precision_policies.samples_beside_fp32(
        paces={name: three(name, of) for name, of in paces.items()},
        losses={name: [of] * 3 for name, of in losses.items()},
        peaks={name: [of] * 2 for name, of in peaks.items()},
        products=PRODUCTS,  # type: ignore[arg-type]
    )


def policies(
    *, loss: float = 4.01, speed: float = 240.0, peak: float = 50.0, int8: float = 4.07, uneven: float = 0.0
) -> Measurement:
    paces = {FP32: 100.0, "bf16_mixed": speed, "int8": 10.0}
    losses = {FP32: 4.0, "bf16_mixed": loss, "int8": int8}
    peaks = {FP32: 100.0, "bf16_mixed": peak, "int8": 90.0}
    return Measurement(samples=samples(paces, losses, peaks, uneven), conditions=NO_RIVAL)


def test_a_16_bit_policy_has_to_reach_all_three_and_none_may_cost_too_much():
    def judged(**values: float) -> Verdict:
        return judge(precision_policies.CLAIM, policies(**values))

    met = judged()
    assert met.kind == "met"
    assert met.figures["speed over FP32, bf16_mixed"].value == pytest.approx(2.4)
    assert met.figures["held-out loss above FP32, int8"].value == pytest.approx(1.75)
    assert "bf16 2.50x" in met.reason
    for worse in ({"loss": 4.013}, {"speed": 220.0}, {"peak": 61.0}, {"uneven": 0.05}):
        assert judged(**worse).kind == "short", worse
    too_far = judged(int8=4.09)
    assert too_far.reason.startswith("held-out loss of int8 above FP32 2.25%")


def test_the_policy_that_reaches_all_three_need_not_be_the_fastest():
    paces = {FP32: 100.0, "bf16_mixed": 240.0, "pure_fp16": 250.0}
    peaks = {FP32: 100.0, "bf16_mixed": 50.0, "pure_fp16": 80.0}
    found = Measurement(samples=samples(paces, dict.fromkeys(paces, 4.0), peaks), conditions=NO_RIVAL)
    both = judge(precision_policies.CLAIM, found)
    assert both.kind == "met"
    assert "reaches all three is bf16_mixed" in both.reason


@pytest.mark.parametrize("claim", [precision_policies.CLAIM, bf16_mixed.CLAIM], ids=lambda claim: claim.name)
def test_the_faster_exact_fp32_is_the_baseline_and_has_to_be_measured(claim):
    paces = {FP32: 100.0, BY_ONEDNN: 200.0, "bf16_mixed": 240.0}
    found = samples(paces, dict.fromkeys(paces, 4.0), dict.fromkeys(paces, 100.0) | {"bf16_mixed": 50.0})
    found |= {name.replace("bf16_mixed", "bf16"): of for name, of in found.items()}
    short = judge(claim, Measurement(samples=found))
    assert short.kind == "short"
    assert "fp32 by oneDNN 1.2x" in short.reason or "over the faster FP32 1.2x" in short.reason
    without = {name: of for name, of in found.items() if BY_ONEDNN not in name}
    lacking = judge(claim, Measurement(samples=without))
    assert lacking.line.startswith("not judged: the record lacks samples 'tokens per second, fp32 by oneDNN'")
    assert judge(claim, Measurement(samples=without, conditions=NO_RIVAL)).kind == "met"


def controllers(*, speed: float = 390.0, loss: float = 4.01, peak: float = 55.0, onednn: float = 0.0) -> Measurement:
    paces = {FP32: 100.0, "all INT8": 380.0, "rules": speed} | ({BY_ONEDNN: onednn} if onednn else {})
    losses = dict.fromkeys(paces, 4.0) | {"all INT8": 4.05, "rules": loss}
    peaks = dict.fromkeys(paces, 100.0) | {"all INT8": 50.0, "rules": peak}
    return Measurement(samples=samples(paces, losses, peaks), conditions={} if onednn else NO_RIVAL)


def test_a_controller_has_to_beat_the_trivial_policies():
    def judged(**values: float) -> Verdict:
        return judge(adaptive_precision.CLAIM, controllers(**values))

    met = judged()
    assert met.kind == "met"
    for worse in ({"speed": 370.0}, {"loss": 4.03}, {"peak": 61.0}, {"onednn": 140.0}):
        assert judged(**worse).kind == "short", worse
    assert "all INT8 at 3.80x" in met.reason
    assert all(name.endswith(", rules") for name in list(met.figures)[:3])
    assert "at most 4.00x as fast" in met.reason
    assert "oneDNN" not in met.reason
    beside = judged(onednn=125.0)
    assert beside.kind == "met"
    assert "rules: 3.90x FP32, 3.12x FP32 by oneDNN," in beside.reason


def test_the_formats_that_a_controller_ends_in_are_samples():
    changed = dict.fromkeys(("blocks.0.ffn", "blocks.0.attention"), "int8") | {"blocks.1.ffn": "fp32"}
    runs = {name: [Outcome(heldout_loss=4.0, seconds=1.0)] * 2 for name in (FP32, "rules")}
    runs["rules"] = [replace(runs["rules"][0], formats=changed)] * 2
    alike = {name: [100.0, 100.0] for name in runs}
    size = replace(SIZE, num_layers=2)
    found = adaptive_precision.measurement(alike, runs, alike, PRODUCTS, size, size)  # type: ignore[arg-type]
    assert found.samples["parts in int8 at the end, rules"] == [50.0, 50.0]
    figures = judge(adaptive_precision.CLAIM, found).figures
    assert figures["parts in int8 at the end, rules"].value == 50.0
    assert figures["parts in bf16 at the end, rules"].value == 25.0


@pytest.mark.parametrize("fastest", ["int8", "fp32"])
def test_losses_are_those_of_the_formats_that_controllers_choose_at_the_large_models_shapes(text_folder, fastest):
    setting = Setting(quick=True, folder=text_folder, progress=SilentProgress())
    seconds = {"fp32": 8.0, "bf16": 8.0, "int8": 8.0, fastest: 1.0}
    speeds = {name: seconds.get(name.split("/")[-1], 0.1) for name in adaptive_precision.speeds_at_large(setting)}
    adaptive = {"kind": "rules", "decide_every_steps": 4, "measure_steps": 1, "tolerance": 1.0}
    precision = adaptive_precision.ARMS["rules"] | {"adaptive": adaptive}
    size = Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=2, num_steps=6)
    made = execute(setting, Run(size=size, settings={"precision": precision}, speeds=speeds))
    assert made.formats == {"blocks.0.attention": fastest, "blocks.0.ffn": fastest}


def test_paces_are_by_seed_and_count_all_steps_from_the_first_on(tmp_path, monkeypatch):
    setting = Setting(quick=True, folder=tmp_path, progress=SilentProgress())
    made: list[Experiment] = []

    def run_experiment(setting: Setting, experiment: Experiment) -> Samples:
        made.append(experiment)
        steps = {"num_tokens": [5.0, 10.0, 20.0], "step_time_s": [9.0, 1.0, 3.0]}
        outcomes = [Outcome(heldout_loss=1.0, seconds=1.0, steps=steps) for _ in experiment.seeds]
        return Samples(runs=dict.fromkeys(experiment.variants, outcomes), tuning={}, tuned=experiment.variants)

    monkeypatch.setattr(large_runs, "run_experiment", run_experiment)
    arms = {
        "a": large_runs.Paced(precision=PrecisionConfig(policy="fp32"), first=1, end=3),
        "b": large_runs.Paced(precision=PrecisionConfig(policy="bf16_mixed"), first=0, end=4),
    }
    assert large_runs.paces(setting, arms, range(2)) == {"a": [7.5, 7.5], "b": [35 / 13] * 2}
    assert made[0].timed
    configs = {name: run.train_config() for name, run in made[0].variants.items()}
    assert {name: (one.precision.policy, one.num_steps) for name, one in configs.items()} == {
        "a": ("fp32", 3),
        "b": ("bf16_mixed", 4),
    }


@dataclass
class Meter:
    """Counts a joule at each reading, of which training makes one a step."""

    name: str = "rapl"
    readings: int = 0

    def joules(self) -> float:
        self.readings += 1
        return float(self.readings)


def test_energy_is_that_of_the_stage_s_meters(tmp_path, monkeypatch):
    assert judge(energy.CLAIM, energy.untestable(energy.NO_METER)).kind == "cannot be tested here"
    monkeypatch.setattr(monitors_energy, "rapl_meters", lambda: [Meter()])
    found = energy.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    assert {name for name in found.samples if name.startswith(energy.JOULES)} >= {energy.JOULES + FP32}
    tokens = large_runs.large_size(Setting(quick=True, folder=tmp_path, progress=SilentProgress())).batch_tokens
    for name, of in found.samples.items():
        assert not name.startswith(energy.JOULES) or of == pytest.approx([1 / tokens] * 2, rel=0.05)  # padded
    assert len({len(of) for of in found.samples.values()}) == 1


@pytest.mark.parametrize(("joules", "kind"), [(1.1, "met"), (1.3, "short")])
def test_energy_is_compared_with_the_faster_fp32(joules, kind):
    given = {energy.BF16: (joules, 300.0), FP32: (4.0, 100.0), BY_ONEDNN: (2.0, 200.0)}
    found = {energy.JOULES + name: [of, of * 1.001] for name, (of, _) in given.items()}
    found |= {energy.PACE + name: [pace, pace] for name, (_, pace) in given.items()}
    assert judge(energy.CLAIM, Measurement(samples=found)).kind == kind
