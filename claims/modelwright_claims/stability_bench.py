"""The bench of claims on stable training: how many steps a run takes to a fixed held-out loss, calm or among wild
batches.

A wild batch has random labels, and its loss counts many times as much: what broken data or a broken loss weight does.
Every arm has its own rate, tuned with the same budget on a seed of its own; the target is what the plain arm reaches
there after three quarters of its steps, so it is fixed before the runs that count. Knows no technique.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelwright.core.errors import ModelwrightError
from modelwright.core.records import column, read_records
from modelwright.core.rundir import StageDir
from modelwright.core.seeds import derive_seed
from modelwright.data.batch import IGNORED, TokenBatch
from modelwright.data.loader import PackedLoader
from modelwright.model.decoder import Decoder
from modelwright.objectives.pretrain import Pretrain
from modelwright.optim.schedule import ScheduleConfig
from modelwright.parallel.gradient_sync import GradientTransport
from modelwright.parallel.mesh import single
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.objective import Objective
from modelwright_claims import workbench
from modelwright_claims.claim import Figure, Result, Setting
from modelwright_claims.statistics import paired_t_test, spread

NUM_EVALUATIONS = 25
HELDOUT_BATCHES = 2
"""Of 32 rows: enough to tell runs apart, and little beside the training."""
TUNING_SEED = 3000
FIRST_SEED = 3001
CONSTANT = ScheduleConfig(kind="constant", warmup_fraction=0.05)
"""Under a rate that falls to zero a loss is reached when the schedule wants it."""
FAR_PART = 0.75
RATES = (5e-4, 1e-3, 2e-3, 6e-3)
"""What every arm chooses from."""
TOO_SHORT = "the quick form only shows that the measurement runs; measure without --quick"


@dataclass(frozen=True, kw_only=True)
class Wild:
    """Every `every`-th batch from `first` on counts `factor` times as much, with random labels."""

    every: int = 25
    first: int = 20
    factor: float = 20.0

    def is_wild(self, number: int) -> bool:
        return number >= self.first and (number - self.first) % self.every == 0


@dataclass
class WildBatches(Objective):
    """An objective with wild batches in training; evaluation stays as it is."""

    inner: Pretrain
    wild: Wild
    vocab_size: int
    seed: int
    is_wild: bool = False

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        found = self.inner.batches(model, first=first, rank=rank, world_size=world_size)
        for number, batch in enumerate(found, start=first):
            self.is_wild = self.wild.is_wild(number)
            yield self._spoil(batch, number) if self.is_wild else batch

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        return self.inner.weights(batch)

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Mapping[str, Tensor]:
        factor = self.wild.factor if self.is_wild and torch.is_grad_enabled() else 1.0
        return {name: factor * loss for name, loss in self.inner.losses(output, batch, model).items()}

    def _spoil(self, batch: TokenBatch, number: int) -> TokenBatch:
        draw = torch.Generator().manual_seed(derive_seed(self.seed, "wild", number))
        labels = torch.randint(self.vocab_size, batch.labels_BT.shape, generator=draw)
        labels = torch.where(batch.labels_BT == IGNORED, IGNORED, labels)
        return TokenBatch(
            input_ids_BT=batch.input_ids_BT,
            labels_BT=labels,
            positions_BT=batch.positions_BT,
            segments_BT=batch.segments_BT,
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run went. curve: (step, held-out loss); losses: of each step; skipped: steps without an update; ended: why
    it gave up, "" when it did not; wall_s: without text and packing."""

    curve: Sequence[tuple[int, float]]
    losses: Sequence[float]
    skipped: Sequence[int]
    records: Sequence[Mapping[str, Any]]
    ended: str
    wall_s: float

    @property
    def final_loss(self) -> float:
        """Mean of the last three evaluations; infinite for a run that gave up or diverged."""
        last = [loss for _, loss in self.curve[-3:]]
        return statistics.fmean(last) if last and not self.ended and all(map(math.isfinite, last)) else math.inf

    def steps_to(self, target: float) -> float:
        """Steps until the held-out loss is down to the target, between evaluations on a straight line; infinite when it
        never is."""
        if self.curve and self.curve[0][1] <= target:
            return self.curve[0][0]
        for (before, above), (step, loss) in pairwise(self.curve):
            if loss <= target:
                return step - (step - before) * (target - loss) / (above - loss)
        return math.inf


