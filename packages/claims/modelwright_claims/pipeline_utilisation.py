"""Claim: cutting a batch into microbatches keeps the ranks of a pipeline busy.

Measured: how long each rank computes (spans around every stage's forward, loss and backward passes) over the length of
the step, for every schedule and number of microbatches, next to two bounds: the schedule's own with equal stages
(`equal_durations`), and the bound of its order with the stage times that were measured (`measured_durations`). What is
missing to the second is communication and waiting that the schedule does not ask for.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from modelwright.core.config import parse
from modelwright.data.rows.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Decoder
from modelwright.ops.microbenchmark import repeated, seconds_of
from modelwright.parallel.mesh import ParallelConfig, World, build_mesh, join_world
from modelwright.parallel.pipeline.balance import LayerCosts, StageSpan, split_layers
from modelwright.parallel.pipeline.runner import Pipeline
from modelwright_claims.claim import Conditions, Measurement, Samples, Setting, Verdict, declared
from modelwright_claims.judging import Judgment, names_between
from modelwright_claims.launch import run_ranks
from modelwright_claims.memory_probe import RandomRows
from modelwright_claims.statistics import differences, estimate, ratios
from modelwright_claims.workbench import Size
from modelwright_plan.bubble import Action, Kind, makespan


def measure_layer_times(
    model: Decoder,
    batch: TokenBatch,
    *,
    num_repeats: int = 3,
    chunk_tokens: int = 512,
    clock: Callable[[], float] = time.perf_counter,
) -> LayerCosts:
    """Seconds of forward and backward of each part of a plain model on `batch`, the median of the repeats.

    One layer is in memory at a time. Parameters' gradients are restored. The first run of every part is not counted. A
    rank's own figures; `agree` makes one of all ranks'.
    """
    attend = packed_attend(batch.segments_BT)
    hidden_BTD = model.embedding(batch.input_ids_BT).detach()
    blocks = dict(model.blocks.items())
    table = model.embedding.weight.requires_grad
    parts: list[Callable[[Tensor], Tensor]] = [lambda _: model.embedding(batch.input_ids_BT)] if table else []
    for block in blocks.values():
        lone = _alone(model, block)
        parts.append(lambda hidden, lone=lone: lone.run_blocks(hidden, batch.positions_BT, attend))
    parts.append(lambda hidden: model.cross_entropy(model.norm(hidden), batch.labels_BT, chunk_tokens=chunk_tokens))
    kept = [parameter.grad for parameter in model.parameters()]
    times = [_median_time(part, hidden_BTD, num_repeats, clock) for part in parts]
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    return LayerCosts(embedding=times[0] if table else 0.0, layers=tuple(times[-1 - len(blocks) : -1]), head=times[-1])


def _alone(model: Decoder, block: torch.nn.Module) -> Decoder:
    """The model with one block, which `run_blocks` gives its rotary tables."""
    lone = Decoder.__new__(Decoder)
    torch.nn.Module.__init__(lone)
    lone.config = model.config
    lone.blocks = torch.nn.ModuleDict({"0": block})
    return lone


def _median_time(
    part: Callable[[Tensor], Tensor], hidden_BTD: Tensor, repeats: int, clock: Callable[[], float]
) -> float:
    def forward_and_backward(leaf: Tensor) -> None:
        output = part(leaf)
        output.backward(torch.ones_like(output))

    def seconds() -> float:
        leaf = hidden_BTD.clone().requires_grad_()
        return seconds_of(lambda: forward_and_backward(leaf), leaf.device, clock=clock)

    return statistics.median(repeated(seconds, num_rounds=repeats, num_warmups=1))


def agree(costs: LayerCosts, world: World) -> LayerCosts:
    """The mean of all ranks' costs, the same on all of them: a split must not differ from rank to rank."""
    values = world.sums([costs.embedding, *costs.layers, costs.head])
    embedding, *layers, head = (value / world.size for value in values)
    return LayerCosts(embedding=embedding, layers=tuple(layers), head=cast(float, head))


@dataclass(frozen=True, kw_only=True)
class ProbeSize:
    """The model and the batch, which every number of microbatches shares out."""

    model: Size
    vocab_size: int
    num_repeats: int

    def batch(self) -> TokenBatch:
        """Full rows of one document each: every microbatch costs the same."""
        return RandomRows(self.model.batch_rows, self.model.seq_len, self.vocab_size).batch(0)


def measure_case(case: dict[str, Any], size: ProbeSize, model: Decoder, world: World) -> list[dict[str, Any]]:
    """Every timed step of one schedule and number of microbatches; the first step is not counted."""
    config = parse(ParallelConfig, case["layout"])
    mesh = build_mesh(world, config)
    pipeline = Pipeline(model, config, mesh, passes=lambda part: part)
    batch = size.batch()
    parts = batch.split(case["gradient_accumulation_steps"])

    def loss_of(output_BTD: Tensor, part: TokenBatch) -> Tensor:
        loss = pipeline.model.cross_entropy(output_BTD, part.labels_BT, chunk_tokens=512)
        return loss / batch.num_targets

    steps = []
    for _ in range(1 + size.num_repeats):
        world.barrier()
        start = time.perf_counter()
        pipeline.train(parts, loss_of)
        steps.append(
            {"start": start, "end": time.perf_counter(), "spans": list(map(asdict, pipeline.timeline.spans()))}
        )
        pipeline.model.zero_grad(set_to_none=True)
    return steps[1:]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    plan = json.loads((folder / "probe.json").read_text())
    size = parse(ProbeSize, plan["size"])
    with join_world(torch.device("cpu")) as world:
        model = Decoder(size.model.model_config(size.vocab_size))
        model.init_weights(0)
        costs = agree(measure_layer_times(model, size.batch().split(size.model.batch_rows)[0]), world)
        steps = {}
        for case in plan["cases"]:
            num_stages = case["layout"]["pipeline"] * case["layout"]["stages_per_rank"]
            case["layout"]["layers_per_stage"] = list(split_layers(costs, num_stages))
            steps[case["name"]] = measure_case(case, size, model, world)
        (folder / f"rank{world.rank}.json").write_text(json.dumps({"steps": steps, "costs": asdict(costs)}))


