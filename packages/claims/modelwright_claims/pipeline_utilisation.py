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

from modelwright.parallel.pipeline.balance import StageSpan
from modelwright_claims.claim import Claim, Conditions, Figure, Measurement, Samples, Setting, Verdict
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.launch import run_ranks
from modelwright_claims.pipeline_probe import ProbeSize
from modelwright_claims.pipeline_replay import busy_share, equal_durations, measured_durations
from modelwright_claims.statistics import differences, estimate, ratios
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
SUFFIXES = {"measured": "", "allowed": ": allowed", "equal": ": equal stages", "step_s": ": step, s"}
"""What the names of samples end in."""


def probe_size(setting: Setting) -> ProbeSize:
    if setting.quick:
        small = Size(model_dim=64, num_layers=4, seq_len=64, batch_rows=8, num_steps=1)
        return ProbeSize(model=small, vocab_size=256, num_repeats=2)
    model = Size(model_dim=256, num_layers=8, seq_len=256, batch_rows=16, num_steps=1)
    return ProbeSize(model=model, vocab_size=2048, num_repeats=5)


def microbatch_counts(setting: Setting) -> tuple[int, ...]:
    return (1, 8) if setting.quick else (1, 2, 4, 8, 16)


def measure(setting: Setting) -> Measurement:
    """Two ranks, and four where there are as many cores."""
    size, counts = probe_size(setting), microbatch_counts(setting)
    num_ranks = [2, 4] if (os.cpu_count() or 1) >= 4 and not setting.quick else [2]
    samples: dict[str, Sequence[float]] = {}
    for ranks in num_ranks:
        cases = [case(label, ranks, number) for label in SCHEDULES for number in counts]
        for name, steps in measure_cases(setting, size, cases, ranks).items():
            outcomes = [step_shares(step) for step in steps]
            samples |= {f"{name}{suffix}": [outcome[key] for outcome in outcomes] for key, suffix in SUFFIXES.items()}
    return Measurement(
        samples=samples,
        conditions={
            "parameters": size.model.model_config(size.vocab_size).num_parameters,
            "batch": f"{size.model.batch_rows} rows of {size.model.seq_len} tokens",
            "repeats": size.num_repeats,
            "ranks": ", ".join(map(str, num_ranks)),
            "cores": os.cpu_count() or 1,
            "threads a rank": 1,
            "gradient_sync": "gloo on this machine",
            "layers per stage": "by measured layer times",
        },
    )


def case(label: str, num_ranks: int, num_microbatches: int) -> dict[str, Any]:
    schedule, stages_per_rank = SCHEDULES[label]
    layout = {"pipeline": num_ranks, "data": 1, "schedule": schedule, "stages_per_rank": stages_per_rank}
    return {
        "name": case_name(label, num_ranks, num_microbatches),
        "layout": layout,
        "gradient_accumulation_steps": num_microbatches,
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
    spans = [[StageSpan(**span) for span in rank["spans"]] for rank in ranks]
    step_s = max(rank["end"] for rank in ranks) - min(rank["start"] for rank in ranks)
    busy_s = [sum(span.busy_s for span in rank) for rank in spans]
    return {
        "measured": statistics.fmean(busy_s) / step_s,
        "allowed": busy_share(spans, measured_durations(spans)),
        "equal": busy_share(spans, equal_durations(spans)),
        "step_s": step_s,
    }


def judge(samples: Samples, conditions: Conditions) -> Verdict:
    """Met when 1F1B reaches the published share at the most microbatches in a shorter step than with one, and no case
    is far below its bound."""
    judgment = Judgment()
    ranks = max(map(int, str(conditions["ranks"]).split(", ")))
    prefix = f"1F1B, {ranks} ranks, "
    most = max(map(int, names_between(samples, prefix, " microbatches")))
    one, many = (case_name("1F1B", ranks, number) for number in (1, most))
    busy = {name: estimate([100 * share for share in samples[name]]) for name in (one, many)}
    judgment.figures |= {
        "busy share, 1F1B, 1 microbatch": busy[one].figure("%"),
        f"busy share, 1F1B, {most} microbatches": busy[many].figure("%"),
    }
    judgment.said.append(
        f"1F1B over {ranks} ranks is busy {busy[one].mean:.0f}% of a step with one microbatch and "
        f"{busy[many].mean:.0f}% with {most}"
    )
    judgment.at_least(f"busy share with {most} microbatches", busy[many], 100 * TARGET_SHARE, "%")
    with judgment.part():
        step = ratios(*(samples[f"{name}{SUFFIXES['step_s']}"] for name in (many, one)))
        judgment.figures[f"time of a step, 1F1B, {most} microbatches over one"] = step.figure("x")
        judgment.said.append(f"whose step takes {step.mean:.2f}x the time")
        judgment.below(f"step with {most} microbatches over the whole batch's", step, 1.0, "x")
    cases = [name for name in samples if name.endswith(" microbatches")]
    with judgment.part():
        gaps = {
            name: differences(
                [100 * share for share in samples[name + SUFFIXES["allowed"]]], [100 * share for share in samples[name]]
            )
            for name in cases
        }
        worst = max(gaps, key=lambda name: gaps[name].upper)
        judgment.figures["largest gap to what the schedule allows"] = gaps[worst].figure("points")
        judgment.said.append(
            f"no case is more than {gaps[worst].mean:.0f} points below what its stage times allow ({worst})"
        )
        judgment.at_most(f"gap of {worst}", gaps[worst], 100 * MAX_GAP, " points")
    for name in cases:
        judgment.figures[f"{name}: measured"] = estimate([100 * share for share in samples[name]]).figure("%")
        for key, label in (("allowed", "allowed by the measured stage times"), ("equal", "theory, equal stages")):
            with judgment.beside():
                share = 100 * statistics.median(samples[name + SUFFIXES[key]])
                judgment.figures[f"{name}: {label}"] = Figure(value=share, unit="%")
        with judgment.beside():
            step_s = statistics.median(samples[name + SUFFIXES["step_s"]])
            judgment.figures[f"{name}: step"] = Figure(value=step_s, unit="s")
    return judgment.verdict()


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
    f"{100 * MAX_GAP:.0f} points below what its measured stage times allow; and that step shorter than the one with "
    "the whole batch",
    measure=measure,
    judge=judge,
)
