"""Claim: cutting a batch into microbatches keeps the ranks of a pipeline busy.

Measured: how long each rank computes (spans around every stage's forward, loss and backward passes) over the length of
the step, for every schedule and number of microbatches, beside two bounds: the schedule's own with equal stages
(`equal_durations`), and what its order allows with the stage times that were measured (`measured_durations`). What is
missing to the second is communication and waiting that the schedule does not ask for.
"""

import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from modelwright.parallel.pipeline.trace import Span
from modelwright_claims.claim import Claim, Figure, Result, Setting
from modelwright_claims.launch import run_ranks
from modelwright_claims.pipeline_probe import ProbeSize
from modelwright_claims.pipeline_replay import busy_share, equal_durations, measured_durations
from modelwright_claims.workbench import Size

SCHEDULES = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "interleaved 1F1B": ("interleaved", 2),
    "zero bubble H1": ("zero_bubble", 1),
    "zero bubble V": ("zero_bubble", 2),
}
TARGET_SHARE = 0.78
MAX_GAP = 0.10
"""Largest difference to the bound that communication and the machine may cost."""


def probe_size(setting: Setting) -> ProbeSize:
    if setting.quick:
        small = Size(model_dim=64, num_layers=4, seq_len=64, batch_rows=8, num_steps=1)
        return ProbeSize(model=small, vocab_size=256, num_repeats=2)
    model = Size(model_dim=256, num_layers=8, seq_len=256, batch_rows=16, num_steps=1)
    return ProbeSize(model=model, vocab_size=2048, num_repeats=5)


def microbatch_counts(setting: Setting) -> tuple[int, ...]:
    return (1, 8) if setting.quick else (1, 2, 4, 8, 16)


def measure(setting: Setting) -> Result:
    """Two ranks, and four where there are as many cores."""
    size, counts = probe_size(setting), microbatch_counts(setting)
    num_ranks = [2, 4] if (os.cpu_count() or 1) >= 4 and not setting.quick else [2]
    shares: dict[str, dict[str, float]] = {}
    samples: dict[str, Sequence[float]] = {}
    for ranks in num_ranks:
        cases = [case(label, ranks, number) for label in SCHEDULES for number in counts]
        for name, steps in measure_cases(setting, size, cases, ranks).items():
            outcomes = [step_shares(step) for step in steps]
            shares[name] = {key: statistics.median(outcome[key] for outcome in outcomes) for key in outcomes[0]}
            samples[name] = [outcome["measured"] for outcome in outcomes]
    return judge(shares, samples, size, counts, num_ranks)


def case(label: str, num_ranks: int, num_microbatches: int) -> dict[str, Any]:
    schedule, stages_per_rank = SCHEDULES[label]
    layout = {"pipeline": num_ranks, "data": 1, "schedule": schedule, "stages_per_rank": stages_per_rank}
    return {
        "name": case_name(label, num_ranks, num_microbatches),
        "layout": layout,
        "num_microbatches": num_microbatches,
    }


def case_name(label: str, num_ranks: int, num_microbatches: int) -> str:
    return f"{label}, {num_ranks} ranks, {num_microbatches} microbatches"


def measure_cases(
    setting: Setting, size: ProbeSize, cases: Sequence[Mapping[str, Any]], num_ranks: int
) -> dict[str, list[list[dict[str, Any]]]]:
    """For each case its steps, for each step what every rank recorded."""
    with tempfile.TemporaryDirectory(dir=setting.folder) as scratch:
        folder = Path(scratch)
        (folder / "probe.json").write_text(json.dumps({"size": asdict(size), "cases": cases}))
        run_ranks("modelwright_claims.pipeline_probe", [scratch], num_ranks=num_ranks)
        records = [json.loads((folder / f"rank{rank}.json").read_text())["steps"] for rank in range(num_ranks)]
    return {name: list(map(list, zip(*(record[name] for record in records), strict=True))) for name in records[0]}


