"""What accumulating gradients costs and brings on the way to a fixed held-out loss.

Three ways to spend the same tokens: whole batches; the same ones in microbatches, which need the memory of one; and
batches of that size without accumulation, four times as many steps. Each has its own rate, tuned with the same budget.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelwright_claims import stability_bench as bench
from modelwright_claims.claim import Figure, Setting
from modelwright_claims.statistics import spread

PARTS = 4
WHOLE, ACCUMULATED, SMALL = "whole batches", f"{PARTS} microbatches", "small batches, not accumulated"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """By arm and seed: steps to the loss (all of them when it is never reached), tokens and seconds of steps until
    then, and the rate."""

    target: float
    steps: Mapping[str, Sequence[float]]
    tokens: Mapping[str, Sequence[float]]
    seconds: Mapping[str, Sequence[float]]
    rates: Mapping[str, float]

    def figures(self) -> dict[str, Figure]:
        found = {}
        for arm in self.steps:
            for name, of, unit in (("steps", self.steps, ""), ("tokens", self.tokens, ""), ("time", self.seconds, "s")):
                value = Figure(value=statistics.fmean(of[arm]), unit=unit, spread=spread(of[arm]))
                found[f"{name} to a fixed loss, {arm}"] = value
        return found

    def words(self) -> str:
        steps, seconds = ({arm: statistics.fmean(of[arm]) for arm in of} for of in (self.steps, self.seconds))
        return (
            f"to a held-out loss of {self.target:.2f}: {steps[WHOLE]:.0f} steps and {seconds[WHOLE]:.1f} s with whole "
            f"batches, {steps[ACCUMULATED]:.0f} and {seconds[ACCUMULATED]:.1f} s accumulated, {steps[SMALL]:.0f} and "
            f"{seconds[SMALL]:.1f} s with batches of a {PARTS}th"
        )


def measure_pace(setting: Setting) -> Pace:
    """Five paired seeds; in quick mode two, at one rate."""
    size = bench.study_size(setting)
    small = replace(size, batch_rows=size.batch_rows // PARTS, num_steps=size.num_steps * PARTS)
    variants = {
        WHOLE: bench.variant(size, {}),
        ACCUMULATED: bench.variant(size, {"num_microbatches": PARTS}),
        SMALL: bench.variant(small, {}),
    }
    found = bench.steps_to_a_loss(setting, variants, plain=WHOLE)
    steps = {arm: found.steps(arm) for arm in variants}
    seconds = {
        arm: [count * outcome.step_s for count, outcome in zip(steps[arm], outcomes, strict=True)]
        for arm, outcomes in found.samples.runs.items()
    }
    return Pace(
        target=found.target,
        steps=steps,
        tokens={arm: [count * variants[arm].size.batch_tokens for count in of] for arm, of in steps.items()},
        seconds=seconds,
        rates={arm: found.samples.tuned[arm].size.learning_rate for arm in variants},
    )
