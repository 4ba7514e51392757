"""Claim: three-level compression removes 98% of the bytes of gradient exchange, and the model learns as well."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from modelwright.core.errors import ModelwrightError
from modelwright_claims.claim import Claim, Figure, Result, Setting
from modelwright_claims.experiment import Runner
from modelwright_claims.training_run import Processes, Run
from modelwright_claims.workbench import Size

METHODS: dict[str, dict[str, Any]] = {
    "exact": {"clip_norm": 0.5},
    "bf16": {"transport": {"kind": "bf16"}},
    "powersgd-8": {"transport": {"kind": "powersgd"}},
    "three-level-step": {"transport": {"kind": "three_level", "three_level": {"keep": 0.05}}},
    "diloco-10": {"transport": {"local_steps": {"every": 10}}},
    "int8-local-20": {"transport": {"kind": "int8", "local_steps": {"every": 20}}},
    "three-level-local-5": {
        "transport": {
            "kind": "three_level",
            "three_level": {"keep": 0.25},
            "local_steps": {"every": 5, "keep_own": True},
        }
    },
    "three-level-local-1": {
        "transport": {
            "kind": "three_level",
            "three_level": {"keep": 0.05},
            "local_steps": {"every": 1, "keep_own": True},
        }
    },
    "shared-moment-local-3": {
        "clip_norm": 0.5,
        "transport": {
            "kind": "three_level",
            "three_level": {"keep": 0.35, "selection": "global", "values": "means"},
            "local_steps": {"every": 3, "keep_own": True, "moment_every": 7},
        },
    },
}
"""Changes to the `TrainConfig`, by name. Clips were chosen on seed 0: report other seeds."""

EXACT, METHOD = "exact", "shared-moment-local-3"
BESIDE = ("bf16", "powersgd-8", "int8-local-20")
TARGET_REMOVED, TARGET_GAP = 98.0, 0.3
NUM_RANKS = 2
SEEDS = (101, 102, 103)
"""Not among those that the method was chosen on."""
FRESH, CONTINUED = "from drawn weights", "continued"
RunName = tuple[str, int, str]
"""Method, seed and regime."""
RATE, CONTINUED_RATE = 8e-3, 8e-4


def measure(setting: Setting) -> Result:
    """Two processes of one thread; each method from the same weights on the same batches for every seed.

    In two regimes: from drawn weights, and as continued training from the end of the seed's exact run.
    """
    num_steps, seeds = (60, SEEDS[:1]) if setting.quick else (1000, SEEDS)
    size = Size(model_dim=64, num_layers=2, seq_len=64, batch_rows=16, num_steps=num_steps, learning_rate=RATE)
    names = (EXACT, METHOD) if setting.quick else (EXACT, METHOD, *BESIDE)
    runs = fresh_runs(names, seeds, size, NUM_RANKS)
    runs |= continued_runs(names, seeds, size, NUM_RANKS, learning_rate=CONTINUED_RATE)
    return judge(make_runs(setting, runs), size)


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
    found = []
    for (name, seed, regime), outcome in zip(runs, Runner(setting).all(list(runs.values())), strict=True):
        if outcome.bytes_sent is None:
            raise ModelwrightError("bytes sent over TCP can be counted on Linux 4.19 or newer only")
        measured = {"heldout_loss": outcome.heldout_loss, "bytes_sent": outcome.bytes_sent}
        found.append({"name": name, "seed": seed, "regime": regime, **measured})
    return found


def judge(runs: Sequence[Mapping[str, Any]], size: Size) -> Result:
    """Met when the method removes enough bytes at a small enough mean gap of held-out loss, in both regimes."""
    regimes = {regime: [run for run in runs if run["regime"] == regime] for regime in (FRESH, CONTINUED)}
    figures: dict[str, Figure] = {}
    samples: dict[str, Sequence[float]] = {}
    said, met = [], True
    for regime, of_regime in regimes.items():
        for name in dict.fromkeys(run["name"] for run in of_regime):
            samples[f"held-out loss, {name}, {regime}"] = [
                run["heldout_loss"] for run in of_regime if run["name"] == name
            ]
            if name != EXACT:
                removed, gap = _beside_exact(of_regime, name)
                figures[f"bytes removed, {name}, {regime}"] = removed
                figures[f"held-out loss above exact, {name}, {regime}"] = gap
        removed, gap = _beside_exact(of_regime, METHOD)
        said.append(f"{regime}: {removed.value:.2f}% of the bytes removed, held-out loss {gap.value:+.2f}% from exact")
        met &= removed.value >= TARGET_REMOVED and gap.value <= TARGET_GAP
    before, after = (_exact_losses(regimes[regime]) for regime in (FRESH, CONTINUED))
    gained = statistics.fmean(100 * (1 - after[seed] / before[seed]) for seed in after)
    figures["held-out loss that continuing takes off, exact"] = Figure(value=gained, unit="%")
    return Result(
        kind="met" if met else "short",
        reason=f"{'; '.join(said)} (targets {TARGET_REMOVED:g}% and {TARGET_GAP:g}%), means of {len(after)} seeds; "
        f"continuing takes {gained:.2f}% off the exact run's loss",
        figures=figures,
        conditions=size.describe()
        | {
            "ranks": NUM_RANKS,
            "bytes": "all that the first process sent over TCP, with headers, as the kernel counts it",
            "rates": f"{RATE:g} from drawn weights for all; clip of exact out of four and rate out of three in one run "
            "each, the method's at clip 0.5 out of two rates, on other seeds; the others at clip 1, not tuned",
            "continued": "as many steps again on the same text in another order, warmup and cosine at "
            f"{CONTINUED_RATE:g}, from the weights with which the exact run ended; optimizer states begin anew",
        },
        samples=samples,
    )


def _beside_exact(runs: Sequence[Mapping[str, Any]], name: str) -> tuple[Figure, Figure]:
    """Bytes removed, and held-out loss above exact: in percent, paired by seed."""
    exact = {run["seed"]: run for run in runs if run["name"] == EXACT}
    mine = [run for run in runs if run["name"] == name]
    kept = statistics.fmean(run["bytes_sent"] / exact[run["seed"]]["bytes_sent"] for run in mine)
    gaps = [100 * (run["heldout_loss"] / exact[run["seed"]]["heldout_loss"] - 1) for run in mine]
    spread = statistics.stdev(gaps) if len(gaps) > 1 else 0.0
    removed = Figure(value=100 * (1 - kept), unit="%")
    return removed, Figure(value=statistics.fmean(gaps), unit="%", spread=spread)


def _exact_losses(runs: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    return {run["seed"]: run["heldout_loss"] for run in runs if run["name"] == EXACT}


CLAIM = Claim(
    name="gradient_compression",
    statement="Three-level gradient compression (selection, quantisation, coding) removes 98% of the bytes at nearly "
    "no loss.",
    source="published guides to DeepSeek-style training; the parts: Lin et al. 2018, Deep Gradient Compression "
    "(https://arxiv.org/abs/1712.01887); Douillard et al. 2023, DiLoCo (https://arxiv.org/abs/2311.08105)",
    published="98% gradient compression, loss not told",
    compared="data parallel over two processes with exact sums against local steps whose pseudo-gradients are sparse, "
    "quantised and coded, at equal tokens, from drawn weights and as continued training; beside BF16, PowerSGD and "
    "INT8 local steps",
    target=f"at least {TARGET_REMOVED:g}% of the bytes removed at a held-out loss at most {TARGET_GAP:g}% above exact",
    measure=measure,
)
