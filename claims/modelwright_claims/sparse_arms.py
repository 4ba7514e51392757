"""The ways to train that the sparse claim compares: each at its best rate, a baseline at equal compute.

Knows no target but the one that decides how a run is made: the compute of a baseline.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelwright_claims.claim import Setting
from modelwright_claims.kept import setup_digest
from modelwright_claims.sparse_probe import Found, Run, TextKind, execute_all, prepare
from modelwright_claims.workbench import Size

UPDATE, CLEAN, PRETRAIN = "continual update", "clean continual update", "pretraining"
SHARE_OF_CODE = {UPDATE: 0.25, CLEAN: 0.2, PRETRAIN: 0.0}
SHARE_OF_GARBAGE = {UPDATE: 0.5, CLEAN: 0.0, PRETRAIN: 0.0}
COUNTS: dict[str, TextKind] = {UPDATE: "code", CLEAN: "code", PRETRAIN: "prose"}
"""The text whose held-out loss is compared."""
DENSE, METHOD, CLEANED = "dense", "rows by change", "dense, only useful rows"
AS_MUCH_TIME = "dense, as much time"
BASELINES = ("dense, fewer steps", AS_MUCH_TIME, "smaller dense", "random rows", "plain freezing")
LIMIT_ALONE = ("random rows within the limit", "dense within the limit", "dense within the limit, as much time")
"""The method's filter without its choice: of as many rows in a batch, or of whole batches of what passes."""
TARGET_FLOPS = 0.40
SIZE = Size(model_dim=96, num_layers=3, seq_len=128, batch_rows=12, num_steps=3000)
SMALLER = {"model_dim": 64, "num_layers": 3}
BEFORE = {"num_steps": 8000, "learning_rate": 3e-3}
"""The training whose model is then updated."""
BUDGETS = (0.2, 0.4, 0.6)
"""Shares of the dense run's FLOPs at which pretraining is compared."""
RATES: dict[str, tuple[float, ...]] = {
    UPDATE: (3e-4, 1e-3, 2e-3),
    CLEAN: (3e-4, 1e-3, 2e-3),
    PRETRAIN: (2e-3, 3.5e-3, 6e-3),
}
TUNING_SEED, SEEDS = 300, (301, 302, 303)
NUM_TIMED_STEPS, NUM_ROUNDS = 60, 3


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    sparse: as in a configuration file; shape: changes to the model; flops: it makes as many steps as this share of the
    dense run's FLOPs pays for, at most all; 0: all; equal_time: as many as take the method's time; num_batches: of
    rows that a step looks at, so that fewer steps read the same stream; cleaned: its stream is without garbage, and
    only as much shorter.
    """

    sparse: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, int] = field(default_factory=dict)
    flops: float = 0.0
    equal_time: bool = False
    num_batches: int = 1
    cleaned: bool = False


BY_CHANGE = {"signal": "change", "keep": 1 / 3, "probe_len": 8, "max_start_loss": 1.0}
WITHIN = {**BY_CHANGE, "signal": "random"}
FILTERED = Arm(sparse={"batch": {**WITHIN, "keep": 0.5}}, num_batches=2)
"""Twice the rows, of which about half pass and all of these are learned: dense batches of what the limit leaves."""
BY_LOSS = {"signal": "loss", "keep": 1 / 3, "probe_len": 16, "explore": 0.2, "dense_share": 0.03}

BASELINE_FORMS = {
    "dense, fewer steps": Arm(),
    "smaller dense": Arm(shape=SMALLER),
    "random rows": Arm(sparse={"batch": {"signal": "random", "keep": 0.4}}),
    "plain freezing": Arm(sparse={"kind": "prefix", "keep": 0.25}),
}
FORMS = BASELINE_FORMS | {
    "rows by loss": Arm(sparse={"batch": BY_LOSS}),
    "columns": Arm(sparse={"kind": "columns", "keep": 0.25}),
    "weight rows": Arm(sparse={"kind": "rows", "keep": 0.25}),
    "layers": Arm(sparse={"kind": "layers", "keep": 0.5, "signal": "momentum"}),
    "growing prefix": Arm(sparse={"kind": "prefix", "keep": 0.25, "course": "dense_first", "ramp": 0.6}),
}


def at_budget(form: str, budget: float) -> str:
    """The name of a form's arm in pretraining."""
    return f"{form}, {budget:g} of the FLOPs"


