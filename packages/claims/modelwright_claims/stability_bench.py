"""The bench of claims on stable training: the steps to a fixed held-out loss, in calm runs and among wild batches.

The target is the loss that the plain variant reaches after three quarters of its steps, at its best rate, on the
tuning seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modelwright_claims import experiment, workbench
from modelwright_claims.batches import Wild
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict
from modelwright_claims.experiment import Execute, Experiment, Runner, Tuning, best_rate, run_experiment
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import differences, estimate, paired_t_test, ratios
from modelwright_claims.training_run import Outcome, Run, execute

NUM_EVALUATIONS = 25
HELDOUT_BATCHES = 2
"""Batches of 32 rows: enough to tell runs apart, and little beside the training."""
TUNING_SEED = 3000
SEEDS = range(3001, 3006)
CONSTANT = {"kind": "constant", "warmup_fraction": 0.05}
"""Under a rate that falls to zero a loss is reached when the schedule wants it."""
FAR_PART = 0.75
FIXED = "to a fixed loss, "
TARGET = "the fixed loss"
RATES = (5e-4, 1e-3, 2e-3, 6e-3)
"""What every arm chooses from at first."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A comparison: settings by arm, the first of which is the plain one; `main`, the arm that the verdict is about;
    rivals: arms that it has to beat among wild batches as it does the plain one; seeds: of the paired runs.
    """

    arms: Mapping[str, Mapping[str, Any]]
    main: str
    rivals: Sequence[str] = ()
    seeds: Sequence[int] = SEEDS
    regimes: Mapping[str, Wild | None] = field(default_factory=lambda: {"calm": None, "wild batches": Wild()})

    @property
    def plain(self) -> str:
        return next(iter(self.arms))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A single regime: the loss to be reached, and the samples of its experiment."""

    target: float
    samples: experiment.Samples

    def steps(self, arm: str) -> list[float]:
        """Return the steps to the target by seed; a run that never gets there counts as all of its steps."""
        longest = self.samples.tuned[arm].size.num_steps
        return [min(outcome.steps_to(self.target), longest) for outcome in self.samples.runs[arm]]


def study_size(setting: Setting) -> workbench.Size:
    """Some 0.1 million parameters: some seconds a run on one core."""
    return workbench.Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=25 if setting.quick else 500)


def measure(setting: Setting, study: Study) -> Measurement:
    """Compare the arms in all regimes."""
    size, found = study_size(setting), dict[str, Comparison]()
    for regime, wild in study.regimes.items():
        variants = {arm: variant(size, settings, wild) for arm, settings in study.arms.items()}
        found[regime] = steps_to_a_loss(setting, variants, plain=study.plain, seeds=study.seeds)
    return measurement(size, study, found)