def step_shares(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One step: busy share measured, allowed by the order and the measured stage times, and with equal stages."""
    spans = [[Span(**span) for span in rank["spans"]] for rank in ranks]
    step_s = max(rank["end"] for rank in ranks) - min(rank["start"] for rank in ranks)
    busy_s = [sum(span.busy_s for span in rank) for rank in spans]
    return {
        "measured": statistics.fmean(busy_s) / step_s,
        "allowed": busy_share(spans, measured_durations(spans)),
        "equal": busy_share(spans, equal_durations(spans)),
        "step_s": step_s,
    }


def judge(
    shares: Mapping[str, Mapping[str, float]],
    samples: Mapping[str, Sequence[float]],
    size: ProbeSize,
    counts: Sequence[int],
    num_ranks: Sequence[int],
) -> Result:
    """Met when 1F1B reaches the published share at the most microbatches and no case is far below its bound."""
    ranks, most = max(num_ranks), max(counts)
    one, many = (shares[case_name("1F1B", ranks, number)] for number in (min(counts), most))
    gap, worst = max((share["allowed"] - share["measured"], name) for name, share in shares.items())
    met = many["measured"] >= TARGET_SHARE and gap <= MAX_GAP
    figures = {
        "busy share, 1F1B, 1 microbatch": Figure(value=100 * one["measured"], unit="%"),
        f"busy share, 1F1B, {most} microbatches": Figure(value=100 * many["measured"], unit="%"),
        "largest gap to what the schedule allows": Figure(value=100 * gap, unit="points"),
    }
    for name, share in shares.items():
        spread = statistics.stdev(samples[name]) if len(samples[name]) > 1 else 0.0
        figures[f"{name}: measured"] = Figure(value=100 * share["measured"], unit="%", spread=100 * spread)
        figures[f"{name}: allowed by the measured stage times"] = Figure(value=100 * share["allowed"], unit="%")
        figures[f"{name}: theory, equal stages"] = Figure(value=100 * share["equal"], unit="%")
        figures[f"{name}: step"] = Figure(value=share["step_s"], unit="s")
    return Result(
        kind="met" if met else "short",
        reason=f"1F1B over {ranks} ranks is busy {100 * one['measured']:.0f}% of a step with one microbatch and "
        f"{100 * many['measured']:.0f}% with {most} (theory {100 * one['equal']:.0f}% and {100 * many['equal']:.0f}%); "
        f"no case is more than {100 * gap:.0f} points below what its stage times allow ({worst})",
        figures=figures,
        conditions={
            "parameters": size.model.model_config(size.vocab_size).num_parameters,
            "batch": f"{size.model.batch_rows} rows of {size.model.seq_len} tokens",
            "repeats": size.num_repeats,
            "ranks": ", ".join(map(str, num_ranks)),
            "cores": os.cpu_count() or 1,
            "threads a rank": 1,
            "transport": "gloo on this machine",
            "layers per stage": "by measured layer times",
        },
        samples={name: list(values) for name, values in samples.items()},
    )


CLAIM = Claim(
    name="pipeline_utilisation",
    statement="Micro-batching raises the utilisation of a pipeline from 35% to 78%.",
    source="GPipe: Huang et al. 2019 (https://arxiv.org/abs/1811.06965), section 2.3; 1F1B and interleaving: Narayanan "
    "et al. 2021 (https://arxiv.org/abs/2104.04473), section 2.2; zero bubble: Qi et al. 2023 "
    "(https://arxiv.org/abs/2401.10241)",
    published="35% without micro-batches and 78% with them, stages and microbatches not told; theory for p equal "
    "stages and m microbatches: busy m / (m + p - 1), interleaved with v stages a rank v m / (v m + p - 1)",
    compared="the share of a step that ranks spend computing, the same batch whole and cut into up to 16 microbatches, "
    "five schedules, beside what each schedule's order allows",
    target=f"at least {100 * TARGET_SHARE:.0f}% with 16 microbatches under 1F1B, and no case more than "
    f"{100 * MAX_GAP:.0f} points below what its measured stage times allow",
    measure=measure,
)
