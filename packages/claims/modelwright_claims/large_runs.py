"""Pace and memory of training a model of more than 30 million parameters, for settings that are compared by them.

Large products are where number formats pay; losses are compared on small models, which can be trained for long.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelwright.core.config import ConfigError, dump
from modelwright.train.precision.apply import fp32_products
from modelwright.train.precision.policy import PrecisionConfig
from modelwright_claims import memory_probe, workbench
from modelwright_claims.claim import Conditions, Samples, Setting
from modelwright_claims.experiment import Experiment, open_cache, run_experiment
from modelwright_claims.judging import Lacks
from modelwright_claims.training_run import Run
from modelwright_claims.workbench import Size

FP32, BY_ONEDNN = "fp32", "fp32 by oneDNN"
NO_ONEDNN = "FP32 by oneDNN"
"""The condition that says why it was not compared."""


def onednn_is_exact() -> bool:
    """Return whether oneDNN's FP32 products are another way to the same values here."""
    if workbench.device().type != "cpu":
        return False
    try:
        with fp32_products(onednn=True):
            return True
    except ConfigError:
        return False


def baseline_conditions() -> dict[str, str]:
    """Return the condition to record without a second exact FP32."""
    return {} if onednn_is_exact() else {NO_ONEDNN: "not compared: oneDNN has no exact FP32 products here"}


def fastest_exact(samples: Samples, conditions: Conditions, prefix: str) -> str:
    """Return the arm of exact FP32 with the most tokens per second. Raises `Lacks` when oneDNN's was left out without a
    reason.
    """
    if prefix + BY_ONEDNN not in samples and NO_ONEDNN not in conditions:
        raise Lacks(f"samples {prefix + BY_ONEDNN!r}")
    arms = [arm for arm in (FP32, BY_ONEDNN) if arm == FP32 or prefix + arm in samples]
    return max(arms, key=lambda arm: statistics.fmean(samples[prefix + arm]))


NUM_PEAKS = 3
"""Resident memory differs a little between processes. The bound of two repeats is nearly three times as far away."""


@dataclass(frozen=True, kw_only=True)
class Paced:
    """A setting, and over which steps its pace is taken: the first of them and their end."""

    precision: PrecisionConfig
    first: int
    end: int


def large_size(setting: Setting) -> Size:
    """39 million parameters; steps are the settings' own."""
    if setting.quick:
        return Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=8, num_steps=8)
    return Size(model_dim=768, num_layers=6, seq_len=512, batch_rows=8, num_steps=8)


def paces(setting: Setting, arms: Mapping[str, Paced], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Return the tokens per second of every arm by seed; all arms of a seed run one after the other."""
    size = large_size(setting)
    variants = {
        arm: Run(size=replace(size, num_steps=paced.end), settings={"precision": dump(paced.precision)})
        for arm, paced in arms.items()
    }
    samples = run_experiment(setting, Experiment(variants=variants, seeds=seeds, timed=True))
    return {arm: [run.pace(arms[arm].first) for run in of] for arm, of in samples.runs.items()}


def peaks(setting: Setting, arms: Mapping[str, PrecisionConfig], *, batch_rows: int) -> dict[str, list[float]]:
    """Return each arm's peaks of memory above the start, in separate processes. batch_rows: of a full measurement."""
    size = large_size(setting) if setting.quick else replace(large_size(setting), batch_rows=batch_rows)
    return repeated_peaks(setting, {arm: (size, precision) for arm, precision in arms.items()})


def repeated_peaks(setting: Setting, arms: Mapping[str, tuple[Size, PrecisionConfig]]) -> dict[str, list[float]]:
    """Return `NUM_PEAKS` peaks of every arm."""
    cache = open_cache(setting, memory_probe)
    result: dict[str, list[float]] = {arm: [] for arm in arms}
    for repeat in range(NUM_PEAKS):
        for arm, (size, precision) in arms.items():
            setting.progress.note(f"memory of {arm}, repeat {repeat + 1}")
            key = {"peak of": dump(precision), "size": dump(size), "repeat": repeat}
            result[arm].append(cache.get(key, lambda size=size, precision=precision: peak_bytes(size, precision)))
    return result


def peak_bytes(size: Size, precision: PrecisionConfig) -> int:
    """The most that steps take above the memory that the process held before the model, with two decisions of a
    controller.
    """
    (result,) = memory_probe.measure(
        memory_probe.Probe(
            model=size.model_config(workbench.VOCAB_SIZE),
            train=size.train_config(precision=precision),
            seq_len=size.seq_len,
            num_steps=2 * precision.adaptive.decide_every_steps + 2
            if precision.adaptive.looks
            else memory_probe.NUM_STEPS,
        )
    )
    return result.peak_bytes
