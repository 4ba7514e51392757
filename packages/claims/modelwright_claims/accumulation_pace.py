"""What accumulating gradients costs and brings on the way to a fixed held-out loss.

Three ways to spend the same tokens: whole batches; the same ones in microbatches, which need the memory of one; and
batches of that size without accumulation, four times as many steps. Each has its own rate, tuned with the same budget.
"""

from dataclasses import replace

from modelwright_claims import stability_bench as bench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import estimate

PARTS = 4
WHOLE, ACCUMULATED, SMALL = "whole batches", f"{PARTS} microbatches", "small batches, not accumulated"


QUANTITIES = (("steps", ""), ("tokens", ""), ("time", "s"))
"""What is counted until the loss is reached, with its unit."""
TARGET = "the fixed loss"


def measure_pace(setting: Setting) -> Measurement:
    """Five paired seeds; in quick mode two, at one rate."""
    size = bench.study_size(setting)
    small = replace(size, batch_rows=size.batch_rows // PARTS, num_steps=size.num_steps * PARTS)
    variants = {
        WHOLE: bench.variant(size, {}),
        ACCUMULATED: bench.variant(size, {"gradient_accumulation_steps": PARTS}),
        SMALL: bench.variant(small, {}),
    }
    result = bench.steps_to_a_loss(setting, variants, plain=WHOLE)
    samples: dict[str, list[float]] = {}
    for arm, outcomes in result.samples.runs.items():
        steps = result.steps(arm)
        samples |= {
            f"steps to a fixed loss, {arm}": steps,
            f"tokens to a fixed loss, {arm}": [count * variants[arm].size.batch_tokens for count in steps],
            f"time to a fixed loss, {arm}": [
                count * outcome.step_s for count, outcome in zip(steps, outcomes, strict=True)
            ],
        }
    rates = {arm: result.samples.tuned[arm].size.learning_rate for arm in variants}
    conditions = {f"rate to a fixed loss, {arm}": rate for arm, rate in rates.items()}
    return Measurement(samples=samples, conditions={**conditions, TARGET: round(result.target, 4)})


def say_pace(judgment: Judgment, samples: Samples, conditions: Conditions) -> None:
    """Add figures and a clause on the way to the loss. No target speaks of them."""
    means = {}
    for arm in (WHOLE, ACCUMULATED, SMALL):
        for what, unit in QUANTITIES:
            result = estimate(samples[f"{what} to a fixed loss, {arm}"])
            means[what, arm] = result.mean
            judgment.figures[f"{what} to a fixed loss, {arm}"] = result.figure(unit)
    judgment.said.append(
        f"to a held-out loss of {conditions[TARGET]:.2f}: {means['steps', WHOLE]:.0f} steps and "
        f"{means['time', WHOLE]:.1f} s with whole batches, {means['steps', ACCUMULATED]:.0f} and "
        f"{means['time', ACCUMULATED]:.1f} s accumulated, {means['steps', SMALL]:.0f} and {means['time', SMALL]:.1f} s "
        f"with batches of a {PARTS}th"
    )
