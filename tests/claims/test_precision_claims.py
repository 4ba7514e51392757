"""Verdicts of the claims on number formats, and that their arms are what they say."""

import pytest

from modelwright.claims import adaptive_precision, precision_policies
from modelwright.claims.claim import Setting
from modelwright.claims.workbench import Run, Size
from modelwright.core.config import parse
from modelwright.core.progress import SilentProgress
from modelwright.precision.policy import PrecisionConfig

SIZE = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=10)
PRODUCTS = {"fp32": 1.0, "bf16": 2.5, "fp16": 0.1, "fp8": 0.1, "int8": 4.0}


def runs(loss: float, speed: float) -> list[Run]:
    return [Run(heldout_loss=loss, tokens_per_s=speed, step_s=1.0)]


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
    too_far = judged(int8=4.09)
    assert too_far.kind == "short"
    assert "Too far from FP32: int8" in too_far.reason


def test_a_controller_has_to_beat_the_trivial_policies():
    def judged(speed=390.0, loss=4.01, peak=55):
        arms = {"fp32": runs(4.0, 100.0), "all INT8": runs(4.05, 380.0), "rules": runs(loss, speed)}
        return adaptive_precision.judge(arms, {"fp32": 100, "all INT8": 50, "rules": peak}, PRODUCTS, SIZE)

    assert judged().kind == "met"
    for worse in ({"speed": 370.0}, {"loss": 4.03}, {"peak": 61}):
        assert judged(**worse).kind == "short"
    assert "all INT8 at 3.80x" in judged().reason
    assert "at most 4.00x as fast" in judged().reason
