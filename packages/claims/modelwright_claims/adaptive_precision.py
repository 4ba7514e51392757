"""Claim: formats that are chosen layer by layer while a model trains make it 3.8 times as fast in 42% less memory.

The adaptive controllers against FP32 and against what anybody can have without them: all BF16, and INT8 with FP32
ends, each also with the stream in BF16 that the controllers' runs have: its gain is not a controller's merit. The most
that a controller can win follows from the formats' measured speeds, which are part of the result.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from modelwright.core.config import parse
from modelwright.model.decoder import Decoder
from modelwright.ops.lowp_linear import Format
from modelwright.parallel.mesh import single
from modelwright.train.precision.apply import ModelPrecision
from modelwright.train.precision.policy import PrecisionConfig
from modelwright.train.techniques.adaptive_precision import MACHINE, machine_for
from modelwright_claims import memory_probe, workbench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.experiment import Experiment, run_experiment
from modelwright_claims.judging import Judgment
from modelwright_claims.large_runs import (
    BY_ONEDNN,
    FP32,
    Paced,
    baseline_conditions,
    large_size,
    onednn_is_exact,
    paces,
    peaks,
)
from modelwright_claims.precision_policies import (
    PACE,
    BesideFp32,
    beside_fp32,
    product_speeds,
    samples_beside_fp32,
    say_products,
)
from modelwright_claims.statistics import estimate, ratios
from modelwright_claims.training_run import Outcome, Run
from modelwright_claims.workbench import Size

CHANGING = {"decide_every_steps": 50, "measure_steps": 4}
LARGE_CHANGING = {"decide_every_steps": 20, "measure_steps": 2}
"""Settings for the large model: it decides more often than a user would ask for, so that a short run has some
decisions."""
IN_BF16 = {"policy": "bf16_mixed", "output_dtype": "bf16", "overrides": {"embedding": "bf16"}}
"""Widest formats of the controllers' parts, and the format of the residual stream and of what products give."""
IN_INT8 = {**IN_BF16, "overrides": {"embedding": "bf16", "attention": "int8", "ffn": "int8"}}
ARMS: dict[str, dict[str, Any]] = {
    FP32: {"policy": "fp32", "fp32_matmul": "default"},
    BY_ONEDNN: {"policy": "fp32", "fp32_matmul": "onednn"},
    "all BF16": {"policy": "bf16_mixed"},
    "all INT8": {"policy": "int8", "overrides": {"embedding": "fp32"}},
    "all BF16, BF16 stream": IN_BF16,
    "all INT8, BF16 stream": IN_INT8,
    "rules": {**IN_BF16, "adaptive": {"kind": "rules", **CHANGING}},
    "bandit": {**IN_BF16, "adaptive": {"kind": "bandit", **CHANGING}},
}
ADAPTIVE = ("rules", "bandit")
SPEED, MEMORY, GAP = 3.0, 40.0, 0.5
SOON_CHANGING = {"decide_every_steps": 2, "measure_steps": 1}
"""Settings for the comparison of memory, which does not depend on how often formats change."""
MEMORY_ROWS = 16
"""Rows of a batch where memory is compared."""


def arms_with(changing: Mapping[str, int]) -> dict[str, PrecisionConfig]:
    """All arms; controllers decide as often as this says."""
    arms = {name: dict(arm) for name, arm in ARMS.items()}
    for name in ADAPTIVE:
        arms[name] |= {"adaptive": {**arms[name]["adaptive"], **changing}}
    return {name: parse(PrecisionConfig, arm, constants=True) for name, arm in arms.items()}


def measure(setting: Setting) -> Measurement:
    """Losses on a small model; pace and memory on one of 39 million parameters, memory in separate processes."""
    num_steps, seeds = (120, range(1)) if setting.quick else (600, range(3))
    size = Size(model_dim=128, num_layers=2, seq_len=128, batch_rows=4, num_steps=num_steps, learning_rate=3e-3)
    if setting.quick:
        size = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=4, num_steps=num_steps, learning_rate=3e-3)
    names = [FP32, "all INT8, BF16 stream", "rules"] if setting.quick else list(ARMS)
    if not onednn_is_exact():
        names = [name for name in names if name != BY_ONEDNN]
    often, short = LARGE_CHANGING["every"], 4 if setting.quick else 10
    paced = {
        name: Paced(precision=one, first=often if name in ADAPTIVE else 2, end=3 * often if name in ADAPTIVE else short)
        for name, one in arms_with(LARGE_CHANGING).items()
        if name in names
    }
    result = paces(setting, paced, seeds)
    soon = {name: one for name, one in arms_with(SOON_CHANGING).items() if name in names}
    taken = peaks(setting, soon, batch_rows=MEMORY_ROWS)
    variants = {name: Run(size=size, settings={"precision": ARMS[name]}) for name in names}
    speeds = speeds_at_large(setting)
    variants |= {name: replace(variants[name], speeds=speeds) for name in ADAPTIVE if name in names}
    runs = run_experiment(setting, Experiment(variants=variants, seeds=seeds)).runs
    return measurement(result, runs, taken, product_speeds(setting), size, large_size(setting))


