"""Claim: lock-free workers on shared weights speed training up nearly by their number.

Hogwild against synchronous data parallel with as many processes of one thread each, and against one process: tokens
per second of the whole run, and the held-out loss at equal tokens and at equal time. The published figure is for 8
workers, which 16 cores are asked for here; 2 workers are measured wherever there are 2 cores.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from modelwright_claims import workbench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, untestable
from modelwright_claims.experiment import Runner, Tuning, best_value, tune, with_value
from modelwright_claims.judging import Judgment, Lacks, names_between
from modelwright_claims.statistics import Estimate, differences, ratios
from modelwright_claims.training_run import Outcome, Processes, Run

PUBLISHED_WORKERS, PUBLISHED_SPEED = 8, 6.8
EFFICIENCY = PUBLISHED_SPEED / PUBLISHED_WORKERS
"""Scaling efficiency of the published speed-up: the gain of a worker, in units of one process alone."""
MARGIN = 0.02
"""Nats that count as no loss: the least by which a change of seed moves the held-out loss."""
CORES_PER_WORKER = 2
RATES = (5e-4, 1e-3, 2e-3)
STRENGTHS = (1.0, 10.0, 100.0)
"""Strengths of the delay compensation, in units of the tokens in a batch; the best one varies widely."""
TUNING_SEED, FIRST_SEED = 3000, 3001
NUM_UNTIMED_STEPS = 10
METHODS = ("hogwild", "synchronous", "compensated")
ALONE, IN_TIME = "one process", "synchronous, time of hogwild"
SINGLE, SYNCHRONOUS_IN_TIME = "alone", "synchronous in time"
"""The same arms, as the names of samples spell them."""


WHATS = ("heldout_loss", "tokens_per_s", "staleness")


def measure(setting: Setting) -> Measurement:
    """2 workers where there are 2 cores, 8 where there are 16."""
    cores = len(os.sched_getaffinity(0))
    counts = [n for n in (2, PUBLISHED_WORKERS) if cores >= n * (1 if n == 2 else CORES_PER_WORKER)]
    if not counts:
        return untestable("there is one core; two workers need two")
    size = replace(workbench.size(setting), batch_rows=PUBLISHED_WORKERS)
    found = [compare(setting, size, workers) for workers in counts]
    return Measurement(
        samples={name: values for one in found for name, values in one.samples.items()},
        conditions={"threads per process": 1, "cores": cores, **size.describe()}
        | {name: value for one in found for name, value in one.conditions.items()},
    )


def compare(setting: Setting, size: workbench.Size, workers: int) -> Measurement:
    """Compare the methods at their own best rates, and compensation at its own best strength."""
    rates = Tuning(values=RATES[1:2] if setting.quick else RATES, seeds=(TUNING_SEED,))
    strengths = [size.batch_tokens * factor for factor in (STRENGTHS[:1] if setting.quick else STRENGTHS)]
    base = {"hogwild": variant(size, workers, "hogwild"), "synchronous": variant(size, workers, "none")}
    runner = Runner(setting)
    rate = {method: best_value(of) for method, of in tune(runner, base, rates).items()}
    tuned = {method: with_value(run, "learning_rate", rate[method]) for method, run in base.items()}
    strength = Tuning(values=strengths, seeds=(TUNING_SEED,), setting="async_updates.delay_compensation")
    best_strength = best_value(tune(runner, {"compensated": tuned["hogwild"]}, strength)["compensated"])
    tuned["compensated"] = with_value(tuned["hogwild"], strength.setting, best_strength)
    arms = {method: tuned[method] for method in METHODS}
    arms[SINGLE] = replace(tuned["synchronous"], processes=Processes(threads=1))
    samples: dict[str, list[float]] = {}
    for seed in range(FIRST_SEED, FIRST_SEED + (2 if setting.quick else 5)):
        made = runner.timed([replace(run, seed=seed) for run in arms.values()])
        found = dict(zip(arms, map(whole_run, made), strict=True))
        ratio = found["hogwild"]["step_s"] / found["synchronous"]["step_s"]
        in_time = replace(size, num_steps=max(10, round(size.num_steps * ratio)), learning_rate=rate["synchronous"])
        (outcome,) = runner.all([replace(tuned["synchronous"], size=in_time, seed=seed)])
        found[SYNCHRONOUS_IN_TIME] = whole_run(outcome)
        for arm, of_arm in found.items():
            for what in WHATS:
                samples.setdefault(f"{arm}, {workers} workers, {what}", []).append(of_arm[what])
    return Measurement(
        samples=samples,
        conditions={f"rate, {method}, {workers} workers": tuned[method].size.learning_rate for method in METHODS}
        | {f"strength of compensation, {workers} workers": best_strength},
    )


def whole_run(outcome: Outcome) -> dict[str, float]:
    """Return the figures of one run, timed as a whole without its first steps: workers hear of each other's steps
    between their own. staleness: mean updates by others between the reading of the weights and the update.
    """
    ended_s, num_tokens = outcome.steps["ended_s"], outcome.steps["num_tokens"]
    first = min(NUM_UNTIMED_STEPS, len(ended_s) // 2)
    time_s = ended_s[-1] - ended_s[first]
    return {
        "heldout_loss": outcome.heldout_loss,
        "tokens_per_s": sum(num_tokens[first + 1 :]) / time_s,
        "step_s": time_s / (len(ended_s) - 1 - first),
        "staleness": statistics.fmean(outcome.steps.get("staleness", [0.0])),
    }


def variant(size: workbench.Size, workers: int, mode: str) -> Run:
    """Return a run of so many workers, processes of one thread."""
    return Run(size=size, settings={"async_updates": {"mode": mode}}, processes=Processes(per_host=workers, threads=1))


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Fewer workers than the published number can only fail it."""
    judgment = Judgment()
    counts = [int(workers) for workers in names_between(samples, "hogwild, ", " workers, heldout_loss")]
    if not counts:
        raise Lacks("samples of hogwild")
    for workers in counts:

        def of(arm: str, what: str, workers: int = workers) -> Sequence[float]:
            return samples[f"{arm}, {workers} workers, {what}"]

        def gap(method: str, rival: str, of: Callable[[str, str], Sequence[float]] = of) -> Estimate:
            return differences(of(method, "heldout_loss"), of(rival, "heldout_loss"))

        speed, loss = ratios(of("hogwild", WHATS[1]), of(SINGLE, WHATS[1])), gap("hogwild", SYNCHRONOUS_IN_TIME)
        judgment.said.append(
            f"{workers} workers: {speed.mean:.2f}x one process (target {EFFICIENCY * workers:.2f}x), at equal time "
            f"{loss.mean:+.3f} nats against synchronous (at most +{MARGIN})"
        )
        what = f"{workers} workers: speed"
        judgment.ask(f"speed over one process, {workers} workers", speed, "x", ">=", EFFICIENCY * workers, what=what)
        beside = ratios(of("hogwild", WHATS[1]), of("synchronous", WHATS[1]))
        judgment.ask(f"speed over synchronous, {workers} workers", beside, "x")
        judgment.show(samples, {f"staleness, {workers} workers": f"hogwild, {workers} workers, staleness"}, "updates")
        for method in ("hogwild", "compensated"):
            name = f"loss above synchronous at equal tokens, {method}, {workers} workers"
            judgment.ask(name, gap(method, "synchronous"), "nats")
        what = "loss above synchronous at equal time"
        name, what = f"{what}, hogwild, {workers} workers", f"{workers} workers: {what}"
        judgment.ask(name, loss, "nats", "<=", MARGIN, what=what)
        shown = {SYNCHRONOUS_IN_TIME: IN_TIME, SINGLE: ALONE}
        for arm in (*METHODS, SYNCHRONOUS_IN_TIME, SINGLE):
            name = f"held-out loss, {shown.get(arm, arm)}, {workers} workers"
            judgment.show(samples, {name: f"{arm}, {workers} workers, heldout_loss"}, "nats")
    verdict = judgment.verdict()
    if verdict.kind == "short" or max(counts) >= PUBLISHED_WORKERS:
        return verdict
    reason = (
        f"{PUBLISHED_WORKERS} workers need {PUBLISHED_WORKERS * CORES_PER_WORKER} cores, there are "
        f"{conditions['cores']}; what is there does not fall short: {verdict.reason}"
    )
    return replace(verdict, kind="cannot be tested here", reason=reason)


CLAIM = declared(__name__)
