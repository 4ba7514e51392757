"""Claim: FP16 training reaches a loss in less time with a dynamic loss scale than with the best static one.

Each gradient is a share of a large batch, as in `loss_scaling`, which counts the updates that are lost.
"""

from dataclasses import replace

from modelwright_claims import loss_scaling
from modelwright_claims import stability_bench as bench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared

GAIN = 1.22
DYNAMIC = "dynamic from 2^15"
STATIC = {f"static 2^{power}": 2.0**power for power in (15, 10, 20)}
"""The usual first scale, and scales on both sides of it; the claim has to hold against each, so against the best."""


def measure(setting: Setting) -> Measurement:
    size = loss_scaling.study_size(setting)
    size = replace(size, num_steps=size.num_steps * 5 // 2)
    scales = {arm: loss_scaling.fp16(dynamic=False, init_scale=scale) for arm, scale in STATIC.items()}
    scales |= {DYNAMIC: loss_scaling.fp16(growth_interval=loss_scaling.WINDOW)}
    variants = {
        arm: bench.variant(size, {"precision": precision, "max_skipped_steps": size.num_steps + 1})
        for arm, precision in scales.items()
    }
    found = bench.steps_to_a_loss(
        setting, variants, plain=next(iter(STATIC)), execute=loss_scaling.execute_noting_losses
    )
    pace = bench.paces(found)
    shared = {"window": loss_scaling.WINDOW, "copies that a process stands for": loss_scaling.COPIES}
    return replace(pace, conditions={**size.describe(), **shared, **pace.conditions})


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    return bench.judge_paces(DYNAMIC, list(STATIC), GAIN, samples, conditions)


CLAIM = declared(__name__)
