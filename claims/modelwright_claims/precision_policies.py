"""Claim: mixed precision trains 2.3 to 2.8 times as fast in 40 to 55% less memory, without loss of quality.

Every policy from the same weights on the same batches: held-out loss, tokens per second and peak memory, and the bare
products of each format beside them, which say what this machine could gain at best. That a format is really computed in
is read from the operators in `tests/precision/test_model.py`.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from modelwright.core.config import parse
from modelwright.model.decoder import Decoder
from modelwright.ops.formats import Format
from modelwright.precision.hardware import measure_speeds
from modelwright.precision.model import ModelFormats
from modelwright.precision.policy import PrecisionConfig
from modelwright_claims import memory_probe, workbench
from modelwright_claims.claim import Claim, Figure, Result, Setting
from modelwright_claims.experiment import Experiment, run_experiment
from modelwright_claims.large_runs import peak_bytes
from modelwright_claims.statistics import spread
from modelwright_claims.training_run import Outcome, Run
from modelwright_claims.workbench import Size

FP32 = "fp32"
ARMS: dict[str, dict[str, Any]] = {
    FP32: {"policy": "fp32"},
    "bf16_mixed": {"policy": "bf16_mixed"},
    "fp16_mixed": {"policy": "fp16_mixed"},
    "pure_fp16": {"policy": "pure_fp16"},
    "hybrid": {"policy": "hybrid"},
    "fp8 tensorwise": {"policy": "fp8"},
    "fp8 tensorwise, delayed": {"policy": "fp8", "fp8": {"scaling": "delayed"}},
    "fp8 rowwise": {"policy": "fp8", "fp8": {"recipe": "rowwise"}},
    "fp8 blockwise": {"policy": "fp8", "fp8": {"recipe": "blockwise"}},
    "int8": {"policy": "int8"},
}
EIGHT_BITS = tuple(name for name in ARMS if name.startswith(("fp8", "int8")))
SPEED, MEMORY, PUBLISHED_GAP = 2.3, 40.0, 0.3
LEARNING_RATE = 2e-3
"""At twice of it, runs that differ by any rounding part so far that a percent cannot be told from chance."""
GAP, GAP_EIGHT = 1.0, 2.0
"""Percent of the loss that a policy may cost, and an eight-bit one."""
FORMATS: tuple[Format, ...] = ("fp32", "bf16", "fp16", "fp8", "int8")


def measure(setting: Setting) -> Result:
    """All policies of a seed one after the other; memory in processes of their own."""
    if setting.quick:
        size, seeds = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=60), range(1)
    else:
        size, seeds = Size(model_dim=128, num_layers=2, seq_len=128, batch_rows=8, num_steps=600), range(4)
    size = replace(size, learning_rate=LEARNING_RATE)
    names = [FP32, "bf16_mixed", "int8"] if setting.quick else list(ARMS)
    variants = {name: Run(size=size, settings={"precision": ARMS[name]}) for name in names}
    samples = run_experiment(setting, Experiment(variants=variants, seeds=seeds, timed=True))
    peaks = {name: peak_bytes(size, run.train_config().precision) for name, run in variants.items()}
    return judge(samples.runs, peaks, product_speeds(setting), size)


def product_speeds(setting: Setting) -> dict[Format, float]:
    """Times as fast as FP32, forward and backward with casts, of a feed-forward block of width 512 on 2,048 tokens."""
    model = Decoder(Size(model_dim=64, num_layers=1, seq_len=8, batch_rows=1, num_steps=1).model_config(16))
    formats = ModelFormats(model, parse(PrecisionConfig, {"policy": "bf16_mixed"}))
    rows, width = (128, 128) if setting.quick else (2048, 512)
    shapes = {"ffn": [(4 * width, width), (width, 4 * width)]}
    seconds = measure_speeds(formats, shapes, FORMATS, num_rows=rows, device=workbench.device())  # type: ignore[arg-type]
    return {chosen: seconds["ffn", "fp32"] / seconds["ffn", chosen] for chosen in FORMATS}


@dataclass
class BesideFp32:
    """Every arm against FP32: times as fast, percent of loss above, percent of memory saved; figures and samples."""

    speeds: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)
    saved: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    samples: dict[str, Sequence[float]] = field(default_factory=dict)

    def figures_from(self, arm: str) -> dict[str, Figure]:
        """All figures, this arm's before the others': the page's overview shows the first three."""
        return dict(sorted(self.figures.items(), key=lambda figure: not figure[0].endswith(f", {arm}")))


