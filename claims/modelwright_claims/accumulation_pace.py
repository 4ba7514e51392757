"""What accumulating gradients costs and brings on the way to a fixed held-out loss.

Three ways to spend the same tokens: whole batches; the same ones in microbatches, which need the memory of one; and
batches of that size without accumulation, four times as many steps. Each has its own rate, tuned with the same budget.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelwright_claims import stability_bench as bench
from modelwright_claims import workbench
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
    text, size = workbench.prepare_text(setting), bench.study_size(setting)
    small = replace(size, batch_rows=size.batch_rows // PARTS, num_steps=size.num_steps * PARTS)
    arms = {WHOLE: (size, 1), ACCUMULATED: (size, PARTS), SMALL: (small, 1)}
    rates = bench.RATES[2:3] if setting.quick else bench.RATES

    def run(arm: str, rate: float, seed: int) -> bench.Outcome:
        shape, parts = arms[arm]
        config = shape.train_config(
            learning_rate=rate,
            schedule=bench.CONSTANT,
            num_microbatches=parts,
            eval_every_steps=bench.eval_every(shape),
        )
        return bench.run(setting, text, shape, config, seed=seed)

    tuning = {arm: {rate: run(arm, rate, bench.TUNING_SEED) for rate in rates} for arm in arms}
    best = {arm: min(of, key=lambda rate, of=of: of[rate].final_loss) for arm, of in tuning.items()}
    curve = tuning[WHOLE][best[WHOLE]].curve
    target = min(loss for step, loss in curve if step <= bench.FAR_PART * size.num_steps)
    seeds = range(bench.FIRST_SEED, bench.FIRST_SEED + (2 if setting.quick else 5))
    runs = {arm: [run(arm, best[arm], seed) for seed in seeds] for arm in arms}
    steps = {arm: [min(one.steps_to(target), arms[arm][0].num_steps) for one in of] for arm, of in runs.items()}
    return Pace(
        target=target,
        steps=steps,
        tokens={arm: [count * arms[arm][0].batch_tokens for count in of] for arm, of in steps.items()},
        seconds={
            arm: [count * _step_s(one) for count, one in zip(steps[arm], of, strict=True)] for arm, of in runs.items()
        },
        rates=best,
    )


def _step_s(outcome: bench.Outcome) -> float:
    """The median step, without the first ones."""
    times = [float(record["step_time_s"]) for record in outcome.records if "step_time_s" in record]
    return statistics.median(times[workbench.NUM_UNTIMED_STEPS :])
