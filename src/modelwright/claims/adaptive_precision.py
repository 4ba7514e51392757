"""Claim: formats that are chosen layer by layer while a model trains make it 3.8 times as fast in 42% less memory.

The adaptive controllers against FP32 and against what anybody can have without them: all BF16, and INT8 with FP32 ends.
What a controller can win at best follows from the formats' measured speeds, which are part of the result.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from modelwright.claims import workbench
from modelwright.claims.claim import Claim, Result, Setting
from modelwright.claims.precision_policies import FP32, beside_fp32, product_speeds
from modelwright.claims.workbench import Size
from modelwright.core.config import parse
from modelwright.ops.formats import Format
from modelwright.precision.policy import PrecisionConfig

CHANGING = {"every": 50, "window": 4}
ARMS: dict[str, dict[str, Any]] = {
    FP32: {"policy": "fp32"},
    "all BF16": {"policy": "bf16_mixed"},
    "all INT8": {"policy": "int8"},
    "rules": {"policy": "fp32", "adaptive": {"kind": "rules", **CHANGING}},
    "bandit": {"policy": "fp32", "adaptive": {"kind": "bandit", **CHANGING}},
}
ADAPTIVE = ("rules", "bandit")
SPEED, MEMORY, GAP = 3.0, 40.0, 0.5


def measure(setting: Setting) -> Result:
    """All arms of a seed one after the other; memory in processes of their own."""
    num_steps, seeds = (120, range(1)) if setting.quick else (600, range(3))
    size = Size(model_dim=128, num_layers=2, seq_len=128, batch_rows=4, num_steps=num_steps, learning_rate=3e-3)
    if setting.quick:
        size = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=4, num_steps=num_steps, learning_rate=3e-3)
    text = workbench.prepare_text(setting)
    names = [FP32, "all INT8", "rules"] if setting.quick else list(ARMS)
    configs = {name: size.train_config(precision=parse(PrecisionConfig, ARMS[name])) for name in names}
    runs: dict[str, list[workbench.Run]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            setting.progress.note(f"adaptive_precision: {name}, seed {seed}")
            runs[name].append(workbench.run(setting, text, size, configs[name], seed=seed))
    peaks = {name: workbench.peak_alone(setting, text, size, configs[name]) for name in names}
    return judge(runs, peaks, product_speeds(setting), size)


def judge(
    runs: Mapping[str, Sequence[workbench.Run]],
    peaks: Mapping[str, int],
    products: Mapping[Format, float],
    size: Size,
) -> Result:
    """Met when a controller reaches speed, memory and loss, and is faster than the trivial policies."""
    beside = beside_fp32(runs, peaks, products)
    speeds, gaps, saved = beside.speeds | {FP32: 1.0}, beside.gaps, beside.saved
    best = max((name for name in ADAPTIVE if name in runs), key=lambda name: speeds[name])
    trivial = max((name for name in runs if name not in ADAPTIVE), key=lambda name: speeds[name])
    met = speeds[best] >= max(SPEED, speeds[trivial]) and saved[best] >= MEMORY and gaps[best] <= GAP
    bound = max(products.values())
    return Result(
        kind="met" if met else "short",
        reason=f"{best}: {speeds[best]:.2f}x FP32 (target {SPEED:g}x), {saved[best]:.0f}% less memory ({MEMORY:g}%), "
        f"held-out loss {gaps[best]:+.2f}% ({GAP:g}%); the best trivial policy is {trivial} at {speeds[trivial]:.2f}x. "
        f"Bare products run at most {bound:.2f}x as fast as FP32's on this machine "
        f"({', '.join(f'{name} {ratio:.2f}x' for name, ratio in products.items())}), which bounds every policy",
        figures=beside.figures,
        conditions=size.describe() | {"decisions": f"every {CHANGING['every']} steps, {CHANGING['window']} measured"},
        samples=beside.samples,
    )


CLAIM = Claim(
    name="adaptive_precision",
    statement="Choosing the number format of each layer while training saves 42% of the memory and makes iterations "
    "3.8 times as fast.",
    source="published guides to DeepSeek-style training",
    published="42% less memory, 3.8x iteration speed against FP32",
    compared="rules and a contextual bandit that choose among FP32, BF16 and INT8 for each block's attention and "
    "feed-forward layers, against FP32, all BF16, and INT8 with FP32 ends; same weights and batches",
    target=f"{SPEED:g}x FP32's tokens per second and more than the trivial policies', {MEMORY:g}% less memory, at most "
    f"{GAP:g}% more held-out loss",
    measure=measure,
)
