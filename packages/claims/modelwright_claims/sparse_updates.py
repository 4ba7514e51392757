"""Claim: dynamic sparse updates need 60% fewer FLOPs at less than 0.5% of quality.

In two regimes, because the answer depends on it. A continual update takes new text, and old text against forgetting;
the measure is that the new is learned and the old not forgotten. In a stream that nobody has cleaned half of the rows
are garbage, and choosing rows by what a short look at them tells leaves that out; in a clean stream every row is worth
something. Every form is compared with its rivals at equal compute and at equal time: dense with fewer steps, a smaller
dense model, rows drawn at random, plain freezing; each at its own best rate, chosen on its own seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from modelwright_claims.batches import Mixture
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.experiment import Experiment, Runner, Tuning, run_experiment
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.statistics import Estimate, differences, estimate, percent_above, ratios
from modelwright_claims.training_run import ONE_THREAD, Outcome, Processes, Run
from modelwright_claims.workbench import KINDS, Size

UPDATE, CLEAN = "continual update", "clean continual update"
SHARE_OF_CODE, SHARE_OF_GARBAGE = {UPDATE: 0.25, CLEAN: 0.2}, {UPDATE: 0.5, CLEAN: 0.0}
DENSE, METHOD, CLEANED = "dense", "rows by change", "dense, only useful rows"
AS_MUCH_TIME = "dense, as much time"
BASELINES = ("dense, fewer steps", AS_MUCH_TIME, "smaller dense", "random rows", "plain freezing")
BEHIND_THE_FILTER = ("random rows within the limit", "dense within the limit", "dense within the limit, as much time")
"""Rivals behind the method's filter, but without its choice: random rows, or dense batches of what passes."""
TARGET_FLOPS = 0.40
SIZE = Size(model_dim=96, num_layers=3, seq_len=128, batch_rows=12, num_steps=1300)
SMALLER = {"model_dim": 64, "num_layers": 3}
BEFORE = {"num_steps": 3400, "learning_rate": 3e-3}
"""The training whose model is then updated."""
UNTIED = {"tie_embeddings": False}
RATES: dict[str, tuple[float, ...]] = {UPDATE: (3e-4, 1e-3, 2e-3), CLEAN: (3e-4, 1e-3, 2e-3)}
TUNING_SEED, SEEDS = 300, (301, 302, 303)
NUM_TIMED_STEPS, NUM_ROUNDS, FIRST_TIMED_SEED = 60, 3, 900


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A single way to train.

    settings: as in a configuration file; shape: changes to the model; flops: it makes as many steps as this share of
    the dense run's FLOPs pays for, at most all; 0: all; equal_time: the steps that fit into the method's time;
    num_batches: of rows that a step looks at, so that fewer steps read the same stream; cleaned: its stream is without
    garbage, and only as much shorter.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)
    flops: float = 0.0
    equal_time: bool = False
    num_batches: int = 1
    cleaned: bool = False


BY_CHANGE = {"signal": "loss_change", "keep_fraction": 1 / 3, "probe_tokens": 8, "max_initial_loss": 1.0}
WITHIN = {**BY_CHANGE, "signal": "random"}
FILTERED = Arm(settings={"batch_selection": {**WITHIN, "keep_fraction": 0.5}}, num_batches=2)
"""Twice as many rows, of which about half pass; all of these are learned: dense batches of the rows within the limit.
"""