def speeds_at_large(setting: Setting) -> dict[str, float]:
    """Return what controllers measure of the model whose pace is taken.

    For a smaller one, whose losses are compared, they would choose other formats.
    """
    size, folder = large_size(setting), setting.folder / "speeds_at_large"
    precision = arms_with(LARGE_CHANGING)[ADAPTIVE[0]]
    formats = ModelPrecision(Decoder(size.model_config(workbench.VOCAB_SIZE)), precision)
    machine_for(folder, formats, single(workbench.device()), num_rows=size.batch_rows * size.seq_len, tensor=1)
    return json.loads((folder / MACHINE).read_text(encoding="utf-8"))


def measurement(
    paces: Mapping[str, Sequence[float]],
    runs: Mapping[str, Sequence[Outcome]],
    peaks: Mapping[str, Sequence[float]],
    products: Mapping[Format, float],
    size: Size,
    large: Size,
) -> Measurement:
    """Return pace, losses, memory, and the formats that the controllers end in."""
    losses = {name: [run.heldout_loss for run in of] for name, of in runs.items()}
    num_parts = 2 * size.num_layers
    return Measurement(
        samples={
            **samples_beside_fp32(paces=paces, losses=losses, peaks=peaks, products=products),
            **{
                f"parts in {chosen} at the end, {name}": [_percent_in(run, chosen, num_parts) for run in runs[name]]
                for name in ADAPTIVE
                if name in runs
                for chosen in ("bf16", "int8")
            },
        },
        conditions=described(__name__, counted=memory_probe.CONDITION)
        | {
            **size.describe(),
            "pace": f"{large.model_config(workbench.VOCAB_SIZE).num_parameters} parameters, {large.batch_rows} rows of "
            f"{large.seq_len} tokens; all steps after the first decision, of which there is one every "
            f"{LARGE_CHANGING['decide_every_steps']} steps, {LARGE_CHANGING['measure_steps']} of them measured",
            **baseline_conditions(),
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    arms = beside_fp32(samples, conditions)
    best = max((name for name in ADAPTIVE if name in arms), key=lambda name: arms[name].speed.mean)
    trivial = [FP32, *(name for name in arms if name not in ADAPTIVE)]
    for name in (best, *(name for name in arms if name != best)):  # the overview shows the first figures
        arms[name].add_figures(judgment)
    _say(judgment, arms[best], samples, trivial)
    with judgment.part():
        judgment.check(f"speed of {best} over the faster FP32", arms[best].fair_speed, SPEED, "x", ">=")
    for name in trivial:
        lead = ratios(samples[PACE + best], samples[PACE + name])
        judgment.check(f"speed of {best} over {name}", lead, 1.0, "x", ">")
    with judgment.part():
        judgment.check(f"memory saved by {best}", arms[best].saved, MEMORY, "%", ">=")
    with judgment.part():
        judgment.check(f"held-out loss of {best} above FP32", arms[best].gap, GAP, "%", "<=")
    say_products(judgment, samples)
    for name in ADAPTIVE:
        for chosen in ("bf16", "int8"):
            what = f"parts in {chosen} at the end, {name}"
            with judgment.beside():
                judgment.figures[what] = estimate(samples[what]).figure("%")
    return judgment.verdict()


def _say(judgment: Judgment, best: BesideFp32, samples: Samples, trivial: Sequence[str]) -> None:
    """Name the best controller and the fastest trivial policy."""
    text = f"{best.name}: {best.speed.mean:.2f}x FP32"
    if BY_ONEDNN in trivial:
        text += f", {ratios(samples[PACE + best.name], samples[PACE + BY_ONEDNN]).mean:.2f}x FP32 by oneDNN"
    with judgment.beside():
        text += f", held-out loss {best.gap.mean:+.2f}%"
        text += f", {best.saved.mean:.0f}% less memory"
    speeds = {name: ratios(samples[PACE + name], samples[PACE + FP32]).mean for name in trivial}
    fastest = max(speeds, key=speeds.__getitem__)
    judgment.said.append(f"{text}; the fastest trivial policy is {fastest} at {speeds[fastest]:.2f}x")


def _percent_in(run: Outcome, chosen: Format, num_parts: int) -> float:
    """Return the percentage of the parts that end in a format; what never changed is in BF16."""
    ends = [*run.formats.values(), *["bf16"] * (num_parts - len(run.formats))]
    return 100 * ends.count(chosen) / num_parts


CLAIM = declared(__name__)
