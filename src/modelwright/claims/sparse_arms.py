"""The ways to train that the sparse claim compares: each at its best rate, a baseline at equal compute.

Knows no target but the one that decides how a run is made: the compute of a baseline.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelwright.claims.claim import Setting
from modelwright.claims.kept import setup_digest
from modelwright.claims.sparse_probe import Found, Run, TextKind, execute_all, prepare
from modelwright.claims.workbench import Size

UPDATE, CLEAN, PRETRAIN = "continual update", "clean continual update", "pretraining"
SHARE_OF_CODE = {UPDATE: 0.25, CLEAN: 0.2, PRETRAIN: 0.0}
SHARE_OF_GARBAGE = {UPDATE: 0.5, CLEAN: 0.0, PRETRAIN: 0.0}
COUNTS: dict[str, TextKind] = {UPDATE: "code", CLEAN: "code", PRETRAIN: "prose"}
"""The text whose held-out loss is compared."""
DENSE, METHOD, CLEANED = "dense", "rows by change", "dense, only useful rows"
BASELINES = (
    "dense, fewer steps",
    "dense, as much time",
    "smaller dense",
    "random rows",
    "random rows within the limit",
    "plain freezing",
)
TARGET_FLOPS = 0.40
SIZE = Size(model_dim=96, num_layers=3, seq_len=128, batch_rows=12, num_steps=3000)
SMALLER = {"model_dim": 64, "num_layers": 3}
BEFORE = {"num_steps": 8000, "learning_rate": 3e-3}
"""The training whose model is then updated."""
RATES: dict[str, tuple[float, ...]] = {UPDATE: (3e-4, 1e-3, 2e-3), CLEAN: (3e-4, 1e-3, 2e-3), PRETRAIN: (2e-3, 6e-3)}
TUNING_SEED, SEEDS = 300, (301, 302, 303)
NUM_TIMED_STEPS, NUM_ROUNDS = 60, 3


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train. sparse: as in a configuration file; shape: changes to the model; equal_compute: it makes as
    many steps as `TARGET_FLOPS` of the dense run's FLOPs pay for, at most as many as that; equal_time: as many as take
    the method's time; cleaned: its stream is without garbage, and only as much shorter."""

    sparse: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, int] = field(default_factory=dict)
    equal_compute: bool = False
    equal_time: bool = False
    cleaned: bool = False


BY_CHANGE = {"signal": "change", "keep": 1 / 3, "probe_len": 8, "max_start_loss": 1.0}
WITHIN = {"signal": "random", "keep": 1 / 3, "probe_len": 8, "max_start_loss": 1.0}
"""The limit alone: what it leaves is drawn from, so many rows as the method learns."""
BY_LOSS = {"signal": "loss", "keep": 1 / 3, "probe_len": 16, "explore": 0.2, "dense_share": 0.03}

COMMON = {
    DENSE: Arm(),
    "dense, fewer steps": Arm(equal_compute=True),
    "smaller dense": Arm(shape=SMALLER, equal_compute=True),
    "random rows": Arm(sparse={"batch": {"signal": "random", "keep": 0.4}}, equal_compute=True),
    "plain freezing": Arm(sparse={"kind": "prefix", "keep": 0.25}, equal_compute=True),
}
ARMS: dict[str, dict[str, Arm]] = {
    UPDATE: {
        **COMMON,
        "dense, as much time": Arm(equal_time=True),
        "random rows within the limit": Arm(sparse={"batch": WITHIN}),
        CLEANED: Arm(equal_compute=True, cleaned=True),
        METHOD: Arm(sparse={"batch": BY_CHANGE}),
    },
    CLEAN: {
        DENSE: Arm(),
        "dense, as much time": Arm(equal_time=True),
        METHOD: Arm(sparse={"batch": BY_CHANGE}),
    },
    PRETRAIN: {
        **COMMON,
        "rows by loss": Arm(sparse={"batch": BY_LOSS}),
        "columns": Arm(sparse={"kind": "columns", "keep": 0.25}),
        "weight rows": Arm(sparse={"kind": "rows", "keep": 0.25}),
        "layers": Arm(sparse={"kind": "layers", "keep": 0.5, "signal": "momentum"}),
        "growing prefix": Arm(sparse={"kind": "prefix", "keep": 0.25, "course": "dense_first", "ramp": 0.6}),
        "attended tokens": Arm(sparse={"batch": {"keep_tokens": 0.5}}),
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
    tuning_share: Mapping[str, float] = field(default_factory=lambda: {UPDATE: 1.0, CLEAN: 1.0, PRETRAIN: 1 / 4})
    """Of an update's steps all: shorter runs forget more at the same rate, which drove every arm to the lowest."""
    time_share: float = 1.0
    """Of a dense step's time that the method's takes, in twentieths, rounded up; once `times` has measured it."""
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
            size=replace(self.sizes[regime], **arm.shape, learning_rate=rate, num_steps=num_steps),
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
        """Steps of each arm's run: those of the dense one, or what so many FLOPs pay for."""
        rate, most = self.rates[regime][0], self.sizes[regime].num_steps
        arms = ARMS[regime]
        names = [name for name, arm in arms.items() if arm.equal_compute or name == DENSE]
        looks = self.execute([self.run(regime, name, seed=0, rate=rate, num_steps=5) for name in names])
        paid = {
            name: TARGET_FLOPS * most * looks[names.index(DENSE)].flops / look.flops
            for name, look in zip(names, looks, strict=True)
            if arms[name].equal_compute
        }
        paid |= {name: self.time_share * most for name, arm in arms.items() if arm.equal_time}
        return {name: min(most, round(paid.get(name, most))) for name in arms}

    def compare(self, regime: str) -> Outcome:
        """Every arm at the best of the same rates on the tuning seed; then on the other seeds."""
        steps, rates = self.num_steps(regime), self.rates[regime]
        tried = [
            self.run(regime, name, seed=TUNING_SEED, rate=rate, num_steps=round(num_steps * self.tuning_share[regime]))
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
        rate = self.rates[UPDATE][0]
        runs = [
            self.run(UPDATE, name, seed=900 + number, rate=rate, num_steps=NUM_TIMED_STEPS)
            for number in range(NUM_ROUNDS)
            for name in (METHOD, DENSE)
        ]
        found = execute_all(self.folder, runs, self.setting, kept=self.kept, processes=1, timed=True)
        mine, dense = [one.step_s for one in found[::2]], [one.step_s for one in found[1::2]]
        self.time_share = min(1.0, math.ceil(20 * share_of_time(mine, dense)) / 20)
        return mine, dense


def share_of_time(mine: Sequence[float], dense: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(mine, dense, strict=True))


def mixed_loss(found: Found, regime: str) -> float:
    """Of both texts in their proportion in the regime's stream."""
    code = SHARE_OF_CODE[regime] / (1.0 - SHARE_OF_GARBAGE[regime])
    return (1 - code) * found.losses["prose"] + code * found.losses["code"]


def weights_of(arm: Arm) -> str:
    return "small.safetensors" if arm.shape else "base.safetensors"
