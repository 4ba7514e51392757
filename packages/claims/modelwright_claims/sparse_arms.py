"""The ways to train that the sparse claim compares: each at its best rate, a baseline at equal compute."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modelwright_claims.claim import Setting
from modelwright_claims.experiment import Experiment, Runner, Tuning, run_experiment
from modelwright_claims.mixed_text import Mixture
from modelwright_claims.training_run import Outcome, Processes, Run
from modelwright_claims.workbench import KINDS, Size, TextKind

UPDATE, CLEAN, PRETRAIN = "continual update", "clean continual update", "pretraining"
SHARE_OF_CODE = {UPDATE: 0.25, CLEAN: 0.2, PRETRAIN: 0.0}
SHARE_OF_GARBAGE = {UPDATE: 0.5, CLEAN: 0.0, PRETRAIN: 0.0}
COUNTS: dict[str, TextKind] = {UPDATE: "code", CLEAN: "code", PRETRAIN: "prose"}
"""The text whose held-out loss is compared."""
DENSE, METHOD, CLEANED = "dense", "rows by change", "dense, only useful rows"
AS_MUCH_TIME = "dense, as much time"
BASELINES = ("dense, fewer steps", AS_MUCH_TIME, "smaller dense", "random rows", "plain freezing")
BEHIND_THE_FILTER = ("random rows within the limit", "dense within the limit", "dense within the limit, as much time")
"""Rivals behind the method's filter, but without its choice: random rows, or dense batches of what passes."""
TARGET_FLOPS = 0.40
SIZE = Size(model_dim=96, num_layers=3, seq_len=128, batch_rows=12, num_steps=3000)
SMALLER = {"model_dim": 64, "num_layers": 3}
BEFORE = {"num_steps": 8000, "learning_rate": 3e-3}
"""The training whose model is then updated."""
UNTIED = {"tie_embeddings": False}
ONE_THREAD = Processes(threads=1)
BUDGETS = (0.2, 0.4, 0.6)
"""Shares of the dense run's FLOPs at which pretraining is compared."""
RATES: dict[str, tuple[float, ...]] = {
    UPDATE: (3e-4, 1e-3, 2e-3),
    CLEAN: (3e-4, 1e-3, 2e-3),
    PRETRAIN: (2e-3, 3.5e-3, 6e-3),
}
TUNING_SEED, SEEDS = 300, (301, 302, 303)
NUM_TIMED_STEPS, NUM_ROUNDS, FIRST_TIMED_SEED = 60, 3, 900


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    settings: as in a configuration file; shape: changes to the model; flops: it makes as many steps as this share of
    the dense run's FLOPs pays for, at most all; 0: all; equal_time: as many as take the method's time; num_batches: of
    rows that a step looks at, so that fewer steps read the same stream; cleaned: its stream is without garbage, and
    only as much shorter.
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
"""Twice the rows, of which about half pass and all of these are learned: dense batches of what the limit leaves."""
BY_LOSS = {
    "signal": "loss",
    "keep_fraction": 1 / 3,
    "probe_tokens": 16,
    "random_fraction": 0.2,
    "dense_fraction": 0.03,
}

BASELINE_FORMS = {
    "dense, fewer steps": Arm(),
    "smaller dense": Arm(shape=SMALLER),
    "random rows": Arm(settings={"batch_selection": {"signal": "random", "keep_fraction": 0.4}}),
    "plain freezing": Arm(settings={"sparse_updates": {"kind": "freeze_prefix", "keep_fraction": 0.25}}),
}
FORMS = BASELINE_FORMS | {
    "rows by loss": Arm(settings={"batch_selection": BY_LOSS}),
    "columns": Arm(settings={"sparse_updates": {"kind": "columns", "keep_fraction": 0.25}}),
    "weight rows": Arm(settings={"sparse_updates": {"kind": "rows", "keep_fraction": 0.25}}),
    "layers": Arm(settings={"sparse_updates": {"kind": "layers", "keep_fraction": 0.5, "signal": "momentum"}}),
    "growing prefix": Arm(
        settings={
            "sparse_updates": {
                "kind": "freeze_prefix",
                "keep_fraction": 0.25,
                "density_schedule": "dense_first",
                "ramp_fraction": 0.6,
            }
        }
    ),
}


def at_budget(form: str, budget: float) -> str:
    """The name of a form's arm in pretraining."""
    return f"{form}, {budget:g} of the FLOPs"


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
    CLEAN: {
        DENSE: Arm(),
        AS_MUCH_TIME: Arm(equal_time=True),
        METHOD: Arm(settings={"batch_selection": BY_CHANGE}),
    },
    PRETRAIN: {
        DENSE: Arm(),
        **{at_budget(name, budget): replace(arm, flops=budget) for name, arm in FORMS.items() for budget in BUDGETS},
    },
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One regime: the arms at their best rates, one outcome for each seed."""

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
            start_from=None if regime == PRETRAIN else self.base(arm),
        )

    def num_steps(self, regime: str) -> dict[str, int]:
        """Return the steps of each arm's run: all that read the stream, or what its FLOPs or its time pay for."""
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
