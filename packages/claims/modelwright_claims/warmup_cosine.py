"""Claim: linear warmup then cosine decay ends lower than a constant rate, at equal steps, each at its own best rate.

In two regimes, because the answer depends on it: the bench's usual short run, where the distance traveled is the
limit, and a run long for its size, where gradient noise is. The claim was first written for short runs alone; the long
regime was added after the short ones had gone against it. The verdict therefore asks for both, on seeds that no trial
has used.
"""

from collections.abc import Mapping
from dataclasses import replace

from modelwright_claims import experiment, workbench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.experiment import Experiment, Tuning, best_rate, run_experiment
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import differences
from modelwright_claims.training_run import Run

RATES = (5e-4, 1.5e-3, 5e-3, 1.5e-2)
TUNING_SEED = 2000
FIRST_SEED = 2001
LONG = workbench.Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=1500)
"""About 6 tokens a parameter."""
METHOD, BASELINE = "warmup + cosine", "constant"
SCHEDULES = {
    METHOD: {"kind": "warmup_cosine", "warmup_fraction": 0.1, "final_lr_fraction": 0.0},
    BASELINE: {"kind": "constant", "warmup_fraction": 0.0},
}


REGIMES = ("short runs", "long runs")


def measure(setting: Setting) -> Measurement:
    """Both regimes; in quick mode one, shortened."""
    if setting.quick:
        regimes = {"short runs": replace(LONG, num_steps=100)}
        return measurement(regimes, {name: compare(setting, size, num_seeds=3) for name, size in regimes.items()})
    regimes: dict[str, workbench.Size] = dict(zip(REGIMES, (workbench.size(setting), LONG), strict=True))
    return measurement(regimes, {name: compare(setting, size, num_seeds=5) for name, size in regimes.items()})


def compare(setting: Setting, size: workbench.Size, *, num_seeds: int) -> experiment.Samples:
    variants = {name: Run(size=size, settings={"schedule": schedule}) for name, schedule in SCHEDULES.items()}
    tuning = Tuning(values=RATES, seeds=(TUNING_SEED,))
    seeds = range(FIRST_SEED, FIRST_SEED + num_seeds)
    return run_experiment(setting, Experiment(variants=variants, seeds=seeds, tuning=tuning))


def measurement(regimes: Mapping[str, workbench.Size], comparisons: Mapping[str, experiment.Samples]) -> Measurement:
    """Return losses, and rates with their tuning losses, of both schedules in every regime."""
    conditions: dict[str, str | int | float | bool] = {}
    samples: dict[str, list[float]] = {}
    for regime, comparison in comparisons.items():
        for name in SCHEDULES:
            tried = comparison.tuning[name]
            samples |= {
                f"{name}, {regime}": comparison.losses(name),
                f"rates, {name}, {regime}": list(tried),
                f"tuning, {name}, {regime}": list(tried.values()),
            }
            conditions[f"rates tried, {name}, {regime}"] = ", ".join(f"{rate:g}" for rate in tried)
        conditions |= {f"{key}, {regime}": value for key, value in regimes[regime].describe().items()}
    conditions["history"] = "the long regime was added after short runs had gone against the claim; fresh seeds"
    return Measurement(samples=samples, conditions=conditions)


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    for regime in REGIMES:
        with judgment.part():
            method, baseline = (samples[f"{name}, {regime}"] for name in (METHOD, BASELINE))
            gap = differences(method, baseline)
            figure, what = f"difference of held-out losses, {regime}", f"difference in {regime}"
            judgment.ask(figure, gap, "nats", "<", 0.0, what=what)
            judgment.differs(method, baseline, f"p-value, {regime}", f"{regime}: p = {{p}}, not below 0.05")
            judgment.show(
                samples, {f"held-out loss, {name}, {regime}": f"{name}, {regime}" for name in SCHEDULES}, "nats"
            )
            judgment.said.append(
                f"{regime} ({conditions[f'steps, {regime}']} steps): {abs(gap.mean):.3f} nats "
                f"{'below' if gap.mean < 0 else 'above'} the constant rate over {gap.count} paired seeds, "
                f"p = {judgment.figures[f'p-value, {regime}'].value:.2g}"
            )
        for name in SCHEDULES:
            with judgment.beside():
                judgment.figures[f"best rate, {name}, {regime}"] = best_rate(samples, f"{name}, {regime}")
    return judgment.verdict()


CLAIM = declared(__name__)