def run(
    setting: Setting,
    text: workbench.Text,
    size: workbench.Size,
    config: TrainConfig,
    *,
    seed: int,
    wild: Wild | None = None,
    transport: GradientTransport | None = None,
    wrap: Callable[[Pretrain], Objective] = lambda objective: objective,
) -> Outcome:
    """One run of THE loop from `seed`'s weights in `seed`'s order; wrap: of the objective, where no batch is wild."""
    model = Decoder(size.model_config(text.vocab_size))
    model.init_weights(derive_seed(seed, "weights"))
    rows = workbench.packed_rows(setting, text, seq_len=size.seq_len, mode="best_fit", split="train")
    heldout = workbench.packed_rows(setting, text, seq_len=size.seq_len, mode="best_fit", split="heldout")
    loader = PackedLoader(rows, batch_rows=size.batch_rows, seed=derive_seed(seed, "order"))
    objective = Pretrain(loader)
    ended, started = "", time.perf_counter()
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        try:
            train(
                model,
                WildBatches(objective, wild, text.vocab_size, seed) if wild else wrap(objective),
                config,
                num_steps=config.num_steps,
                world=single(workbench.device()),
                stage=StageDir(Path(folder)),
                seed=seed,
                name=f"seed {seed}",
                input_digest="claim",
                progress=setting.progress,
                heldout=list(islice(heldout.batches(32), HELDOUT_BATCHES)),
                gradient_sync=transport,
            )
        except ModelwrightError as error:
            ended = str(error)
        records = read_records(StageDir(Path(folder)).metrics)
    return Outcome(
        curve=column(records, "heldout_loss"),
        losses=[loss for _, loss in column(records, "loss")],
        skipped=[int(record["step"]) for record in records if record.get("skipped")],
        records=records,
        ended=ended,
        wall_s=time.perf_counter() - started,
    )


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is compared: settings by arm, the first of which is the plain one; `main`, the arm that the verdict is
    about; rivals: arms that it has to beat among wild batches as it does the plain one."""

    arms: Mapping[str, Mapping[str, Any]]
    main: str
    rates: Sequence[float] = RATES
    rivals: Sequence[str] = ()
    regimes: Mapping[str, Wild | None] = field(default_factory=lambda: {"calm": None, "wild batches": Wild()})

    @property
    def plain(self) -> str:
        return next(iter(self.arms))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One regime. rates: the best of each arm; tuning: final losses by rate; runs: the outcomes by seed."""

    target: float
    rates: Mapping[str, float]
    tuning: Mapping[str, Sequence[float]]
    runs: Mapping[str, Sequence[Outcome]]

    def steps(self, arm: str, longest: int) -> list[float]:
        """By seed; a run that never gets there counts as all of its steps."""
        return [min(outcome.steps_to(self.target), longest) for outcome in self.runs[arm]]

    def num_missed(self, arm: str) -> int:
        return sum(math.isinf(outcome.steps_to(self.target)) for outcome in self.runs[arm])


def study_size(setting: Setting) -> workbench.Size:
    """Some 0.1 million parameters: some seconds a run on one core."""
    return workbench.Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=25 if setting.quick else 500)


def eval_every(size: workbench.Size) -> int:
    """Steps."""
    return max(5, size.num_steps // NUM_EVALUATIONS)


def compare(setting: Setting, study: Study, size: workbench.Size) -> dict[str, Comparison]:
    """All regimes: tune each arm, fix the target, run paired seeds. In quick mode the middle rate and two seeds."""
    text = workbench.prepare_text(setting)
    rates = [study.rates[len(study.rates) // 2]] if setting.quick else study.rates
    seeds = range(FIRST_SEED, FIRST_SEED + (2 if setting.quick else 5))
    found = {}
    for regime, wild in study.regimes.items():

        def outcome(arm: str, rate: float, seed: int, wild: Wild | None = wild) -> Outcome:
            config = size.train_config(
                learning_rate=rate, schedule=CONSTANT, eval_every_steps=eval_every(size), **study.arms[arm]
            )
            return run(setting, text, size, config, seed=seed, wild=wild)

        tuning = {arm: [outcome(arm, rate, TUNING_SEED) for rate in rates] for arm in study.arms}
        losses = {arm: [one.final_loss for one in of] for arm, of in tuning.items()}
        best = {arm: min(zip(of, rates, strict=True))[1] for arm, of in losses.items()}
        plain = min(tuning[study.plain], key=lambda one: one.final_loss)
        far = [loss for step, loss in plain.curve if step <= FAR_PART * size.num_steps and math.isfinite(loss)]
        found[regime] = Comparison(
            target=min(far),
            rates=best,
            tuning=losses,
            runs={arm: [outcome(arm, best[arm], seed) for seed in seeds] for arm in study.arms},
        )
    return found


def judge(setting: Setting, study: Study, size: workbench.Size, found: Mapping[str, Comparison], gain: float) -> Result:
    """Met when the main arm needs fewer steps than the plain one and than each rival by a factor of `gain` and with
    p < 0.05 where batches are wild, and is not slower than the plain one with p < 0.05 where all is calm."""
    met, reasons = True, []
    figures = {f"fewer steps, {regime}": _fewer(one, study, study.main, size) for regime, one in found.items()}
    samples: dict[str, Sequence[float]] = {}
    for regime, comparison in found.items():
        steps = {arm: comparison.steps(arm, size.num_steps) for arm in study.arms}
        for arm, of in steps.items():
            figures[f"steps to the loss, {arm}, {regime}"] = Figure(
                value=statistics.fmean(of), unit="steps", spread=spread(of)
            )
            if arm not in (study.plain, study.main):
                figures[f"fewer steps, {arm}, {regime}"] = _fewer(comparison, study, arm, size)
            finals = [outcome.final_loss for outcome in comparison.runs[arm]]
            ended = [loss for loss in finals if math.isfinite(loss)]
            if ended:
                loss = Figure(value=statistics.fmean(ended), unit="nats", spread=spread(ended))
                figures[f"held-out loss at the end, {arm}, {regime}"] = loss
            figures[f"best rate, {arm}, {regime}"] = Figure(value=comparison.rates[arm], unit="")
            samples |= {f"steps, {arm}, {regime}": of, f"tuning, {arm}, {regime}": comparison.tuning[arm]}
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
            "rates tried": ", ".join(f"{rate:g}" for rate in study.rates),
            "wild batches": "random labels, loss x 20, every 25th batch from the 20th on",
            "schedule": "warmup over 5%, then constant",
            **{f"target, {regime}": round(comparison.target, 4) for regime, comparison in found.items()},
        },
        samples=samples,
    )


def _fewer(comparison: Comparison, study: Study, arm: str, size: workbench.Size) -> Figure:
    """How many times as many steps the plain arm takes."""
    pairs = zip(*(comparison.steps(name, size.num_steps) for name in (study.plain, arm)), strict=True)
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