ARMS: dict[str, dict[str, Arm]] = {
    UPDATE: {
        DENSE: Arm(),
        **{name: replace(arm, flops=TARGET_FLOPS) for name, arm in BASELINE_FORMS.items()},
        AS_MUCH_TIME: Arm(equal_time=True),
        "random rows within the limit": Arm(sparse={"batch": WITHIN}),
        "dense within the limit": replace(FILTERED, flops=TARGET_FLOPS),
        "dense within the limit, as much time": replace(FILTERED, equal_time=True),
        CLEANED: Arm(flops=TARGET_FLOPS, cleaned=True),
        METHOD: Arm(sparse={"batch": BY_CHANGE}),
    },
    CLEAN: {
        DENSE: Arm(),
        AS_MUCH_TIME: Arm(equal_time=True),
        METHOD: Arm(sparse={"batch": BY_CHANGE}),
    },
    PRETRAIN: {
        DENSE: Arm(),
        **{at_budget(name, budget): replace(arm, flops=budget) for name, arm in FORMS.items() for budget in BUDGETS},
    },
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one regime gave: rates and finals by arm, one final for each seed."""

    regime: str
    rates: Mapping[str, float]
    final: Mapping[str, Sequence[Found]]

    def losses(self, arm: str) -> list[float]:
        return [found.losses[COUNTS[self.regime]] for found in self.final[arm]]

    def flops(self, arm: str) -> float:
        return statistics.fmean(found.flops for found in self.final[arm])

    def both(self, arm: str) -> float:
        """The mean loss of both texts in their proportion in the stream."""
        return statistics.fmean(mixed_loss(found, self.regime) for found in self.final[arm])

    def above_dense(self, arm: str) -> list[float]:
        """Percent, seed by seed."""
        pairs = zip(self.losses(arm), self.losses(DENSE), strict=True)
        return [100 * (mine / dense - 1) for mine, dense in pairs]

    def both_above_dense(self, arm: str) -> float:
        """Percent."""
        return 100 * (self.both(arm) / self.both(DENSE) - 1)


@dataclass
class Bench:
    """Makes runs of the arms of all regimes, two processes of one thread at a time."""

    setting: Setting
    folder: Path
    sizes: Mapping[str, Size]
    rates: Mapping[str, Sequence[float]]
    seeds: Sequence[int]
    step_s: dict[str, float] = field(default_factory=dict)
    """Seconds of a step of the method and of what gets as much time; once `times` has measured them."""
    before: dict[str, Found] = field(default_factory=dict)
    """By file of weights: what the models that are updated are before."""

    def begin(self, size: Size) -> None:
        """Make the text, and the models that are updated."""
        prepare(self.folder, seq_len=size.seq_len, fraction=0.15 if self.setting.quick else 1.0)
        runs = [
            Run(name=name, regime="before", size=replace(size, **shape), seed=0, share_of_code=0.0, keep=name)
            for name, shape in ((weights_of(Arm()), {}), (weights_of(Arm(shape=SMALLER)), SMALLER))
        ]
        self.before = {run.keep: found for run, found in zip(runs, self.execute(runs), strict=True)}

    def run(self, regime: str, name: str, *, seed: int, rate: float, num_steps: int) -> Run:
        arm = ARMS[regime][name]
        garbage = SHARE_OF_GARBAGE[regime]
        return Run(
            name=name,
            regime=regime,
            size=replace(
                self.sizes[regime],
                **arm.shape,
                batch_rows=self.sizes[regime].batch_rows * arm.num_batches,
                learning_rate=rate,
                num_steps=num_steps,
            ),
            seed=seed,
            share_of_code=SHARE_OF_CODE[regime] / (1.0 - garbage) if arm.cleaned else SHARE_OF_CODE[regime],
            share_of_garbage=0.0 if arm.cleaned else garbage,
            sparse=arm.sparse,
            begin="" if regime == PRETRAIN else weights_of(arm),
        )

    def execute(self, runs: Sequence[Run]) -> list[Found]:
        return execute_all(self.folder, runs, self.setting, kept=self.kept, processes=2)

    @property
    def kept(self) -> Path:
        """Losses and weights, by the sources and the machine that gave them: a call that was interrupted goes on."""
        if self.setting.kept is None or self.setting.quick:
            return self.folder
        return self.setting.kept / f"sparse_updates-{setup_digest()}"

    def num_steps(self, regime: str) -> dict[str, int]:
        """Steps of each arm's run: all that read the stream, or what so many FLOPs or the method's time pay for."""
        rate, most = self.rates[regime][0], self.sizes[regime].num_steps
        arms = ARMS[regime]
        names = [name for name, arm in arms.items() if arm.flops or name == DENSE]
        looks = self.execute([self.run(regime, name, seed=0, rate=rate, num_steps=5) for name in names])
        dense = looks[names.index(DENSE)].flops
        paid = {name: arms[name].flops * most * dense / look.flops for name, look in zip(names, looks, strict=True)}
        paid[DENSE] = most
        paid |= {name: self.share_of_time(name) * most for name, arm in arms.items() if arm.equal_time}
        return {name: min(most // arm.num_batches, round(paid.get(name, most))) for name, arm in arms.items()}

    def share_of_time(self, arm: str) -> float:
        """How many of this arm's steps take a step of the method's time, in twentieths, rounded up."""
        return math.ceil(20 * self.step_s[METHOD] / self.step_s[arm]) / 20

    def compare(self, regime: str) -> Outcome:
        """Every arm at the best of the same rates on the tuning seed; then on the other seeds."""
        steps, rates = self.num_steps(regime), self.rates[regime]
        tried = [
            self.run(regime, name, seed=TUNING_SEED, rate=rate, num_steps=num_steps)
            for name, num_steps in steps.items()
            for rate in rates
        ]
        losses: dict[str, dict[float, float]] = {name: {} for name in steps}
        for run, found in zip(tried, self.execute(tried), strict=True):
            losses[run.name][run.size.learning_rate] = mixed_loss(found, regime)
        best = {name: min(of_arm, key=of_arm.__getitem__) for name, of_arm in losses.items()}
        runs = [
            self.run(regime, name, seed=seed, rate=best[name], num_steps=num_steps)
            for name, num_steps in steps.items()
            for seed in self.seeds
        ]
        found = iter(self.execute(runs))
        return Outcome(regime=regime, rates=best, final={name: [next(found) for _ in self.seeds] for name in steps})

    def times(self) -> tuple[list[float], list[float]]:
        """Seconds of a step of the method and of dense, in alternated runs of a process that has the machine."""
        rate, names = self.rates[UPDATE][0], (METHOD, AS_MUCH_TIME, LIMIT_ALONE[-1])
        runs = [
            self.run(UPDATE, name, seed=900 + number, rate=rate, num_steps=NUM_TIMED_STEPS)
            for number in range(NUM_ROUNDS)
            for name in names
        ]
        found = execute_all(self.folder, runs, self.setting, kept=self.kept, processes=1, timed=True)
        seconds = {name: [one.step_s for one in found[place :: len(names)]] for place, name in enumerate(names)}
        self.step_s = {name: statistics.median(of) for name, of in seconds.items()}
        return seconds[METHOD], seconds[AS_MUCH_TIME]


def share_of_time(mine: Sequence[float], dense: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(mine, dense, strict=True))


def mixed_loss(found: Found, regime: str) -> float:
    """Of both texts in their proportion in the regime's stream."""
    code = SHARE_OF_CODE[regime] / (1.0 - SHARE_OF_GARBAGE[regime])
    return (1 - code) * found.losses["prose"] + code * found.losses["code"]


def weights_of(arm: Arm) -> str:
    return "small.safetensors" if arm.shape else "base.safetensors"
