"""Claim: a batch four times as large, accumulated over microbatches, reaches a loss in less time than the small one."""

from dataclasses import replace

from modelwright_claims import stability_bench as bench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared

GAIN = 2.3
ROWS, PARTS = 32, 4
SMALL, LARGE = f"{ROWS} rows", f"{ROWS * PARTS} rows in {PARTS} microbatches"


def measure(setting: Setting) -> Measurement:
    """The large batch may read twice the tokens of the small one, as it takes fewer steps."""
    size = bench.study_size(setting)
    small = replace(size, batch_rows=ROWS, num_steps=size.num_steps * 8 // 5)
    large = replace(small, batch_rows=ROWS * PARTS, num_steps=small.num_steps // 2)
    variants = {
        SMALL: bench.variant(small, {}),
        LARGE: bench.variant(large, {"gradient_accumulation_steps": PARTS}),
    }
    pace = bench.paces(bench.steps_to_a_loss(setting, variants, plain=SMALL))
    return replace(pace, conditions={**small.describe(), **pace.conditions})


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    return bench.judge_paces(LARGE, [SMALL], GAIN, samples, conditions)


CLAIM = declared(__name__)
