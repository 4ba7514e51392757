"""Claim: a dynamic loss scale keeps FP16 training stable where no scale and a static one do not.

The run is the part of one process in a batch of half a million tokens: its rows stand for those of 1,024 processes,
whose shares of the gradient are summed after they were computed in FP16. So each share is a thousandth of the
gradient, and underflows without a scale; under a static scale that is too large every update overflows. The dynamic
one starts as far off. An update is stable when it is made and its gradient survives: not skipped for an overflow, and
at most a tenth of the elements of the blocks' matrices lost to underflow (exactly zero; in FP32 none is). FP16
products are computed as FP16 on any processor, on most CPUs slowly.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelwright.data.rows.batch import TokenBatch
from modelwright.model.decoder import Decoder
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import single
from modelwright.train.job import all_reduce_by
from modelwright.train.objective import Objective, Terms
from modelwright_claims import stability_bench as bench
from modelwright_claims import workbench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.experiment import Experiment, run_experiment
from modelwright_claims.judging import Judgment
from modelwright_claims.statistics import differences, paired_t_test, ratios
from modelwright_claims.training_run import Outcome, Run, train_once

MOST_LOST = 0.1
"""Share of the gradient's elements."""
TARGET = 3.7
GAIN = 1.4
COPIES = 2.0**10
"""Processes whose rows ours stand for."""
TOO_LARGE = 2.0**32
FIRST_SEED = 4001
WINDOW = 10
"""Updates until the scale grows: in proportion to runs this short, where 2,000 is usual."""
NONE, STATIC, DYNAMIC, FP32 = "no scale", "static 2^32", "dynamic from 2^32", "FP32"
FITS = "static 2^15", "dynamic from 2^15"
"""Scales that fit this run from the beginning."""
LOST = "gradient lost"
RIVALS = (NONE, FITS[0], STATIC)
STABLE, SKIPPED, GRADIENT_LOST, LOSS = "stable updates, ", "skipped updates, ", "gradient lost, ", "held-out loss, "
PROJECTIONS = 7
"""Projections of a block."""


def fp16(**scale: Any) -> dict[str, Any]:
    """Return the settings of FP16 with a loss scale."""
    return {"policy": "fp16_mixed", "eval_dtype": "fp32", "loss_scale": {"max_scale": 2.0**40, **scale}}


ARMS: dict[str, dict[str, Any]] = {
    NONE: fp16(enabled="never"),
    FITS[0]: fp16(dynamic=False),
    STATIC: fp16(dynamic=False, init_scale=TOO_LARGE),
    FITS[1]: fp16(growth_interval=WINDOW),
    DYNAMIC: fp16(init_scale=TOO_LARGE, growth_interval=WINDOW),
    FP32: {"policy": "fp32"},
}


