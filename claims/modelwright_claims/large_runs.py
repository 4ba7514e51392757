"""Pace and memory of training a model of more than 30 million parameters, for settings that are compared by them.

Large products are where number formats pay; losses are compared on small models, which can be trained for long. Runs
that were finished in an earlier call, by the same code on the same machine, are not made again (`Setting.kept`). Knows
no technique.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from modelwright.precision.policy import PrecisionConfig
from modelwright_claims import memory_probe, workbench
from modelwright_claims.claim import Setting
from modelwright_claims.kept import Kept, setup_digest
from modelwright_claims.workbench import Size


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


def paces(setting: Setting, arms: Mapping[str, Paced], seeds: Sequence[int], *, name: str) -> dict[str, list[float]]:
    """Tokens per second of every arm by seed; all arms of a seed one after the other. name: of the claim."""
    size, text = large_size(setting), workbench.prepare_text(setting)
    kept = Kept(setting.kept / f"{name}-large.json" if setting.kept else None)
    digest = setup_digest()
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for seed in seeds:
        key = f"pace of {arms}, {size}, seed {seed}, {digest}"
        if key not in kept:
            of_seed: dict[str, float] = {}
            for arm, paced in arms.items():
                setting.progress.note(f"{name}: pace of {arm}, seed {seed}")
                config = replace(size, num_steps=paced.end).train_config(precision=paced.precision)
                of_seed[arm] = workbench.run(setting, text, size, config, seed=seed).pace(paced.first)
            kept[key] = of_seed
        for arm, pace in kept[key].items():
            found[arm].append(pace)
    return found


def peaks(setting: Setting, arms: Mapping[str, PrecisionConfig], *, batch_rows: int, name: str) -> dict[str, int]:
    """Peak memory of every arm above the start, in a process of its own (`memory_probe`); batch_rows: of the full
    claim."""
    size = large_size(setting) if setting.quick else replace(large_size(setting), batch_rows=batch_rows)
    kept = Kept(setting.kept / f"{name}-large.json" if setting.kept else None)
    digest = setup_digest()
    for arm, precision in arms.items():
        key = f"peak of {precision}, {size}, {digest}"
        if key not in kept:
            setting.progress.note(f"{name}: memory of {arm}")
            kept[key] = peak_bytes(size, precision)
    return {arm: kept[f"peak of {precision}, {size}, {digest}"] for arm, precision in arms.items()}


def peak_bytes(size: Size, precision: PrecisionConfig) -> int:
    """The most that steps take above what the process held before the model, with two decisions of a controller."""
    (found,) = memory_probe.measure(
        memory_probe.Probe(
            model=size.model_config(workbench.VOCAB_SIZE),
            train=size.train_config(precision=precision),
            seq_len=size.seq_len,
            num_steps=2 * precision.adaptive.every + 2 if precision.adaptive.looks else memory_probe.NUM_STEPS,
        )
    )
    return found.peak_bytes