BASELINE_FORMS = {
    "dense, fewer steps": Arm(),
    "smaller dense": Arm(shape=SMALLER),
    "random rows": Arm(settings={"batch_selection": {"signal": "random", "keep_fraction": 0.4}}),
    "plain freezing": Arm(settings={"sparse_updates": {"kind": "freeze_prefix", "keep_fraction": 0.25}}),
}
ARMS: dict[str, dict[str, Arm]] = {
    UPDATE: {
        DENSE: Arm(),
        **{name: replace(arm, flops=TARGET_FLOPS) for name, arm in BASELINE_FORMS.items()},
        AS_MUCH_TIME: Arm(equal_time=True),
        "random rows within the limit": Arm(settings={"batch_selection": WITHIN}),
        "dense within the limit": replace(FILTERED, flops=TARGET_FLOPS),
        "dense within the limit, as much time": replace(FILTERED, equal_time=True),
        CLEANED: Arm(flops=TARGET_FLOPS, cleaned=True),
        METHOD: Arm(settings={"batch_selection": BY_CHANGE}),
    },
    CLEAN: {DENSE: Arm(), AS_MUCH_TIME: Arm(equal_time=True), METHOD: Arm(settings={"batch_selection": BY_CHANGE})},
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A single regime: the arms at their best rates, one outcome for each seed."""

    regime: str
    rates: Mapping[str, float]
    final: Mapping[str, Sequence[Outcome]]


@dataclass
class Bench:
    """Makes runs of the arms of all regimes."""

    setting: Setting
    sizes: Mapping[str, Size]
    before: Size
    """The training whose model is then updated."""
    rates: Mapping[str, Sequence[float]]
    seeds: Sequence[int]
    processes: Processes = ONE_THREAD
    at_once: int = 2
    step_s: dict[str, float] = field(default_factory=dict)
    """Seconds of a step of the method and of what gets as much time; once `times` has measured them."""

    def base(self, arm: Arm) -> Run:
        """Return the run whose model an arm updates: prose alone."""
        size = replace(self.before, **arm.shape)
        return Run(size=size, model=UNTIED, evaluated=KINDS, processes=self.processes)

    def run(self, regime: str, name: str, *, num_steps: int, seed: int = 0) -> Run:
        arm, garbage = ARMS[regime][name], SHARE_OF_GARBAGE[regime]
        share_of_code = SHARE_OF_CODE[regime] / (1.0 - garbage) if arm.cleaned else SHARE_OF_CODE[regime]
        batch_rows = self.sizes[regime].batch_rows * arm.num_batches
        return Run(
            size=replace(self.sizes[regime], **arm.shape, batch_rows=batch_rows, num_steps=num_steps),
            settings=arm.settings,
            model=UNTIED,
            seed=seed,
            mixture=Mixture(code=share_of_code, garbage=0.0 if arm.cleaned else garbage),
            evaluated=KINDS,
            processes=self.processes,
            start_from=self.base(arm),
        )

    def num_steps(self, regime: str) -> dict[str, int]:
        """Return the steps of each arm's run: all that read the stream, or those that its FLOPs or its time pay for."""
        most, arms = self.sizes[regime].num_steps, ARMS[regime]
        names = [name for name, arm in arms.items() if arm.flops or name == DENSE]
        looks = Runner(self.setting).all([self.run(regime, name, num_steps=5) for name in names], at_once=self.at_once)
        flops = dict(zip(names, map(executed_flops, looks), strict=True))
        paid = {name: arms[name].flops * most * flops[DENSE] / flops[name] for name in names}
        paid[DENSE] = most
        paid |= {name: self.share_of_time(name) * most for name, arm in arms.items() if arm.equal_time}
        return {name: min(most // arm.num_batches, round(paid.get(name, most))) for name, arm in arms.items()}

    def share_of_time(self, arm: str) -> float:
        """Return how many of this arm's steps take a step of the method's time, in twentieths, rounded up."""
        return math.ceil(20 * self.step_s[METHOD] / self.step_s[arm]) / 20

    def compare(self, regime: str) -> Comparison:
        """Compare all arms at their own best rates, by the loss of both texts in their proportion in the stream."""
        variants = {
            name: self.run(regime, name, num_steps=num_steps) for name, num_steps in self.num_steps(regime).items()
        }
        tuning = Tuning(
            values=self.rates[regime], seeds=(TUNING_SEED,), criterion=lambda outcome: mixed_loss(outcome, regime)
        )
        experiment = Experiment(variants=variants, seeds=self.seeds, tuning=tuning, at_once=self.at_once)
        samples = run_experiment(self.setting, experiment)
        rates = {name: run.size.learning_rate for name, run in samples.tuned.items()}
        return Comparison(regime=regime, rates=rates, final=samples.runs)

    def times(self) -> tuple[list[float], list[float]]:
        """Measure the seconds of a step of the method and of dense, in alternated runs that have the machine alone."""
        names = (METHOD, AS_MUCH_TIME, BEHIND_THE_FILTER[-1])
        variants = {name: self.run(UPDATE, name, num_steps=NUM_TIMED_STEPS) for name in names}
        seeds = range(FIRST_TIMED_SEED, FIRST_TIMED_SEED + NUM_ROUNDS)
        experiment = Experiment(variants=variants, seeds=seeds, timed=True)
        result = run_experiment(self.setting, experiment).runs
        seconds = {name: [outcome.step_s for outcome in of] for name, of in result.items()}
        self.step_s = {name: statistics.median(of) for name, of in seconds.items()}
        return seconds[METHOD], seconds[AS_MUCH_TIME]


def executed_flops(outcome: Outcome) -> float:
    """Return the FLOPs of the whole run."""
    return sum(outcome.steps["executed_flops"])


def mixed_loss(found: Outcome, regime: str) -> float:
    """Return the loss of both texts in their proportion in the regime's stream."""
    return in_proportion(regime, prose=found.losses["prose"], code=found.losses["code"])


def in_proportion(regime: str, *, prose: float, code: float) -> float:
    """Return the mean of two losses, weighted as the texts are in the useful part of the regime's stream."""
    share = SHARE_OF_CODE[regime] / (1.0 - SHARE_OF_GARBAGE[regime])
    return (1 - share) * prose + share * code


TARGET_TIME, TARGET_LOSS = 0.60, 0.5
STEP, FLOPS = "seconds a step, ", "executed FLOPs, "


def measure(setting: Setting) -> Measurement:
    """All regimes; in quick mode the first one, shortened."""
    bench = Bench(
        setting=setting, sizes={UPDATE: SIZE, CLEAN: SIZE}, before=replace(SIZE, **BEFORE), rates=RATES, seeds=SEEDS
    )
    if setting.quick:
        bench = replace(
            bench,
            sizes={UPDATE: replace(SIZE, num_steps=15)},
            before=replace(bench.before, num_steps=30),
            rates={UPDATE: RATES[UPDATE][1:2]},
            seeds=SEEDS[:2],
            processes=Processes(),  # starting others takes longer than these runs
            at_once=1,
        )
    times = bench.times()
    outcomes = {regime: bench.compare(regime) for regime in bench.sizes}
    (base,) = Runner(setting).all([bench.base(Arm())])
    return measurement(outcomes, times, base=base, size=SIZE, before=bench.before)


def measurement(
    outcomes: Mapping[str, Comparison],
    times: tuple[Sequence[float], Sequence[float]],
    *,
    base: Outcome,
    size: Size,
    before: Size,
) -> Measurement:
    """Return losses and executed FLOPs of every arm in every regime, and the seconds of a step."""
    samples: dict[str, Sequence[float]] = {STEP + "method": times[0], STEP + "dense": times[1]}
    samples |= {f"{kind} before the update": [loss] for kind, loss in base.losses.items()}
    for regime, outcome in outcomes.items():
        for name, runs in outcome.final.items():
            samples |= {f"{kind}, {name}, {regime}": [run.losses[kind] for run in runs] for kind in KINDS}
            samples[f"{FLOPS}{name}, {regime}"] = [executed_flops(run) for run in runs]
    garbage = SHARE_OF_GARBAGE[UPDATE]
    return Measurement(
        samples=samples,
        conditions=size.describe()
        | described(__name__)
        | {
            "regimes": f"{UPDATE}: {SHARE_OF_CODE[UPDATE]:.0%} code, which is new, {garbage:.0%} garbage (half of it "
            "prose whose tokens are in no order, half tokens drawn evenly), the rest prose from the training that the "
            f"model comes from ({before.num_steps} steps); {CLEAN}: {SHARE_OF_CODE[CLEAN]:.0%} code, the rest prose",
            "rates tried": "; ".join(f"{regime}: {', '.join(map(str, RATES[regime]))}" for regime in outcomes)
            + "; and beyond where the best was at an end",
            "rates": "; ".join(
                f"{regime}, {name}: {rate:g}" for regime, one in outcomes.items() for name, rate in one.rates.items()
            ),
        },
    )


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The samples of one regime. A missing sample raises `Lacks` when it is asked for."""

    name: str
    samples: Samples

    @property
    def arms(self) -> list[str]:
        return names_between(self.samples, "prose, ", f", {self.name}")

    def losses(self, arm: str) -> Sequence[float]:
        """Held-out losses of the new text, by seed."""
        return self.samples[f"code, {arm}, {self.name}"]

    def both(self, arm: str) -> list[float]:
        """Held-out losses of both texts in their proportion in the stream, by seed."""
        pairs = zip(*(self.samples[f"{kind}, {arm}, {self.name}"] for kind in ("prose", "code")), strict=True)
        return [in_proportion(self.name, prose=prose, code=code) for prose, code in pairs]

    def flops(self, arm: str) -> Estimate:
        """Executed FLOPs over dense, by seed."""
        return ratios(*(self.samples[f"{FLOPS}{name}, {self.name}"] for name in (arm, DENSE)))

    def above_dense(self, arm: str) -> Estimate:
        """Percent of loss of the new text above dense."""
        return percent_above(self.losses(arm), self.losses(DENSE))

    def both_above_dense(self, arm: str) -> Estimate:
        """Percent of loss of both texts above dense."""
        return percent_above(self.both(arm), self.both(DENSE))

    def gaps(self, arm: str) -> str:
        """Name an arm with both of its gaps to dense."""
        return f"{self.above_dense(arm).mean:+.2f}% and {self.both_above_dense(arm).mean:+.2f}%"


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Met when in the uncleaned update FLOPs, time, and the losses of the new text and of both are within their
    targets, and every rival is worse in both, in the new text with p < 0.05."""
    judgment = Judgment()
    update, clean = (Regime(name=name, samples=samples) for name in (UPDATE, CLEAN))
    gap, both = update.above_dense(METHOD), update.both_above_dense(METHOD)
    judgment.said.append(
        f"{UPDATE} from a stream of which {SHARE_OF_GARBAGE[UPDATE]:.0%} is garbage: held-out loss of the new text "
        f"{gap.mean:+.2f}% from dense at equal tokens, of new and old text {both.mean:+.2f}%"
    )
    what = "loss of the new text above dense"
    judgment.ask("held-out loss above dense", gap, "%", "<=", TARGET_LOSS, what=what)
    judgment.ask("loss of both texts above dense", both, "%", "<=", TARGET_LOSS)
    name, say = "executed FLOPs, method to dense", "{0.mean:.2f} of the FLOPs"
    flops = partial(update.flops, METHOD)
    judgment.ask(name, flops, "x", "<=", TARGET_FLOPS, what="executed FLOPs", say=say)
    name, what, say = "time of a step, method to dense", "time of a step", "{0.mean:.2f} of the time of a step"
    judgment.ask(
        name, lambda: ratios(samples[STEP + "method"], samples[STEP + "dense"]), "x", "<=", TARGET_TIME, what=what,
        say=say,
    )  # fmt: skip
    for rival in (*BASELINES, *BEHIND_THE_FILTER):
        with judgment.part():
            own, other = update.losses(METHOD), update.losses(rival)
            gap, both = differences(own, other), differences(update.both(METHOD), update.both(rival))
            what = f"difference to {rival}"
            judgment.ask(f"against {rival}", gap, "nats", "<", 0.0, what=f"new text: {what}")
            judgment.ask(f"against {rival}, both texts", both, "nats", "<", 0.0, what=f"both texts: {what}")
            otherwise = f"new text: not different from {rival} with p < 0.05 (p = {{p}})"
            judgment.differs(own, other, f"p-value against {rival}", otherwise)
    with judgment.beside():
        alone = ", ".join(f"{arm} {update.gaps(arm)}" for arm in BEHIND_THE_FILTER)
        judgment.said.append(f"the filter without the choice (new text, both texts): {alone}")
        cleaned = update.both_above_dense(CLEANED).mean
        judgment.said.append(f"a perfect cleaner before dense training would leave {cleaned:+.2f}%")
    with judgment.beside():
        others = [name for name in ARMS[CLEAN] if name not in (METHOD, DENSE)]
        beside = ", ".join(f"{name} {clean.gaps(name)}" for name in others)
        judgment.said.append(f"{CLEAN}: {clean.gaps(METHOD)} from dense ({beside})")
    for name in (f"{kind} before the update" for kind in KINDS):
        judgment.show(samples, {f"loss of the {name}": name}, "nats")
    for regime in (update, clean):
        for arm in regime.arms:
            judgment.ask(f"held-out loss, {arm}, {regime.name}", estimate(regime.losses(arm)), "nats")
            judgment.note(f"executed FLOPs, {arm}, {regime.name}", partial(regime.flops, arm), "x dense")
            name = f"loss of both texts above dense, {arm}, {regime.name}"
            judgment.ask(name, regime.both_above_dense(arm), "%")
    return judgment.verdict()


CLAIM = declared(__name__)