def variant(size: workbench.Size, settings: Mapping[str, Any], wild: Wild | None = None) -> Run:
    """Return a run at a constant rate that is evaluated often enough to see when it reaches a loss."""
    shared = {"schedule": CONSTANT, "eval_every_steps": max(5, size.num_steps // NUM_EVALUATIONS)}
    return Run(size=size, settings={**shared, **settings}, wild=wild, heldout_batches=HELDOUT_BATCHES)


def steps_to_a_loss(
    setting: Setting,
    variants: Mapping[str, Run],
    *,
    plain: str,
    seeds: Sequence[int] = SEEDS,
    execute: Execute = execute,
) -> Comparison:
    """Tune each variant, run paired seeds, and fix the target. In quick mode at one rate and on two seeds.

    execute: makes a single run.
    """
    tuning = Tuning(values=RATES[2:3] if setting.quick else RATES, seeds=(TUNING_SEED,))
    seeds = seeds[:2] if setting.quick else seeds
    samples = run_experiment(setting, Experiment(variants=variants, seeds=seeds, tuning=tuning), execute)
    (reference,) = Runner(setting, execute).all([replace(samples.tuned[plain], seed=TUNING_SEED)])
    return Comparison(target=target_of(reference, samples.tuned[plain].size.num_steps), samples=samples)


def target_of(reference: Outcome, num_steps: int) -> float:
    """Return the lowest loss of a run in the first part of its steps."""
    return min(loss for step, loss in reference.curve if step <= FAR_PART * num_steps and math.isfinite(loss))


def paces(found: Comparison) -> Measurement:
    """Return steps, tokens and time to the target by arm, and what each arm was tuned to."""
    samples: dict[str, Sequence[float]] = {}
    conditions: dict[str, str | int | float | bool] = {TARGET: round(found.target, 4)}
    for arm, outcomes in found.samples.runs.items():
        steps, size = found.steps(arm), found.samples.tuned[arm].size
        samples |= {
            f"steps {FIXED}{arm}": steps,
            f"tokens {FIXED}{arm}": [count * size.batch_tokens for count in steps],
            f"time {FIXED}{arm}": [count * outcome.step_s for count, outcome in zip(steps, outcomes, strict=True)],
            f"rates, {arm}": list(found.samples.tuning[arm]),
            f"tuning, {arm}": list(found.samples.tuning[arm].values()),
        }
        conditions[f"most steps, {arm}"] = size.num_steps
    return Measurement(samples=samples, conditions=conditions)


def show_paces(judgment: Judgment, samples: Samples, conditions: Conditions, arms: Sequence[str]) -> None:
    """Add what the arms needed to reach the loss, which no target speaks of, and say it."""
    units = {"steps": "", "tokens": "", "time": "s"}
    for arm in arms:
        for what, unit in units.items():
            judgment.show(samples, [f"{what} {FIXED}{arm}"], unit)
    with judgment.beside():
        means = [[statistics.fmean(samples[f"{what} {FIXED}{arm}"]) for what in ("steps", "time")] for arm in arms]
        needed = [f"{steps:.0f} steps and {time:.1f} s, {arm}" for arm, (steps, time) in zip(arms, means, strict=True)]
        judgment.said.append(f"to a held-out loss of {conditions[TARGET]:.2f}: {'; '.join(needed)}")
        judgment.figures.update({f"best rate, {arm}": best_rate(samples, arm) for arm in arms})


def judge_paces(main: str, rivals: Sequence[str], gain: float, samples: Samples, conditions: Conditions) -> Verdict:
    """Met when the main arm always reaches the loss, and in less time than each rival by a factor of `gain`.

    A rival's run that never reached it counts as all of its steps.
    """
    judgment = Judgment()
    for rival in rivals:
        for what in ("time", "steps"):
            arms = (rival, main)
            fewer = "less time than" if what == "time" else "fewer steps than"
            judgment.ask(
                f"{fewer} {rival}",
                lambda what=what, arms=arms: ratios(*(samples[f"{what} {FIXED}{arm}"] for arm in arms)),
                "x",
                ">=" if what == "time" else "",
                gain,
            )
    with judgment.part():
        most = float(conditions[f"most steps, {main}"])
        never = sum(count >= most for count in samples[f"steps {FIXED}{main}"])
        judgment.require(not never, f"{never} runs of {main} never reached the loss")
    show_paces(judgment, samples, conditions, [main, *rivals])
    return judgment.verdict()


def measurement(size: workbench.Size, study: Study, found: Mapping[str, Comparison]) -> Measurement:
    """Return the steps to the loss, the last losses and the tuning of every arm in every regime."""
    samples: dict[str, Sequence[float]] = {}
    for regime, comparison in found.items():
        for arm in study.arms:
            tuning = comparison.samples.tuning[arm]
            samples |= {
                f"steps, {arm}, {regime}": comparison.steps(arm),
                f"rates, {arm}, {regime}": list(tuning),
                f"tuning, {arm}, {regime}": list(tuning.values()),
                f"final loss, {arm}, {regime}": [outcome.final_loss for outcome in comparison.samples.runs[arm]],
            }
    conditions = size.describe() | {
        "rates tried": ", ".join(f"{rate:g}" for rate in RATES) + ", and beyond where the best was at an end",
        "wild batches": "random labels, loss x 20, every 25th batch from the 20th on",
        "schedule": "warmup over 5%, then constant",
        **{f"target, {regime}": round(comparison.target, 4) for regime, comparison in found.items()},
    }
    return Measurement(samples=samples, conditions=conditions)


def judge(study: Study, gain: float, samples: Samples, conditions: Conditions) -> Verdict:
    """Met when the main arm needs fewer steps than the plain one and than each rival by a factor of `gain` and with
    p < 0.05 where batches are wild, and no more than the plain one where all is calm.

    Runs that never reached the loss count as all of their steps."""
    judgment = Judgment()
    for regime, wild in study.regimes.items():

        def steps(arm: str, regime: str = regime) -> Sequence[float]:
            return samples[f"steps, {arm}, {regime}"]

        for arm in study.arms:
            with judgment.beside():
                judgment.ask(f"steps to the loss, {arm}, {regime}", estimate(steps(arm)), "steps")
                if arm != study.plain:
                    name = "fewer steps" if arm == study.main else f"fewer steps, {arm}"
                    judgment.ask(f"{name}, {regime}", ratios(steps(study.plain), steps(arm)), "x")
                ended = [loss for loss in samples[f"final loss, {arm}, {regime}"] if math.isfinite(loss)]
                if ended:
                    judgment.ask(f"held-out loss at the end, {arm}, {regime}", estimate(ended), "nats")
                if f"rates, {arm}, {regime}" in samples:
                    judgment.figures[f"best rate, {arm}, {regime}"] = best_rate(samples, f"{arm}, {regime}")
        for other in (study.plain,) if wild is None else (study.plain, *study.rivals):
            with judgment.part():
                own, others = steps(study.main), steps(other)
                ratio, p_value = ratios(others, own), paired_t_test(own, others).p_value
                judgment.ask(f"fewer steps than {other}, {regime}", ratio, "x")
                judgment.said.append(
                    f"{regime}: {statistics.fmean(own):.0f} steps against {statistics.fmean(others):.0f} of {other} "
                    f"({ratio.mean:.2f}x, p = {p_value:.2g})"
                )
                if wild is None:
                    judgment.check(f"{regime}: steps more than {other}", differences(own, others), 0.0, "", "<=")
                else:
                    judgment.check(f"{regime}: steps fewer than {other}", ratio, gain, "x", ">=")
                    judgment.require(p_value < 0.05, f"{regime}: not different from {other} with p < 0.05")
        longest = int(conditions["steps"])
        missed = {arm: sum(of >= longest for of in samples.get(f"steps, {arm}, {regime}", ())) for arm in study.arms}
        never = ", ".join(f"{arm} {count}" for arm, count in missed.items() if count)
        if never:
            judgment.said.append(f"{regime}: runs that never reached the loss: {never}")
    return judgment.verdict()