def beside_fp32(
    paces: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
    peaks: Mapping[str, int],
    products: Mapping[Format, float],
) -> BesideFp32:
    """By tokens per second, held-out losses and peaks; values of the same seeds are paired."""
    found = BesideFp32()
    for name in paces:
        found.samples[f"held-out loss, {name}"] = list(losses[name])
        found.samples[f"tokens per second, {name}"] = list(paces[name])
        if name == FP32:
            continue
        gaps = [100 * (one / exact - 1) for one, exact in zip(losses[name], losses[FP32], strict=True)]
        ratios = [one / exact for one, exact in zip(paces[name], paces[FP32], strict=True)]
        found.gaps[name], found.speeds[name] = statistics.fmean(gaps), statistics.median(ratios)
        found.saved[name] = 100 * (1 - peaks[name] / peaks[FP32])
        found.figures |= {
            f"held-out loss above FP32, {name}": Figure(value=found.gaps[name], unit="%", spread=spread(gaps)),
            f"speed over FP32, {name}": Figure(value=found.speeds[name], unit="x", spread=spread(ratios)),
            f"memory saved, {name}": Figure(value=found.saved[name], unit="%"),
        }
    for chosen, ratio in products.items():
        found.figures[f"bare products over FP32, {chosen}"] = Figure(value=ratio, unit="x")
    return found


def judge(
    runs: Mapping[str, Sequence[Outcome]],
    peaks: Mapping[str, int],
    products: Mapping[Format, float],
    size: Size,
) -> Result:
    """Met when a 16-bit policy reaches the published speed, memory and loss, and none costs more loss than it may."""
    paces = {name: [run.tokens_per_s for run in of] for name, of in runs.items()}
    losses = {name: [run.heldout_loss for run in of] for name, of in runs.items()}
    beside = beside_fp32(paces, losses, peaks, products)
    speeds, gaps, saved = beside.speeds, beside.gaps, beside.saved
    too_far = [name for name, gap in gaps.items() if gap > (GAP_EIGHT if name in EIGHT_BITS else GAP)]

    def reaches_all(name: str) -> bool:
        return speeds[name] >= SPEED and saved[name] >= MEMORY and gaps[name] <= PUBLISHED_GAP

    best = max((name for name in speeds if name not in EIGHT_BITS), key=lambda name: (reaches_all(name), speeds[name]))
    fast = reaches_all(best)
    which = "the fastest 16-bit policy that reaches all three" if fast else "the fastest 16-bit policy"
    reason = (
        f"{which} is {best}: {speeds[best]:.2f}x FP32 (published {SPEED:g}x), "
        f"{saved[best]:.0f}% less memory ({MEMORY:g}%), held-out loss {gaps[best]:+.2f}% ({PUBLISHED_GAP:g}%). "
        f"Bare products here: {', '.join(f'{name} {ratio:.2f}x' for name, ratio in products.items())}. "
    )
    reason += (
        f"Too far from FP32: {', '.join(too_far)}"
        if too_far
        else (f"All policies end within {GAP:g}% of FP32's loss, eight-bit ones within {GAP_EIGHT:g}%")
    )
    return Result(
        kind="met" if fast and not too_far else "short",
        reason=reason,
        figures=beside.figures_from(best),
        conditions=size.describe()
        | {"processor": torch.backends.cpu.get_cpu_capability(), "memory": memory_probe.CONDITION},
        samples=beside.samples,
    )


CLAIM = Claim(
    name="precision_policies",
    statement="Mixed precision in FP16 or BF16 trains 2.3 to 2.8 times as fast in 40 to 55% less memory at less than "
    "0.3% loss of quality; FP8 is three times as fast on Hopper.",
    source="published guides to DeepSeek-style training; Micikevicius et al. 2018 (arXiv:1710.03740) and 2022 "
    "(arXiv:2209.05433)",
    published="2.3-2.8x speed, 40-55% less memory, < 0.3% quality; FP8: 3x on Hopper",
    compared="every policy and FP8 recipe against FP32 with the same settings, weights and batches; memory in "
    "processes of their own; the bare products of each format beside them",
    target=f"a 16-bit policy with {SPEED:g}x the tokens per second, {MEMORY:g}% less memory and at most "
    f"{PUBLISHED_GAP:g}% more held-out loss; every policy within {GAP:g}% of FP32's loss, eight-bit ones within "
    f"{GAP_EIGHT:g}%",
    measure=measure,
)
