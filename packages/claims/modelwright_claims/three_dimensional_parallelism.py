"""Claim: combining data, pipeline and tensor parallelism trains more tokens per device than one device after the other.

The published figure names no baseline. The one that it can be held against is plain model parallelism, whose devices
wait for each other: n devices then do the work of one, so that no layout can be more than n times as fast per device.
"""

import math
import os
import statistics
from dataclasses import dataclass, field, replace

from modelwright.parallel.mesh import ParallelConfig
from modelwright_claims import memory_probe
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, untestable
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.statistics import ratios

TARGET = 4.2
BASELINE = "layers to devices"
STEP = "step, s: "
SEQ_LEN = 256
NUM_MICROBATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a number of ranks, and into how many microbatches each copy cuts its rows."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    num_microbatches: int = 1


def layouts(num_ranks: int) -> dict[str, Layout]:
    """The baseline, every axis alone, and their products where there are ranks enough."""
    result = {
        BASELINE: Layout(parallel=ParallelConfig(pipeline=num_ranks)),
        "pipeline": Layout(parallel=ParallelConfig(pipeline=num_ranks), num_microbatches=NUM_MICROBATCHES),
        "tensor": Layout(parallel=ParallelConfig(tensor=num_ranks)),
        "data": Layout(parallel=ParallelConfig(data=num_ranks)),
        "data, sharded": Layout(parallel=ParallelConfig(data=num_ranks, zero_stage=3)),
    }
    if num_ranks % 4 == 0:
        two_by_two = ParallelConfig(pipeline=2, data=num_ranks // 2)
        result["pipeline x data"] = Layout(parallel=two_by_two, num_microbatches=NUM_MICROBATCHES)
    if num_ranks % 8 == 0:
        cube = ParallelConfig(pipeline=2, data=num_ranks // 4, tensor=2)
        result["pipeline x data x tensor"] = Layout(parallel=cube, num_microbatches=NUM_MICROBATCHES)
    return result


def measure(setting: Setting) -> Measurement:
    """Measure one rank for each core (2, 4 or 8), one thread each, the same global batch under every layout."""
    cores = os.cpu_count() or 1
    if cores < 2:
        return untestable("one core: there is no second device to wait for")
    num_ranks = max(number for number in (2, 4, 8) if number <= cores)
    width, num_rows, repeats = (128, 16, 1) if setting.quick else (256, 16 * num_ranks, 3)
    model = memory_probe.probe_model(
        model_dim=width, num_layers=8, vocab_size=2048, seq_len=SEQ_LEN, head_dim=width // 8
    )
    cases = layouts(num_ranks)
    probes = [
        memory_probe.fp32_probe(
            model, rows=num_rows, parallel=layout.parallel, gradient_accumulation_steps=layout.num_microbatches
        )
        for layout in cases.values()
    ]
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats):
        setting.progress.note(f"three_dimensional_parallelism: round {repeat + 1} of {repeats}")
        for name, ranks in zip(cases, memory_probe.measure_all(probes, num_ranks=num_ranks), strict=True):
            seconds[name].append(max(measured.step_s for measured in ranks))
    return Measurement(
        samples={f"{STEP}{name}": samples for name, samples in seconds.items()},
        conditions={
            "devices": f"{num_ranks} processes of one thread, gloo on this machine",
            "parameters": model.num_parameters,
            "batch": f"{num_rows} rows of {SEQ_LEN} tokens, {NUM_MICROBATCHES} microbatches in pipelines",
            "tokens a step": num_rows * SEQ_LEN,
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Fewer devices than the published number cannot be as much faster, whatever the layout: they cannot test it."""
    judgment = Judgment()
    num_ranks = int(str(conditions["devices"]).split()[0])
    layouts = names_between(samples, STEP)
    against = {name: ratios(samples[STEP + BASELINE], samples[STEP + name]) for name in layouts if name != BASELINE}
    best = max(against, key=lambda name: against[name].mean)
    for name, ratio in against.items():
        judgment.ask(f"against {BASELINE}: {name}", ratio, "x")
    with judgment.beside():
        each = int(conditions["tokens a step"]) / num_ranks
        for name in layouts:
            pace = each / statistics.median(samples[STEP + name])
            judgment.ask(f"tokens per device per second: {name}", pace, "tokens/s")
    judgment.said.append(
        f"{against[best].mean:.2f}x tokens per device per second at best ({best}) against {num_ranks} devices that "
        f"work one after the other, of at most {num_ranks}x that {num_ranks} devices allow"
    )
    judgment.check(f"against {BASELINE}, {best}", against[best], TARGET, "x", ">=")
    verdict = judgment.verdict()
    if num_ranks >= TARGET:
        return verdict
    reason = f"{TARGET}x needs at least {math.ceil(TARGET)} devices, there were {num_ranks}; {judgment.said[0]}"
    return replace(verdict, kind="cannot be tested here", reason=reason)


CLAIM = declared(__name__)
