"""Claim: a dynamic loss scale keeps FP16 training stable where no scale and a static one do not.

An update is stable when it is made and its gradient is there: not skipped for an overflow, and at most a tenth of the
elements of the blocks' matrices lost to underflow (exactly zero; in FP32 none is). Without a scale gradients underflow,
because each is a share of the whole batch; under a static one that is too large every update overflows; one that was
right at first is wrong later, when gradients have become other ones. FP16 products are computed as FP16 on any
processor, on most CPUs slowly.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from modelwright.claims import stability_bench as bench
from modelwright.claims import workbench
from modelwright.claims.claim import Claim, Figure, Result, Setting
from modelwright.claims.statistics import paired_t_test, spread
from modelwright.precision.loss_scale import LossScaleConfig
from modelwright.precision.policy import PrecisionConfig

MOST_LOST = 0.1
"""Share of the gradient's elements."""
TARGET = 3.7
GAIN = 1.4
FIRST_SEED = 4001
WINDOW = 10
"""Updates until the scale grows: in proportion to runs this short, where 2,000 is usual."""
NONE, STATIC, DYNAMIC, LAYERS, FP32 = "no scale", "static 2^24", "dynamic", "per layer", "FP32"
PROJECTIONS = 7
"""Of a block."""
ARMS: dict[str, PrecisionConfig] = {
    NONE: PrecisionConfig(policy="fp16_mixed", loss_scale=LossScaleConfig(use="never")),
    "static 2^15": PrecisionConfig(policy="fp16_mixed", loss_scale=LossScaleConfig(dynamic=False)),
    STATIC: PrecisionConfig(policy="fp16_mixed", loss_scale=LossScaleConfig(dynamic=False, initial=2.0**24)),
    DYNAMIC: PrecisionConfig(policy="fp16_mixed", loss_scale=LossScaleConfig(initial=2.0**24, window=WINDOW)),
    LAYERS: PrecisionConfig(
        policy="fp16_mixed", loss_scale=LossScaleConfig(initial=2.0**24, window=WINDOW, per_layer=True)
    ),
    FP32: PrecisionConfig(policy="fp32"),
}


