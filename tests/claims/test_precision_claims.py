"""Verdicts of the claims on number formats, and that their arms are what they say."""

from dataclasses import replace

import pytest

from modelwright.core.config import parse
from modelwright.core.progress import SilentProgress
from modelwright.precision.policy import PrecisionConfig
from modelwright_claims import adaptive_precision, large_runs, precision_policies
from modelwright_claims.claim import Setting
from modelwright_claims.experiment import Experiment, Samples
from modelwright_claims.training_run import Outcome, Run, execute
from modelwright_claims.workbench import Size

SIZE = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=10)
PRODUCTS = {"fp32": 1.0, "bf16": 2.5, "fp16": 0.1, "fp8": 0.1, "int8": 4.0}


def runs(loss: float, speed: float) -> list[Outcome]:
    return [Outcome(heldout_loss=loss, seconds=4.0, steps={"num_tokens": [speed] * 4, "step_time_s": [1.0] * 4})]


def test_every_format_has_a_speed(tmp_path):
    found = precision_policies.product_speeds(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    assert set(found) == set(precision_policies.FORMATS)
    assert found["fp32"] == 1.0
    assert all(ratio > 0 for ratio in found.values())


def test_arms_are_configurations():
    for arms in (precision_policies.ARMS, adaptive_precision.ARMS):
        found = [parse(PrecisionConfig, arm) for arm in arms.values()]
        assert len(set(found)) == len(arms)
    assert set(precision_policies.EIGHT_BITS) < set(precision_policies.ARMS)


def test_a_16_bit_policy_has_to_reach_all_three_and_none_may_cost_too_much():
    def judged(loss=4.01, speed=240.0, peak=50, int8=4.07):
        arms = {"fp32": runs(4.0, 100.0), "bf16_mixed": runs(loss, speed), "int8": runs(int8, 10.0)}
        return precision_policies.judge(arms, {"fp32": 100, "bf16_mixed": peak, "int8": 90}, PRODUCTS, SIZE)

    met = judged()
    assert met.kind == "met"
    assert met.figures["speed over FP32, bf16_mixed"].value == pytest.approx(2.4)
    assert met.figures["held-out loss above FP32, int8"].value == pytest.approx(1.75)
    assert "bf16 2.50x" in met.reason
    for worse in ({"loss": 4.013}, {"speed": 220.0}, {"peak": 61}):
        assert judged(**worse).kind == "short"
    arms = {"fp32": runs(4.0, 100.0), "bf16_mixed": runs(4.0, 240.0), "pure_fp16": runs(4.0, 250.0)}
    both = precision_policies.judge(arms, {"fp32": 100, "bf16_mixed": 50, "pure_fp16": 80}, PRODUCTS, SIZE)
    assert both.kind == "met"  # the one that is not the fastest
    assert "reaches all three is bf16_mixed" in both.reason
    too_far = judged(int8=4.09)
    assert too_far.kind == "short"
    assert "Too far from FP32: int8" in too_far.reason


def losses(**of: float) -> dict[str, list[Outcome]]:
    return {name: runs(loss, 100.0) for name, loss in of.items()}


def test_a_controller_has_to_beat_the_trivial_policies():
    def judged(speed=390.0, loss=4.01, peak=55):
        paces = {"fp32": [100.0], "all INT8": [380.0], "rules": [speed]}
        made = losses(**{"fp32": 4.0, "all INT8": 4.05, "rules": loss})
        peaks = {"fp32": 100, "all INT8": 50, "rules": peak}
        return adaptive_precision.judge(paces, made, peaks, PRODUCTS, SIZE, SIZE)

    assert judged().kind == "met"
    for worse in ({"speed": 370.0}, {"loss": 4.03}, {"peak": 61}):
        assert judged(**worse).kind == "short"
    assert "all INT8 at 3.80x" in judged().reason
    assert all(name.endswith(", rules") for name in list(judged().figures)[:3])
    assert "at most 4.00x as fast" in judged().reason
    assert "oneDNN" not in judged().reason


def test_a_controller_is_named_beside_the_fastest_fp32_and_with_the_formats_it_ends_in():
    paces = {"fp32": [100.0], adaptive_precision.BY_ONEDNN: [200.0], "all INT8": [380.0], "rules": [390.0]}
    made = losses(**dict.fromkeys(paces, 4.0))
    changed = dict.fromkeys(("blocks.0.ffn", "blocks.0.attention"), "int8") | {"blocks.1.ffn": "fp32"}
    made["rules"] = [replace(made["rules"][0], formats=changed)]
    peaks = dict.fromkeys(paces, 100) | {"rules": 55}
    found = adaptive_precision.judge(paces, made, peaks, PRODUCTS, replace(SIZE, num_layers=2), SIZE)
    assert "3.90x FP32 (target 3x), 1.95x FP32 by oneDNN," in found.reason
    assert found.figures["parts in int8 at the end, rules"].value == 50.0
    assert found.figures["parts in bf16 at the end, rules"].value == 25.0


@pytest.mark.parametrize("fastest", ["int8", "fp32"])
def test_losses_are_those_of_the_formats_that_controllers_choose_at_the_large_models_shapes(text_folder, fastest):
    setting = Setting(quick=True, folder=text_folder, progress=SilentProgress())
    seconds = {"fp32": 8.0, "bf16": 8.0, "int8": 8.0, fastest: 1.0}
    speeds = {name: seconds.get(name.split("/")[-1], 0.1) for name in adaptive_precision.speeds_at_large(setting)}
    adaptive = {"kind": "rules", "every": 4, "window": 1, "tolerance": 1.0}
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
