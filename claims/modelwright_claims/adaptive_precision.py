"""Claim: formats that are chosen layer by layer while a model trains make it 3.8 times as fast in 42% less memory.

The adaptive controllers against FP32 and against what anybody can have without them: all BF16, and INT8 with FP32 ends,
each also with the stream in BF16 that the controllers' runs have: what that gains is no controller's merit. What a
controller can win at best follows from the formats' measured speeds, which are part of the result.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from modelwright.core.config import parse
from modelwright.model.decoder import Decoder
from modelwright.ops.formats import Format
from modelwright.parallel.mesh import single
from modelwright.precision.model import ModelFormats
from modelwright.precision.policy import PrecisionConfig
from modelwright.train.techniques.adaptive_precision import MACHINE, machine_for
from modelwright_claims import memory_probe, workbench
from modelwright_claims.bf16_mixed import BY_ONEDNN, onednn_is_exact
from modelwright_claims.claim import Claim, Figure, Result, Setting
from modelwright_claims.experiment import Experiment, run_experiment
from modelwright_claims.large_runs import Paced, large_size, paces, peaks
from modelwright_claims.precision_policies import FP32, beside_fp32, product_speeds
from modelwright_claims.training_run import Outcome, Run
from modelwright_claims.workbench import Size

CHANGING = {"every": 50, "window": 4}
LARGE_CHANGING = {"every": 20, "window": 2}
"""On the large model: more decisions a step than anybody would ask for, so that a short run holds some."""
IN_BF16 = {"policy": "bf16_mixed", "results": "bf16", "layers": {"embedding": "bf16"}}
"""Widest formats of the controllers' parts, and the format of the residual stream and of what products give."""
IN_INT8 = {**IN_BF16, "layers": {"embedding": "bf16", "attention": "int8", "ffn": "int8"}}
ARMS: dict[str, dict[str, Any]] = {
    FP32: {"policy": "fp32"},
    BY_ONEDNN: {"policy": "fp32", "onednn": True},
    "all BF16": {"policy": "bf16_mixed"},
    "all INT8": {"policy": "int8", "layers": {"embedding": "fp32"}},
    "all BF16, BF16 stream": IN_BF16,
    "all INT8, BF16 stream": IN_INT8,
    "rules": {**IN_BF16, "adaptive": {"kind": "rules", **CHANGING}},
    "bandit": {**IN_BF16, "adaptive": {"kind": "bandit", **CHANGING}},
}
ADAPTIVE = ("rules", "bandit")
SPEED, MEMORY, GAP = 3.0, 40.0, 0.5
SOON_CHANGING = {"every": 2, "window": 1}
"""Where memory is compared: it does not depend on how often formats change."""
MEMORY_ROWS = 16
"""Rows of a batch where memory is compared."""


def arms_with(changing: Mapping[str, int]) -> dict[str, PrecisionConfig]:
    """All arms; controllers decide as often as this says."""
    arms = {name: dict(arm) for name, arm in ARMS.items()}
    for name in ADAPTIVE:
        arms[name] |= {"adaptive": {**arms[name]["adaptive"], **changing}}
    return {name: parse(PrecisionConfig, arm) for name, arm in arms.items()}


def measure(setting: Setting) -> Result:
    """Losses on a small model; pace and memory on one of 39 million parameters, memory in processes of its own."""
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
    found = paces(setting, paced, seeds)
    soon = {name: one for name, one in arms_with(SOON_CHANGING).items() if name in names}
    taken = peaks(setting, soon, batch_rows=MEMORY_ROWS)
    variants = {name: Run(size=size, settings={"precision": ARMS[name]}) for name in names}
    speeds = speeds_at_large(setting)
    variants |= {name: replace(variants[name], speeds=speeds) for name in ADAPTIVE if name in names}
    runs = run_experiment(setting, Experiment(variants=variants, seeds=seeds)).runs
    return judge(found, runs, taken, product_speeds(setting), size, large_size(setting))


def speeds_at_large(setting: Setting) -> dict[str, float]:
    """Return what controllers measure of the model whose pace is taken.

    For a smaller one, whose losses are compared, they would choose other formats.
    """
    size, folder = large_size(setting), setting.folder / "speeds_at_large"
    precision = arms_with(LARGE_CHANGING)[ADAPTIVE[0]]
    formats = ModelFormats(Decoder(size.model_config(workbench.VOCAB_SIZE)), precision)
    machine_for(folder, formats, single(workbench.device()), num_rows=size.batch_rows * size.seq_len, tensor=1)
    return json.loads((folder / MACHINE).read_text(encoding="utf-8"))