@dataclass
class Lost:
    """A transport that sends nothing and notes at every step which share of the matrices' gradients is exactly zero.

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

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """stable: updates; skipped: updates; lost: mean share of the gradient of those that were made, 1 when none was;
    loss: at the end."""

    stable: int
    skipped: int
    lost: float
    loss: float


def measure(setting: Setting) -> Result:
    text = workbench.prepare_text(setting)
    size = study_size(setting)
    seeds = range(FIRST_SEED, FIRST_SEED + (2 if setting.quick else 5))
    runs = {arm: [one_run(setting, text, size, precision, seed) for seed in seeds] for arm, precision in ARMS.items()}
    return judge(setting, size, runs)


def study_size(setting: Setting) -> workbench.Size:
    """Small models and rather large batches, whose gradients are small."""
    if setting.quick:
        return workbench.Size(model_dim=64, num_layers=2, seq_len=32, batch_rows=8, num_steps=12, learning_rate=3e-3)
    return workbench.Size(model_dim=64, num_layers=4, seq_len=64, batch_rows=16, num_steps=100, learning_rate=3e-3)


def one_run(setting: Setting, text: workbench.Text, size: workbench.Size, precision: PrecisionConfig, seed: int) -> Run:
    lost = Lost(size.num_layers)
    config = size.train_config(precision=precision, eval_every_steps=10, max_skipped_steps=size.num_steps + 1)
    outcome = bench.run(setting, text, size, config, seed=seed, transport=lost)
    skipped = set(outcome.skipped)
    made = [share for step, share in enumerate(lost.shares, start=1) if step not in skipped]
    return Run(
        stable=sum(share <= MOST_LOST for share in made),
        skipped=len(skipped),
        lost=statistics.fmean(made) if made else 1.0,
        loss=outcome.final_loss,
    )


def judge(setting: Setting, size: workbench.Size, runs: Mapping[str, Sequence[Run]]) -> Result:
    """Met when the dynamic scale has `TARGET` times the stable updates of no scale and of the static one (none at all
    counts as one) and keeps `GAIN` times the share of the gradient that no scale does."""
    stable = {arm: [run.stable for run in of] for arm, of in runs.items()}
    means = {arm: statistics.fmean(of) for arm, of in stable.items()}
    kept = {arm: 1.0 - statistics.fmean(run.lost for run in of) for arm, of in runs.items()}
    losses = {arm: [run.loss for run in of] for arm, of in runs.items()}
    ratio = means[DYNAMIC] / max(means[NONE], means[STATIC], 1.0)
    survival = kept[DYNAMIC] / kept[NONE] if kept[NONE] else math.inf
    gap = paired_t_test(losses[DYNAMIC], losses[FP32])
    layers = paired_t_test(stable[LAYERS], stable[DYNAMIC])
    met = ratio >= TARGET and survival >= GAIN
    figures = {
        "stable updates, dynamic over none or static": Figure(value=ratio, unit="x"),
        "gradient kept, dynamic over none": Figure(value=survival, unit="x"),
        "loss above FP32, dynamic": Figure(value=gap.mean, unit="nats", spread=gap.std),
    }
    for arm, of in runs.items():
        skipped = statistics.fmean(run.skipped for run in of)
        loss = Figure(value=statistics.fmean(losses[arm]), unit="nats", spread=spread(losses[arm]))
        figures[f"stable updates, {arm}"] = Figure(value=means[arm], unit="", spread=spread(stable[arm]))
        figures[f"skipped updates, {arm}"] = Figure(value=skipped, unit="")
        figures[f"gradient lost, {arm}"] = Figure(value=100 * (1.0 - kept[arm]), unit="%")
        figures[f"held-out loss, {arm}"] = loss
    reason = (
        f"{means[DYNAMIC]:.0f} stable updates of {size.num_steps} against {means[NONE]:.0f} without a scale and "
        f"{means[STATIC]:.0f} with a static one of 2^24 ({ratio:.1f}x); {survival:.2f}x of the gradient kept; "
        f"{gap.mean:+.4f} nats against FP32 (p = {gap.p_value:.2g}); scales of layers: {layers.mean:+.1f} stable "
        f"updates (p = {layers.p_value:.2g})"
    )
    return Result(
        kind="cannot be tested here" if setting.quick else "met" if met else "short",
        reason=bench.TOO_SHORT if setting.quick else reason,
        figures=figures,
        conditions=size.describe()
        | {"most of the gradient lost": f"{100 * MOST_LOST:.0f}%", "window": WINDOW, "first scale, dynamic": "2^24"},
        samples={
            **{f"stable updates, {arm}": of for arm, of in stable.items()},
            **{f"held-out loss, {arm}": of for arm, of in losses.items()},
        },
    )


CLAIM = Claim(
    name="loss_scaling",
    statement="In FP16 a dynamic loss scale gives several times the stable updates of no scale and of a static one "
    "that does not fit.",
    source="Micikevicius et al., Mixed Precision Training, ICLR 2018 (arXiv:1710.03740); scales of layers: Zhao et "
    "al., Adaptive Loss Scaling for Mixed Precision Training, 2019 (arXiv:1910.12385)",
    published="3.7x the stable steps, 40% more of numerical stability (no conditions given); 2018: without scaling "
    "some networks diverge, with it all reach the loss of FP32",
    compared="no scale, static 2^15 and 2^24, dynamic from 2^24, the same per layer, and FP32; same weights and data "
    "order per seed, five seeds; an update is stable when it is made and at most a tenth of its gradient is zero",
    target=f"{TARGET:g}x the stable updates of no scale and of the static one; {GAIN:g}x of the gradient kept",
    measure=measure,
)
