"""The verdict on latency in FP16 from given seconds, and one quick measurement."""

import pytest

from modelwright.core.progress import SilentProgress
from modelwright_claims import half_precision_latency as claim
from modelwright_claims.claim import Measurement, Setting, Verdict
from modelwright_claims.judging import judge


def judged(fp16: list[float], *, onednn: list[float] | None = None) -> Verdict:
    arms = {claim.FP32: [1.0, 1.0], claim.BF16: [0.5, 0.5], claim.INT8: [0.25, 0.25], claim.FP16: fp16}
    arms |= {claim.ONEDNN: onednn} if onednn else {}
    samples = {f"{claim.SECONDS}{name}, {what}": of for name, of in arms.items() for what in (claim.PROMPT, claim.STEP)}
    return judge(claim.CLAIM, Measurement(samples=samples))


def test_met_only_below_the_faster_fp32_by_the_bound():
    met = judged([0.6, 0.602], onednn=[1.5, 1.5])
    assert met.kind == "met"
    assert met.figures["less latency, FP16, a decode step"].value == pytest.approx(39.9)
    assert met.figures["latency, INT8, a prompt"].value == 250
    assert set(claim.CLAIM.headline) <= set(met.figures)
    assert judged([0.6, 0.602]).kind == "met", "without oneDNN"
    assert judged([0.6, 0.602], onednn=[0.9, 0.9]).kind == "short"
    assert judged([0.5, 0.7]).kind == "short"
    assert judged([3.0, 3.0]).kind == "short"


@pytest.mark.slow
def test_a_quick_measurement(tmp_path):
    found = claim.CLAIM.measure(Setting(quick=True, folder=tmp_path, progress=SilentProgress()))
    assert judge(claim.CLAIM, found).figures["latency, FP16, a decode step"].value > 0
