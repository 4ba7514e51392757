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
    size = bench.study_size(setting)
    return bench.measurement(size, STUDY, bench.compare(setting, STUDY, size))


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    return bench.judge(STUDY, GAIN, samples, conditions)


CLAIM = declared(
    __name__,
    statement="Weight decay of 0.01 that falls to 0.001 while the gradient norm is above 5 reaches a held-out loss in "
    "fewer steps than 0.01 throughout when some batches are wild, and costs nothing when none is.",
    source="the optimizer that was published as DeepSeekAdam; weight decay apart from the gradient: Loshchilov and "
    "Hutter 2019 (arXiv:1711.05101)",
    published="direction, no figure of its own",
    compared="both, and 0.001 throughout; clipped at 1.0; same weights and data order per seed, five seeds; each at "
    "its own best rate, chosen from the same ones on a seed and a held-out split that are not reported",
    target=f"{GAIN:g}x fewer steps to the loss than either with p < 0.05 among wild batches, and no more steps than "
    "0.01 in calm runs",
)
