"""Claim: BF16 compute over FP32 master weights trains faster in less memory to the same loss."""

import statistics
from dataclasses import replace

import torch

from modelwright.core.config import dump
from modelwright.train.precision.policy import Policy, PrecisionConfig
from modelwright_claims import memory_probe, workbench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.experiment import Experiment, run_experiment
from modelwright_claims.judging import Judgment
from modelwright_claims.large_runs import (
    BY_ONEDNN,
    FP32,
    Paced,
    baseline_conditions,
    fastest_exact,
    large_size,
    onednn_is_exact,
    paces,
    peaks,
)
from modelwright_claims.statistics import differences, paired_t_test, percent_above, percent_saved, ratios
from modelwright_claims.training_run import Run

SPEED_TARGET = 2.0
LOSS_TARGET = 0.02
FORMATS: dict[str, Policy] = {"fp32": "fp32", "bf16": "bf16_mixed"}
LOSS, PACE, PEAK = "held-out loss, ", "tokens per second, ", "peak bytes, "

MEMORY_ROWS, MORE_ROWS = 16, 32
"""Rows of a batch where memory is compared: the more rows, the larger the part of activations, which BF16 halves."""
WITH_MORE = f", {MORE_ROWS} rows"


def measure(setting: Setting) -> Measurement:
    """Losses of paired seeds on a small model; pace and memory on one of 39 million parameters."""
    size = workbench.size(setting)
    size = replace(size, num_steps=size.num_steps // (3 if setting.quick else 1))
    formats = {name: PrecisionConfig(policy=policy) for name, policy in FORMATS.items()}
    short = 5 if setting.quick else 12
    paced = {name: Paced(precision=one, first=2, end=short) for name, one in formats.items()}
    if onednn_is_exact():
        paced[BY_ONEDNN] = replace(paced["fp32"], precision=replace(formats["fp32"], fp32_matmul="onednn"))
    seeds = range(2 if setting.quick else 5)
    result = paces(setting, paced, seeds[:3])
    taken = peaks(setting, formats, batch_rows=MEMORY_ROWS)
    taken |= {f"{name}{WITH_MORE}": of for name, of in peaks(setting, formats, batch_rows=MORE_ROWS).items()}
    variants = {name: Run(size=size, settings={"precision": dump(one)}) for name, one in formats.items()}
    samples = run_experiment(setting, Experiment(variants=variants, seeds=seeds))
    losses = {name: samples.losses(name) for name in variants}
    large = large_size(setting)
    return Measurement(
        samples={
            **{f"{LOSS}{name}": of for name, of in losses.items()},
            **{f"{PACE}{name}": of for name, of in result.items()},
            **{f"{PEAK}{name}": of for name, of in taken.items()},
        },
        conditions={
            **size.describe(),
            "pace": f"{large.model_config(workbench.VOCAB_SIZE).num_parameters} parameters, {large.batch_rows} rows of "
            f"{large.seq_len} tokens",
            "memory": f"the same model, {MEMORY_ROWS} and {MORE_ROWS} rows; {memory_probe.CONDITION}",
            "instruction set": torch.backends.cpu.get_cpu_capability(),
            **baseline_conditions(),
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    speed_up = ratios(samples[f"{PACE}bf16"], samples[f"{PACE}{FP32}"])
    judgment.ask("speed-up", speed_up, "x", say="{0.mean:.2f}x the speed of FP32 by PyTorch's own products")
    with judgment.part():
        fastest = fastest_exact(samples, conditions, PACE)
        against = ratios(samples[f"{PACE}bf16"], samples[f"{PACE}{fastest}"])
        say = "{0.mean:.2f}x that by oneDNN's, which BF16 uses, too" if fastest == BY_ONEDNN else ""
        figure, what = "speed-up over the faster FP32", f"speed over {fastest}"
        judgment.ask(figure, against, "x", ">=", SPEED_TARGET, what=what, say=say)
    with judgment.part():
        method, baseline = samples[f"{LOSS}bf16"], samples[f"{LOSS}{FP32}"]
        p_value = f" (p = {paired_t_test(method, baseline).p_value:.2g})" if len(method) > 1 else ""
        gap, what = differences(method, baseline), "held-out loss above FP32"
        judgment.ask("loss gap", gap, "nats", "<=", LOSS_TARGET, what=what, say="loss {0.mean:+.4f} nats" + p_value)
        judgment.ask(what, percent_above(method, baseline), "%")
    judgment.ask(
        "memory ratio", lambda: ratios(samples[f"{PEAK}bf16"], samples[f"{PEAK}{FP32}"]), "x", "<", 1.0,
        what="memory", say="{0.mean:.2f}x the memory",
    )  # fmt: skip
    for rows, suffix in ((MEMORY_ROWS, ""), (MORE_ROWS, WITH_MORE)):
        judgment.note(
            f"memory saved, {rows} rows",
            lambda end=suffix: percent_saved(samples[f"{PEAK}bf16{end}"], samples[f"{PEAK}{FP32}{end}"]),
            "%",
            say=f"{{0.mean:.0f}}% less memory with {rows} rows",
        )
    for name in FORMATS:
        pace, peak = f"tokens per second, {name.upper()}", f"peak memory above start, {name.upper()}"
        judgment.note(pace, lambda name=name: statistics.median(samples[PACE + name]), "/s")
        judgment.note(peak, lambda name=name: statistics.median(samples[PEAK + name]) / 2**20, "MiB")
    return judgment.verdict()


CLAIM = declared(__name__)