def judge(
    paces: Mapping[str, Sequence[float]],
    runs: Mapping[str, Sequence[Outcome]],
    peaks: Mapping[str, int],
    products: Mapping[Format, float],
    size: Size,
    large: Size,
) -> Result:
    """Met when a controller reaches speed, memory and loss, and is faster than the trivial policies."""
    losses = {name: [run.heldout_loss for run in of] for name, of in runs.items()}
    beside = beside_fp32(paces, losses, peaks, products)
    speeds, gaps, saved = beside.speeds | {FP32: 1.0}, beside.gaps, beside.saved
    best = max((name for name in ADAPTIVE if name in paces), key=lambda name: speeds[name])
    trivial = max((name for name in paces if name not in ADAPTIVE), key=lambda name: speeds[name])
    met = speeds[best] >= max(SPEED, speeds[trivial]) and saved[best] >= MEMORY and gaps[best] <= GAP
    bound, num_parts = max(products.values()), 2 * size.num_layers
    fairest = f", {speeds[best] / speeds[BY_ONEDNN]:.2f}x FP32 by oneDNN" if BY_ONEDNN in speeds else ""
    return Result(
        kind="met" if met else "short",
        reason=f"{best}: {speeds[best]:.2f}x FP32 (target {SPEED:g}x){fairest}, "
        f"{saved[best]:.0f}% less memory ({MEMORY:g}%), held-out loss {gaps[best]:+.2f}% ({GAP:g}%); "
        f"the best trivial policy is {trivial} at {speeds[trivial]:.2f}x. "
        f"Bare products run at most {bound:.2f}x as fast as FP32's on this machine "
        f"({', '.join(f'{name} {ratio:.2f}x' for name, ratio in products.items())}), which bounds every policy",
        figures=beside.figures_from(best)
        | {
            f"parts in {chosen} at the end, {name}": Figure(value=_mean_share(of, chosen, num_parts), unit="%")
            for name, of in runs.items()
            if name in ADAPTIVE
            for chosen in ("bf16", "int8")
        },
        conditions={
            **size.describe(),
            "losses": "controllers go by the formats' speeds at the large model's shapes, and so choose as there",
            "decisions": f"every {CHANGING['every']} steps, {CHANGING['window']} measured",
            "pace": f"{large.model_config(workbench.VOCAB_SIZE).num_parameters} parameters, {large.batch_rows} rows of "
            f"{large.seq_len} tokens; all steps after the first decision, of which there is one every "
            f"{LARGE_CHANGING['every']} steps, {LARGE_CHANGING['window']} of them measured",
            "memory": f"same model, {MEMORY_ROWS} rows, a decision every {SOON_CHANGING['every']} steps; the most that "
            f"any step takes before and after two decisions; {memory_probe.CONDITION}",
        },
        samples=beside.samples,
    )


def _mean_share(runs: Sequence[Outcome], chosen: Format, num_parts: int) -> float:
    """Percent of the parts that end in a format; what never changed is in BF16."""
    ends = [[*run.formats.values(), *["bf16"] * (num_parts - len(run.formats))] for run in runs]
    return statistics.fmean(100 * of.count(chosen) / num_parts for of in ends)


CLAIM = Claim(
    name="adaptive_precision",
    statement="Choosing the number format of each layer while training saves 42% of the memory and makes iterations "
    "3.8 times as fast.",
    source="published guides to DeepSeek-style training",
    published="42% less memory, 3.8x iteration speed against FP32",
    compared="rules and a contextual bandit that choose among FP32, BF16 and INT8 for each block's attention and "
    "feed-forward layers, against FP32 (also with oneDNN's products, where these are exact), all BF16, and INT8 with "
    "FP32 ends, the latter two also with the residual stream in BF16 that the controllers' runs have; same weights and "
    "batches; pace and memory on a model of more than 30 million parameters, losses on a small one, in the formats "
    "that controllers choose at the large one's shapes",
    target=f"{SPEED:g}x FP32's tokens per second and more than the trivial policies', {MEMORY:g}% less memory, at most "
    f"{GAP:g}% more held-out loss",
    headline=tuple(
        f"{what}, {name}"
        for name in (*ADAPTIVE, "all INT8, BF16 stream")
        for what in ("speed over FP32", "memory saved", "held-out loss above FP32")
    ),
    measure=measure,
)