EQUAL: dict[Kind, float] = {"forward": 1.0, "loss": 0.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}
"""Durations where forward, input and weight passes of all stages take equally long."""


def order_taken(spans: Sequence[Sequence[StageSpan]]) -> list[list[Action]]:
    """Return the actions of each rank; a stage's spans of one kind come in the order of microbatches."""
    return [_order_of(rank) for rank in spans]


def _order_of(spans: Sequence[StageSpan]) -> list[Action]:
    seen: Counter[tuple[str, int]] = Counter()
    actions: list[Action] = []
    for span in spans:
        counted = "backward" if span.kind == "backward_input" else span.kind, span.stage
        actions.append((cast(Kind, span.kind), span.stage, seen[counted]))
        seen[counted] += 1
    return actions


def measured_durations(spans: Sequence[Sequence[StageSpan]]) -> list[list[float]]:
    return [[span.busy_s for span in rank] for rank in spans]


def equal_durations(spans: Sequence[Sequence[StageSpan]]) -> list[list[float]]:
    return [[EQUAL[cast(Kind, span.kind)] for span in rank] for rank in spans]


def busy_share(spans: Sequence[Sequence[StageSpan]], durations: Sequence[Sequence[float]]) -> float:
    """Share of the step in which ranks compute, the mean of the ranks; sending costs nothing."""
    busy = sum(map(sum, durations)) / len(durations)
    return busy / makespan(order_taken(spans), durations)


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
"""Suffixes of the names of samples."""


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
    """Return the steps of each case, each with the record of every rank."""
    with tempfile.TemporaryDirectory(dir=setting.folder) as scratch:
        folder = Path(scratch)
        (folder / "probe.json").write_text(json.dumps({"size": asdict(size), "cases": cases}))
        run_ranks("modelwright_claims.pipeline_utilisation", [scratch], num_ranks=num_ranks)
        records = [json.loads((folder / f"rank{rank}.json").read_text())["steps"] for rank in range(num_ranks)]
    return {name: list(map(list, zip(*(record[name] for record in records), strict=True))) for name in records[0]}


def step_shares(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """A single step: busy share measured, allowed by the order and the measured stage times, and with equal stages."""
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
    judgment = Judgment()
    ranks = max(map(int, str(conditions["ranks"]).split(", ")))
    prefix = f"1F1B, {ranks} ranks, "
    most = max(map(int, names_between(samples, prefix, " microbatches")))
    one, many = (case_name("1F1B", ranks, number) for number in (1, most))
    busy = {name: estimate([100 * share for share in samples[name]]) for name in (one, many)}
    judgment.ask("busy share, 1F1B, 1 microbatch", busy[one], "%")
    say = (
        f"1F1B over {ranks} ranks is busy {busy[one].mean:.0f}% of a step with one microbatch and {{0.mean:.0f}}% with "
    )
    name, limit = f"busy share, 1F1B, {most} microbatches", 100 * TARGET_SHARE
    judgment.ask(name, busy[many], "%", ">=", limit, say=f"{say}{most}")
    with judgment.part():
        step = ratios(*(samples[f"{name}{SUFFIXES['step_s']}"] for name in (many, one)))
        name, say = f"time of a step, 1F1B, {most} microbatches over one", "whose step takes {0.mean:.2f}x the time"
        judgment.ask(name, step, "x", "<", 1.0, say=say)
    cases = [name for name in samples if name.endswith(" microbatches")]
    with judgment.part():
        gaps = {
            name: differences(
                [100 * share for share in samples[name + SUFFIXES["allowed"]]], [100 * share for share in samples[name]]
            )
            for name in cases
        }
        worst = max(gaps, key=lambda name: gaps[name].upper)
        say = f"no case is more than {{0.mean:.0f}} points below what its stage times allow ({worst})"
        name, what = "largest gap to what the schedule allows", f"gap of {worst}"
        judgment.ask(name, gaps[worst], "points", "<=", 100 * MAX_GAP, what=what, say=say)
    for name in cases:
        judgment.show(samples, {f"{name}: measured": name}, "%", 100)
        shown = (
            ("allowed", "allowed by the measured stage times"),
            ("equal", "theory, equal stages"),
            ("step_s", "step"),
        )
        for key, label in shown:
            unit, factor = ("s", 1) if key == "step_s" else ("%", 100)
            place = name + SUFFIXES[key]
            judgment.note(
                f"{name}: {label}", lambda place=place, by=factor: by * statistics.median(samples[place]), unit
            )
    return judgment.verdict()


CLAIM = declared(__name__)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