@dataclass
class OneOfMany(Objective):
    """An objective whose batches are one process's part of larger ones; evaluation is unchanged."""

    inner: NextToken

    def batches(self, model: Decoder, *, first: int, rank: int, world_size: int) -> Iterator[TokenBatch]:
        return self.inner.batches(model, first=first, rank=rank, world_size=world_size)

    def weights(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        copies = COPIES if torch.is_grad_enabled() else 1.0
        return {name: copies * weight for name, weight in self.inner.weights(batch).items()}

    def losses(self, output: Tensor, batch: TokenBatch, model: Decoder) -> Terms:
        return self.inner.losses(output, batch, model)


@dataclass
class Lost:
    """A transport that sums `COPIES` shares like this one, and notes at every step which part of the matrices' is
    exactly zero.

    num_layers: their matrices follow the embedding's, whose rows of tokens that a batch has not are zero by right.
    """

    num_layers: int
    bytes_sent: int = 0
    shares: list[float] = field(default_factory=list)

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        last = 1 + PROJECTIONS * self.num_layers
        matrices = [one for one in gradients if one.dim() == 2][1:last]
        zeros = sum(int((one == 0).sum()) for one in matrices)
        self.shares.append(zeros / sum(one.numel() for one in matrices))
        torch._foreach_mul_(list(gradients), COPIES)  # pyright: ignore

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def stability(outcome: Outcome) -> dict[str, float]:
    """Return how a run went: updates that were stable and skipped, the mean share of the gradient that was lost (all of
    it in an update that was skipped), and the last loss.
    """
    skipped = set(outcome.skipped)
    shares = [1.0 if step in skipped else share for step, share in enumerate(outcome.steps[LOST], start=1)]
    stable = sum(share <= MOST_LOST for share in shares)
    return {
        STABLE: float(stable), SKIPPED: float(len(skipped)), GRADIENT_LOST: statistics.fmean(shares),
        LOSS: outcome.final_loss,
    }  # fmt: skip


def measure(setting: Setting) -> Measurement:
    size = study_size(setting)
    seeds = range(FIRST_SEED, FIRST_SEED + (2 if setting.quick else 5))
    experiment = Experiment(variants={arm: variant(size, precision) for arm, precision in ARMS.items()}, seeds=seeds)
    samples = run_experiment(setting, experiment, execute_noting_losses)
    found = {arm: list(map(stability, of)) for arm, of in samples.runs.items()}
    whats = (STABLE, SKIPPED, GRADIENT_LOST, LOSS)
    return Measurement(
        samples={f"{what}{arm}": [run[what] for run in of] for what in whats for arm, of in found.items()},
        conditions=size.describe()
        | {
            "most of the gradient lost": f"{100 * MOST_LOST:.0f}%",
            "window": WINDOW,
            "copies that a process stands for": COPIES,
        },
    )


def study_size(setting: Setting) -> workbench.Size:
    """Small models: FP16 is slow on most CPUs."""
    if setting.quick:
        return workbench.Size(model_dim=64, num_layers=1, seq_len=32, batch_rows=8, num_steps=10, learning_rate=3e-3)
    return workbench.Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=80, learning_rate=3e-3)


def variant(size: workbench.Size, precision: dict[str, Any]) -> Run:
    return Run(
        size=size,
        settings={
            "precision": precision,
            "eval_every_steps": size.num_steps // 5,
            "max_skipped_steps": size.num_steps + 1,
        },
        heldout_batches=bench.HELDOUT_BATCHES,
    )


def execute_noting_losses(setting: Setting, run: Run, **weights: Path | None) -> Outcome:
    """Make a run as one process of many; the outcome has the share of the gradient that each step lost."""
    lost = Lost(run.size.num_layers)
    outcome = train_once(setting, run, single(workbench.device()), wrap=OneOfMany, strategy=all_reduce_by(lost))
    return replace(outcome, steps={**outcome.steps, LOST: lost.shares})


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """None at all counts as one stable update."""
    judgment = Judgment()
    for rival in RIVALS:
        judgment.ask(
            f"stable updates, dynamic over {rival}",
            lambda rival=rival: ratios(samples[STABLE + DYNAMIC], [max(1.0, one) for one in samples[STABLE + rival]]),
            "x", ">=", TARGET, what=f"stable updates over {rival}",
        )  # fmt: skip
    means = {arm: statistics.fmean(samples[STABLE + arm]) for arm in ARMS}
    judgment.said.append(
        f"{means[DYNAMIC]:.0f} stable updates of {conditions['steps']} with the dynamic scale from 2^32, against "
        + ", ".join(f"{means[arm]:.0f} with {arm}" for arm in (*RIVALS, FITS[1]))
    )
    with judgment.part():
        kept = {arm: [1.0 - lost for lost in samples[GRADIENT_LOST + arm]] for arm in (DYNAMIC, NONE)}
        survival = ratios(kept[DYNAMIC], [max(share, 1e-12) for share in kept[NONE]])
        figure, say = "gradient kept, dynamic over none", "{0.mean:.2f}x of the gradient kept"
        judgment.ask(figure, survival, "x", ">=", GAIN, what="gradient kept", say=say)
    losses = samples[LOSS + DYNAMIC], samples[LOSS + FP32]
    p_value = f" nats against FP32 (p = {paired_t_test(*losses).p_value:.2g})" if len(losses[0]) > 1 else ""
    judgment.ask("loss above FP32, dynamic", differences(*losses), "nats", say=p_value and "{0.mean:+.4f}" + p_value)
    for arm in ARMS:
        for what, unit, factor in ((STABLE, "", 1), (SKIPPED, "", 1), (GRADIENT_LOST, "%", 100), (LOSS, "nats", 1)):
            judgment.show(samples, [what + arm], unit, factor)
    return judgment.verdict()


CLAIM = declared(__name__)
