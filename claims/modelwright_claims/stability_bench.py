"""The bench of claims on stable training: the steps to a fixed held-out loss, in calm runs and among wild batches.

The target is what the plain variant reaches after three quarters of its steps, at its best rate, on the tuning seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modelwright_claims import workbench
from modelwright_claims.claim import Figure, Result, Setting
from modelwright_claims.experiment import Experiment, Runner, Samples, Tuning, run_experiment
from modelwright_claims.statistics import paired_t_test, spread
from modelwright_claims.training_run import Outcome, Run
from modelwright_claims.wild_batches import Wild

NUM_EVALUATIONS = 25
HELDOUT_BATCHES = 2
"""Of 32 rows: enough to tell runs apart, and little beside the training."""
TUNING_SEED = 3000
FIRST_SEED = 3001
CONSTANT = {"kind": "constant", "warmup_fraction": 0.05}
"""Under a rate that falls to zero a loss is reached when the schedule wants it."""
FAR_PART = 0.75
RATES = (5e-4, 1e-3, 2e-3, 6e-3)
"""What every arm chooses from at first."""
TOO_SHORT = "the quick form only shows that the measurement runs; measure without --quick"


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is compared: settings by arm, the first of which is the plain one; `main`, the arm that the verdict is
    about; rivals: arms that it has to beat among wild batches as it does the plain one."""

    arms: Mapping[str, Mapping[str, Any]]
    main: str
    rivals: Sequence[str] = ()
    regimes: Mapping[str, Wild | None] = field(default_factory=lambda: {"calm": None, "wild batches": Wild()})

    @property
    def plain(self) -> str:
        return next(iter(self.arms))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One regime: the loss to be reached, and the samples of its experiment."""

    target: float
    samples: Samples

    def steps(self, arm: str) -> list[float]:
        """Return the steps to the target by seed; a run that never gets there counts as all of its steps."""
        longest = self.samples.tuned[arm].size.num_steps
        return [min(outcome.steps_to(self.target), longest) for outcome in self.samples.runs[arm]]

    def num_missed(self, arm: str) -> int:
        return sum(math.isinf(outcome.steps_to(self.target)) for outcome in self.samples.runs[arm])


def study_size(setting: Setting) -> workbench.Size:
    """Some 0.1 million parameters: some seconds a run on one core."""
    return workbench.Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=25 if setting.quick else 500)


def eval_every(size: workbench.Size) -> int:
    """Steps."""
    return max(5, size.num_steps // NUM_EVALUATIONS)


def compare(setting: Setting, study: Study, size: workbench.Size) -> dict[str, Comparison]:
    """Compare the arms in all regimes."""
    found = {}
    for regime, wild in study.regimes.items():
        variants = {arm: variant(size, settings, wild) for arm, settings in study.arms.items()}
        found[regime] = steps_to_a_loss(setting, variants, plain=study.plain)
    return found


def variant(size: workbench.Size, settings: Mapping[str, Any], wild: Wild | None = None) -> Run:
    """Return a run at a constant rate that is evaluated often enough to see when it reaches a loss."""
    shared = {"schedule": CONSTANT, "eval_every_steps": max(5, size.num_steps // NUM_EVALUATIONS)}
    return Run(size=size, settings={**shared, **settings}, wild=wild, heldout_batches=HELDOUT_BATCHES)


def steps_to_a_loss(setting: Setting, variants: Mapping[str, Run], *, plain: str) -> Comparison:
    """Tune each variant, run paired seeds, and fix the target. In quick mode at one rate and on two seeds."""
    tuning = Tuning(values=RATES[2:3] if setting.quick else RATES, seeds=(TUNING_SEED,))
    seeds = range(FIRST_SEED, FIRST_SEED + (2 if setting.quick else 5))
    samples = run_experiment(setting, Experiment(variants=variants, seeds=seeds, tuning=tuning))
    (reference,) = Runner(setting).all([replace(samples.tuned[plain], seed=TUNING_SEED)])
    return Comparison(target=target_of(reference, samples.tuned[plain].size.num_steps), samples=samples)


def target_of(reference: Outcome, num_steps: int) -> float:
    """Return the lowest loss of a run in the first part of its steps."""
    return min(loss for step, loss in reference.curve if step <= FAR_PART * num_steps and math.isfinite(loss))


def judge(setting: Setting, study: Study, size: workbench.Size, found: Mapping[str, Comparison], gain: float) -> Result:
    """Met when the main arm needs fewer steps than the plain one and than each rival by a factor of `gain` and with
    p < 0.05 where batches are wild, and is not slower than the plain one with p < 0.05 where all is calm."""
    met, reasons = True, []
    figures = {f"fewer steps, {regime}": _fewer(one, study, study.main) for regime, one in found.items()}
    samples: dict[str, Sequence[float]] = {}
    for regime, comparison in found.items():
        steps = {arm: comparison.steps(arm) for arm in study.arms}
        for arm, of in steps.items():
            figures[f"steps to the loss, {arm}, {regime}"] = Figure(
                value=statistics.fmean(of), unit="steps", spread=spread(of)
            )
            if arm not in (study.plain, study.main):
                figures[f"fewer steps, {arm}, {regime}"] = _fewer(comparison, study, arm)
            finals = [outcome.final_loss for outcome in comparison.samples.runs[arm]]
            ended = [loss for loss in finals if math.isfinite(loss)]
            if ended:
                loss = Figure(value=statistics.fmean(ended), unit="nats", spread=spread(ended))
                figures[f"held-out loss at the end, {arm}, {regime}"] = loss
            figures[f"best rate, {arm}, {regime}"] = Figure(value=comparison.samples.best(arm), unit="")
            samples |= {
                f"steps, {arm}, {regime}": of,
                f"tuning, {arm}, {regime}": list(comparison.samples.tuning[arm].values()),
            }
            samples[f"final loss, {arm}, {regime}"] = finals
        met &= _regime(study, regime, comparison, steps, gain, reasons)
    kind = "met" if met else "short"
    text = "; ".join(reasons)
    if not met:
        text += f"; the target is {gain:g}x fewer with p < 0.05 among wild batches, and no loss in calm"
    return Result(
        kind="cannot be tested here" if setting.quick else kind,
        reason=TOO_SHORT if setting.quick else text,
        figures=figures,
        conditions=size.describe()
        | {
            "rates tried": ", ".join(f"{rate:g}" for rate in RATES) + ", and beyond where the best was at an end",
            "wild batches": "random labels, loss x 20, every 25th batch from the 20th on",
            "schedule": "warmup over 5%, then constant",
            **{f"target, {regime}": round(comparison.target, 4) for regime, comparison in found.items()},
        },
        samples=samples,
    )


def _fewer(comparison: Comparison, study: Study, arm: str) -> Figure:
    """How many times as many steps the plain arm takes."""
    pairs = zip(*(comparison.steps(name) for name in (study.plain, arm)), strict=True)
    ratios = [plain / own for plain, own in pairs]
    return Figure(value=statistics.fmean(ratios), unit="x", spread=spread(ratios))


def _regime(
    study: Study,
    regime: str,
    comparison: Comparison,
    steps: Mapping[str, Sequence[float]],
    gain: float,
    reasons: list[str],
) -> bool:
    others = (study.plain, *study.rivals)
    paired = {arm: paired_t_test(steps[study.main], steps[arm]) for arm in others}
    means = {arm: statistics.fmean(steps[arm]) for arm in (study.main, *others)}
    ratios = {arm: means[arm] / means[study.main] for arm in others}
    count = paired[study.plain].count
    missed = ", ".join(f"{arm} {n} of {count} never" for arm in means if (n := comparison.num_missed(arm)))
    against = ", ".join(
        f"{means[arm]:.0f} of {arm} ({ratios[arm]:.2f}x, p = {paired[arm].p_value:.2g})" for arm in others
    )
    reasons.append(f"{regime}: {means[study.main]:.0f} steps against {against}{'; ' + missed if missed else ''}")
    if study.regimes[regime] is None:
        return not (paired[study.plain].mean > 0 and paired[study.plain].p_value < 0.05)
    return all(ratios[arm] >= gain and paired[arm].p_value < 0.05 for arm in others)
