"""Claim: mixed precision trains with less energy than FP32, by the meters of the processor (RAPL) or the GPU (NVML)."""

import tempfile
from dataclasses import replace
from pathlib import Path

from modelwright.core.config import dump
from modelwright.parallel.mesh import single
from modelwright.train.monitors.energy import ENERGY_FILE, MEASURED, EnergyConfig, meters_of_rank, read_energy
from modelwright.train.precision.policy import PrecisionConfig
from modelwright_claims import workbench
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, untestable
from modelwright_claims.judging import Judgment
from modelwright_claims.large_runs import (
    BY_ONEDNN,
    FP32,
    baseline_conditions,
    fastest_exact,
    large_size,
    onednn_is_exact,
)
from modelwright_claims.statistics import percent_saved
from modelwright_claims.training_run import Run, train_once

SAVED = 42.0
"""Percent, as published."""
BF16 = "bf16_mixed"
JOULES, PACE = "joules per token, ", "tokens per second, "
NO_METER = "no meter of energy can be read here: neither RAPL (/sys/class/powercap, often only by root) nor NVML"


def measure(setting: Setting) -> Measurement:
    """Alternated runs of every format; joules and tokens of whole runs, as `energy.json` of a stage has them."""
    device = workbench.device()
    meters = [one.name for one in meters_of_rank(EnergyConfig(), device, is_host_first=True) if one.name in MEASURED]
    if not meters:
        return untestable(NO_METER)
    size = replace(large_size(setting), num_steps=5 if setting.quick else 20)
    formats = {FP32: PrecisionConfig(policy="fp32"), BF16: PrecisionConfig(policy="bf16_mixed")}
    if onednn_is_exact():
        formats[BY_ONEDNN] = PrecisionConfig(policy="fp32", fp32_matmul="onednn")
    samples: dict[str, list[float]] = {}
    for seed in range(2 if setting.quick else 5):
        for name, precision in formats.items():
            run = Run(size=size, settings={"precision": dump(precision)}, seed=seed, heldout_batches=1)
            with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
                outcome = train_once(setting, run, single(device), stage=Path(folder))
                (energy,) = read_energy(Path(folder) / ENERGY_FILE)
            joules = sum(value for source, value in energy["joules"].items() if source in MEASURED)
            samples.setdefault(JOULES + name, []).append(joules / energy["num_tokens"])
            samples.setdefault(PACE + name, []).append(outcome.pace(2))
    return Measurement(
        samples=samples,
        conditions={
            **size.describe(),
            "meters": ", ".join(meters) + "; those of a processor count the whole host, its idle power included",
            **baseline_conditions(),
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    with judgment.part():
        fastest = fastest_exact(samples, conditions, PACE)
        saved = percent_saved(samples[JOULES + BF16], samples[JOULES + fastest])
        say = f"{{0.mean:.0f}}% less energy for a token than the faster FP32 ({fastest})"
        judgment.ask("energy saved", saved, "%", ">=", SAVED, say=say)
    judgment.show(samples, [name for name in samples if name.startswith(JOULES)], "J")
    return judgment.verdict()


CLAIM = declared(__name__)
