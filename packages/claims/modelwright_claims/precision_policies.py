"""Claim: mixed precision trains 2.3 to 2.8 times as fast in 40 to 55% less memory, without loss of quality.

Every policy from the same weights on the same batches: held-out loss, tokens per second and peak memory, and the bare
products of each format next to them, which say what this machine could gain at best. That a format is really computed
in is read from the operators in `tests/train/precision/test_model.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from modelwright.core.config import parse
from modelwright.model.decoder import Decoder
from modelwright.ops.lowp_linear import Format
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.controllers import measure_speeds
from modelwright.train.precision.policy import PrecisionConfig
from modelwright_claims import memory_probe, workbench
from modelwright_claims.claim import Conditions, Figure, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.experiment import Experiment, run_experiment
from modelwright_claims.judging import Judgment, Lacks, names_between
from modelwright_claims.large_runs import (
    BY_ONEDNN,
    FP32,
    baseline_conditions,
    fastest_exact,
    onednn_is_exact,
    repeated_peaks,
)
from modelwright_claims.statistics import Estimate, estimate, percent_above, ratios
from modelwright_claims.training_run import Run
from modelwright_claims.workbench import Size

LOSS, PACE, PEAK, PRODUCTS = "held-out loss, ", "tokens per second, ", "peak bytes, ", "bare products over FP32, "
ARMS: dict[str, dict[str, Any]] = {
    FP32: {"policy": "fp32", "fp32_matmul": "default"},
    BY_ONEDNN: {"policy": "fp32", "fp32_matmul": "onednn"},
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
"""At twice this rate, runs that differ by any rounding diverge so far that a percent cannot be told from chance."""
GAP, GAP_EIGHT = 1.0, 2.0
"""Percent of the loss that a policy may cost, and an eight-bit one."""
FORMATS: tuple[Format, ...] = ("fp32", "bf16", "fp16", "fp8", "int8")


def measure(setting: Setting) -> Measurement:
    """All policies of a seed one after the other; memory in processes of their own."""
    if setting.quick:
        size, seeds = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=60), range(1)
    else:
        size, seeds = Size(model_dim=128, num_layers=2, seq_len=128, batch_rows=8, num_steps=600), range(4)
    size = replace(size, learning_rate=LEARNING_RATE)
    names = [FP32, BY_ONEDNN, "bf16_mixed", "int8"] if setting.quick else list(ARMS)
    if not onednn_is_exact():
        names.remove(BY_ONEDNN)
    variants = {name: Run(size=size, settings={"precision": ARMS[name]}) for name in names}
    runs = run_experiment(setting, Experiment(variants=variants, seeds=seeds, timed=True)).runs
    return Measurement(
        samples=samples_beside_fp32(
            paces={name: [run.tokens_per_s for run in of] for name, of in runs.items()},
            losses={name: [run.heldout_loss for run in of] for name, of in runs.items()},
            peaks=repeated_peaks(
                setting, {name: (size, run.train_config().precision) for name, run in variants.items()}
            ),
            products=product_speeds(setting),
        ),
        conditions=size.describe()
        | {
            "processor": torch.backends.cpu.get_cpu_capability(),
            "memory": memory_probe.CONDITION,
            **baseline_conditions(),
        },
    )


def product_speeds(setting: Setting) -> dict[Format, float]:
    """Times as fast as FP32, forward and backward with casts, of a feed-forward block of width 512 on 2,048 tokens."""
    model = Decoder(Size(model_dim=64, num_layers=1, seq_len=8, batch_rows=1, num_steps=1).model_config(16))
    formats = ModelPrecision(model, parse(PrecisionConfig, {"policy": "bf16_mixed"}, constants=True))
    rows, width = (128, 128) if setting.quick else (2048, 512)
    shapes = {"ffn": [(4 * width, width), (width, 4 * width)]}
    seconds = measure_speeds(formats, shapes, FORMATS, num_rows=rows, device=workbench.device())  # type: ignore[arg-type]
    return {chosen: seconds["ffn", "fp32"] / seconds["ffn", chosen] for chosen in FORMATS}


def samples_beside_fp32(
    *,
    paces: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
    peaks: Mapping[str, Sequence[float]],
    products: Mapping[Format, float],
) -> dict[str, Sequence[float]]:
    """Return the samples that `beside_fp32` reads; values of the same seeds are paired."""
    return {
        **{f"{LOSS}{name}": of for name, of in losses.items()},
        **{f"{PACE}{name}": of for name, of in paces.items()},
        **{f"{PEAK}{name}": of for name, of in peaks.items()},
        **{f"{PRODUCTS}{name}": [ratio] for name, ratio in products.items()},
    }


@dataclass(frozen=True, kw_only=True)
class BesideFp32:
    """A single arm against exact FP32. A missing sample raises `Lacks` when it is asked for."""

    name: str
    samples: Samples
    conditions: Conditions

    @property
    def speed(self) -> Estimate:
        """Tokens per second over PyTorch's own FP32."""
        return ratios(self.samples[PACE + self.name], self.samples[PACE + FP32])

    @property
    def fair_speed(self) -> Estimate:
        """Tokens per second over the faster exact FP32."""
        fastest = fastest_exact(self.samples, self.conditions, PACE)
        return ratios(self.samples[PACE + self.name], self.samples[PACE + fastest])

    @property
    def gap(self) -> Estimate:
        """Percent of held-out loss above FP32."""
        return percent_above(self.samples[LOSS + self.name], self.samples[LOSS + FP32])

    @property
    def saved(self) -> Estimate:
        """Percent of memory saved."""
        pairs = zip(self.samples[PEAK + self.name], self.samples[PEAK + FP32], strict=True)
        return estimate([100 * (1 - own / exact) for own, exact in pairs])

    def add_figures(self, judgment: Judgment) -> None:
        for what, unit, result in (
            ("held-out loss above FP32", "%", lambda: self.gap),
            ("speed over FP32", "x", lambda: self.speed),
            ("speed over the faster FP32", "x", lambda: self.fair_speed),
            ("memory saved", "%", lambda: self.saved),
        ):
            with judgment.beside():
                judgment.figures[f"{what}, {self.name}"] = result().figure(unit)


