"""Claim: three-level compression removes 98% of the bytes of gradient exchange, and the model learns as well."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from modelwright.core.config import ModelwrightError
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared, described
from modelwright_claims.experiment import Runner
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.statistics import Compare, Estimate, percent_above, percent_saved
from modelwright_claims.training_run import Processes, Run
from modelwright_claims.workbench import Size

METHODS: dict[str, dict[str, Any]] = {
    "exact": {"max_grad_norm": 0.5},
    "bf16": {"gradient_sync": {"kind": "bf16"}},
    "powersgd-8": {"gradient_sync": {"kind": "powersgd"}},
    "three-level-step": {"gradient_sync": {"kind": "topk_quantized", "topk_quantized": {"topk_fraction": 0.05}}},
    "diloco-10": {"gradient_sync": {"local_sgd": {"sync_every_steps": 10}}},
    "int8-local-20": {"gradient_sync": {"kind": "int8", "local_sgd": {"sync_every_steps": 20}}},
    "three-level-local-5": {
        "gradient_sync": {
            "kind": "topk_quantized",
            "topk_quantized": {"topk_fraction": 0.25},
            "local_sgd": {"sync_every_steps": 5, "keep_residual": True},
        }
    },
    "three-level-local-1": {
        "gradient_sync": {
            "kind": "topk_quantized",
            "topk_quantized": {"topk_fraction": 0.05},
            "local_sgd": {"sync_every_steps": 1, "keep_residual": True},
        }
    },
    "shared-moment-local-3": {
        "max_grad_norm": 0.5,
        "gradient_sync": {
            "kind": "topk_quantized",
            "topk_quantized": {"topk_fraction": 0.35, "selection": "global", "codebook": "means"},
            "local_sgd": {"sync_every_steps": 3, "keep_residual": True, "sync_second_moment_every": 7},
        },
    },
}
"""Changes to the `TrainConfig`, by name. Clips were chosen on seed 0: report other seeds."""

EXACT, METHOD = "exact", "shared-moment-local-3"
BESIDE = ("powersgd-8", "int8-local-20")
TARGET_REMOVED, TARGET_GAP = 98.0, 0.3
LOSS, BYTES = "held-out loss, ", "bytes sent, "
NUM_RANKS = 2
SEEDS = (101, 102, 103)
"""Not among those that the method was chosen on."""
FRESH, CONTINUED = "from drawn weights", "continued"
RunName = tuple[str, int, str]
"""Method, seed and regime."""
RATE, CONTINUED_RATE = 8e-3, 8e-4


def measure(setting: Setting) -> Measurement:
    """Two processes of one thread; each method from the same weights on the same batches for every seed.

    In two regimes: from drawn weights, and as continued training from the end of the seed's exact run.
    """
    num_steps, seeds = (60, SEEDS[:1]) if setting.quick else (1000, SEEDS)
    size = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=16, num_steps=num_steps, learning_rate=RATE)
    names = (EXACT, METHOD) if setting.quick else (EXACT, METHOD, *BESIDE)
    runs = fresh_runs(names, seeds, size, NUM_RANKS)
    runs |= continued_runs(names, seeds, size, NUM_RANKS, learning_rate=CONTINUED_RATE)
    return measurement(make_runs(setting, runs), size)


def fresh_runs(names: Sequence[str], seeds: Sequence[int], size: Size, num_ranks: int) -> dict[RunName, Run]:
    """Return one run of each method for each seed, from weights drawn by the seed; the ranks stand for hosts."""
    processes = Processes(hosts=num_ranks, threads=1)
    return {
        (name, seed, FRESH): Run(size=size, settings=METHODS[name], seed=seed, processes=processes)
        for seed in seeds
        for name in names
    }


def continued_runs(
    names: Sequence[str], seeds: Sequence[int], size: Size, num_ranks: int, *, learning_rate: float
) -> dict[RunName, Run]:
    """Return one run of each method for each seed, from the weights with which the seed's exact run ends."""
    exact = fresh_runs([EXACT], seeds, size, num_ranks)
    later = fresh_runs(names, seeds, replace(size, learning_rate=learning_rate), num_ranks)
    return {
        (name, seed, CONTINUED): replace(run, start_from=exact[EXACT, seed, FRESH])
        for (name, seed, _), run in later.items()
    }


def make_runs(setting: Setting, runs: Mapping[RunName, Run]) -> list[dict[str, Any]]:
    """Make the runs and return their losses and the bytes that the first rank sent."""
    result = []
    for (name, seed, regime), outcome in zip(runs, Runner(setting).all(list(runs.values())), strict=True):
        if outcome.bytes_sent is None:
            raise ModelwrightError("bytes sent over TCP can be counted on Linux 4.19 or newer only")
        measured = {"heldout_loss": outcome.heldout_loss, "bytes_sent": outcome.bytes_sent}
        result.append({"name": name, "seed": seed, "regime": regime, **measured})
    return result


def measurement(runs: Sequence[Mapping[str, Any]], size: Size) -> Measurement:
    """Return losses and bytes of every method in both regimes, by seed."""
    samples: dict[str, list[float]] = {}
    for run in runs:
        for what, value in ((LOSS, run["heldout_loss"]), (BYTES, run["bytes_sent"])):
            samples.setdefault(f"{what}{run['name']}, {run['regime']}", []).append(float(value))
    return Measurement(
        samples=samples,
        conditions=size.describe()
        | described(__name__)
        | {
            "ranks": NUM_RANKS,
        },
    )


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    judgment = Judgment()
    for regime in (FRESH, CONTINUED):
        names = [name for name in names_between(samples, LOSS, f", {regime}") if name != EXACT]

        def beside_exact(compare: Compare, what: str, name: str, regime: str = regime) -> Estimate:
            return compare(samples[f"{what}{name}, {regime}"], samples[f"{what}{EXACT}, {regime}"])

        for name in names:
            removed = partial(beside_exact, percent_saved, BYTES, name)
            judgment.note(f"bytes removed, {name}, {regime}", removed, "%")
            gap = beside_exact(percent_above, LOSS, name)
            judgment.ask(f"held-out loss above exact, {name}, {regime}", gap, "%")
        gap, what = beside_exact(percent_above, LOSS, METHOD), f"{regime}: held-out loss above exact"
        say = regime + ": held-out loss {0.mean:+.2f}% from exact"
        judgment.ask("", gap, "%", "<=", TARGET_GAP, what=what, say=say)
        removed, what = partial(beside_exact, percent_saved, BYTES, METHOD), f"{regime}: bytes removed"
        judgment.ask("", removed, "%", ">=", TARGET_REMOVED, what=what, say="{0.mean:.2f}% of the bytes removed")
    gained = percent_saved(*(samples[f"{LOSS}{EXACT}, {regime}"] for regime in (CONTINUED, FRESH)))
    say = "continuing takes {0.mean:.2f}% off the exact run's loss, means of {0.count} seeds"
    judgment.ask("held-out loss that continuing takes off, exact", gained, "%", say=say)
    return judgment.verdict()


CLAIM = declared(__name__)
