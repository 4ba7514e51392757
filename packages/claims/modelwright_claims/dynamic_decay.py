"""Claim: weight decay that eases off while gradients are large reaches a loss in fewer steps than a constant one.

Next to both is the rival that papers leave out: simply the lower decay, all the time.
"""

from modelwright.core.config import dump
from modelwright.train.techniques.weight_decay import WeightDecayScheduleConfig
from modelwright_claims import stability_bench as bench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared

GAIN = 1.05
STUDY = bench.Study(
    arms={
        "0.01": {"weight_decay": 0.01},
        "0.01, and 0.001 above a norm of 5": {
            "weight_decay": 0.01,
            "weight_decay_schedule": dump(WeightDecayScheduleConfig(grad_norm_threshold=5.0)),
        },
        "0.001": {"weight_decay": 0.001},
    },
    main="0.01, and 0.001 above a norm of 5",
    rivals=("0.001",),
)


def measure(setting: Setting) -> Measurement:
    return bench.measure(setting, STUDY)


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    return bench.judge(STUDY, GAIN, samples, conditions)


CLAIM = declared(__name__)