def beside_fp32(samples: Samples, conditions: Conditions) -> dict[str, BesideFp32]:
    """Return every measured arm but FP32 itself."""
    names = [name for name in names_between(samples, PACE) if name != FP32]
    return {name: BesideFp32(name=name, samples=samples, conditions=conditions) for name in names}


def say_products(judgment: Judgment, samples: Samples) -> None:
    """Add the speeds of the bare products."""
    products = {name: samples[f"{PRODUCTS}{name}"][0] for name in names_between(samples, PRODUCTS)}
    if products:
        judgment.figures |= {f"{PRODUCTS}{name}": Figure(value=ratio, unit="x") for name, ratio in products.items()}
        judgment.said.append(
            f"bare products run at most {max(products.values()):.2f}x as fast as FP32's on this machine "
            f"({', '.join(f'{name} {ratio:.2f}x' for name, ratio in products.items())}), which bounds every policy"
        )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    arms = beside_fp32(samples, conditions)
    policies = {name: arm for name, arm in arms.items() if name not in (*EIGHT_BITS, BY_ONEDNN)}
    best = max(policies, key=lambda name: (_reaches_all(arms[name]), arms[name].speed.mean))
    for name in (best, *(name for name in arms if name != best)):  # the overview shows the first figures
        arms[name].add_figures(judgment)
    judgment.said.append(
        f"the fastest 16-bit policy{' that reaches all three' if _reaches_all(arms[best]) else ''} is {best}: "
        f"{arms[best].speed.mean:.2f}x FP32, held-out loss {arms[best].gap.mean:+.2f}%"
    )
    with judgment.part():
        judgment.check(f"speed of {best} over the faster FP32", arms[best].fair_speed, SPEED, "x", ">=")
    with judgment.part():
        judgment.check(f"memory saved by {best}", arms[best].saved, MEMORY, "%", ">=")
    with judgment.part():
        judgment.check(f"held-out loss of {best} above FP32", arms[best].gap, PUBLISHED_GAP, "%", "<=")
    for name, arm in arms.items():
        limit = GAP_EIGHT if name in EIGHT_BITS else GAP
        judgment.check(f"held-out loss of {name} above FP32", arm.gap, limit, "%", "<=")
    say_products(judgment, samples)
    return judgment.verdict()


def _reaches_all(arm: BesideFp32) -> bool:
    """Return whether a policy has the published speed, memory and loss, by the samples of the record."""
    try:
        return arm.fair_speed.lower >= SPEED and arm.saved.lower >= MEMORY and arm.gap.upper <= PUBLISHED_GAP
    except Lacks:
        return False


CLAIM = declared(__name__)
