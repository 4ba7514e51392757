"""Every layout against one process: the same losses and the same weights. `make parity` writes docs/parallel.md.

A small decoder is trained by THE loop on generated rows of ragged documents, twice for each number format: by one
process, and by as many as the layout needs (gloo on this machine). Compared are the losses of all steps and the
held-out loss (largest relative difference) and the final weights (norm of the difference over the norm of the change
that training made). BF16 runs are compared with a BF16 run of one process.

    python benchmarks/parity.py [--only NAME ...] [--steps 20] [--page docs/parallel.md]
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from modelwright.core.artifacts import StageDir, write_atomic
from modelwright.core.config import parse
from modelwright.core.progress import SilentProgress
from modelwright.core.records import column, read_records
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.mesh import ParallelConfig, join_world, single
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright_claims.launch import serve_store, store_environment
from modelwright_claims.results import circumstances

ROWS, LENGTH, VOCABULARY = 8, 64, 128
MODEL = {
    "vocab_size": VOCABULARY, "num_layers": 4, "model_dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 128,
    "head_dim": 16, "max_seq_len": LENGTH,
}  # fmt: skip
LIMITS = {"fp32": {"loss": 1e-5, "weights": 1e-3}, "bf16": {"loss": 5e-3, "weights": 1e-1}}
"""Largest differences that count as the same: sums in another order, carried through the steps.
BF16 rounds every product to 8 bits, and a product that is cut in two is rounded twice."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout and how it is trained."""

    name: str
    num_processes: int
    layout: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)


TIED = {"tie_embeddings": True}
BEFORE, AFTER = "before.safetensors", "weights.safetensors"
UNIT = {"activation_checkpointing": {"mode": "full", "layers_per_segment": 1}}
TWO = {"gradient_accumulation_steps": 2}
CASES = (
    Case(name="data 2", num_processes=2, layout={"shared_memory": False}, settings=TWO),
    Case(name="data 2, one copy in shared memory", num_processes=2, layout={}, settings=TWO),
    Case(name="tensor 2", num_processes=2, layout={"tensor": 2}, settings=TWO),
    Case(name="tensor 2, no sequence parallelism", num_processes=2, layout={"tensor": 2, "sequence_parallel": False}),
    Case(name="context 2", num_processes=2, layout={"context": 2}, settings=TWO),
    Case(name="context 4", num_processes=4, layout={"context": 4}),
    Case(name="context 2, ring", num_processes=2, layout={"context": 2, "context_attention": "ring"}, settings=TWO),
    Case(name="context 4, ring", num_processes=4, layout={"context": 4, "context_attention": "ring"}),
    Case(name="ZeRO-1, 2", num_processes=2, layout={"zero_stage": 1}, settings=TWO),
    Case(name="ZeRO-2, 2", num_processes=2, layout={"zero_stage": 2}, settings=TWO),
    Case(name="ZeRO-3, 4", num_processes=4, layout={"zero_stage": 3}, settings=TWO),
    Case(name="hybrid 2 x 2", num_processes=4, layout={"zero_stage": 3, "shard_group_size": 2}, settings=TWO),
    Case(name="pipeline 2, GPipe", num_processes=2, layout={"pipeline": 2, "schedule": "gpipe"}, settings=TWO),
    Case(name="pipeline 2, 1F1B", num_processes=2, layout={"pipeline": 2}, settings={"gradient_accumulation_steps": 4}),
    Case(name="pipeline 2, layers to devices", num_processes=2, layout={"pipeline": 2}),
    Case(
        name="pipeline 2, interleaved", num_processes=2, settings={"gradient_accumulation_steps": 4},
        layout={"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2},
    ),
    Case(
        name="pipeline 2, zero bubble", num_processes=2, settings={"gradient_accumulation_steps": 4},
        layout={"pipeline": 2, "schedule": "zero_bubble", "stages_per_rank": 2},
    ),
    Case(name="pipeline 4", num_processes=4, layout={"pipeline": 4}, settings={"gradient_accumulation_steps": 4}),
    Case(name="pipeline 2, tied", num_processes=2, layout={"pipeline": 2}, settings=TWO, model=TIED),
    Case(name="tensor 2, tied", num_processes=2, layout={"tensor": 2}, settings=TWO, model=TIED),
    Case(name="data 2 x tensor 2", num_processes=4, layout={"tensor": 2}, settings=TWO),
    Case(name="ZeRO-3 2 x tensor 2", num_processes=4, layout={"tensor": 2, "zero_stage": 3}, settings=TWO),
    Case(name="ZeRO-3 2 x context 2", num_processes=4, layout={"context": 2, "zero_stage": 3}, settings=TWO),
    Case(name="pipeline 2 x tensor 2", num_processes=4, layout={"pipeline": 2, "tensor": 2}, settings=TWO),
    Case(name="pipeline 2 x data 2 x tensor 2", num_processes=8, layout={"pipeline": 2, "tensor": 2},
         settings={**TWO, **UNIT}),
    Case(name="pipeline 2 x ZeRO-3 2 x tensor 2", num_processes=8,
         layout={"pipeline": 2, "tensor": 2, "zero_stage": 3}, settings={**TWO, **UNIT}),
)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Batch `index` is a function of its number: documents of many lengths, padding, some tokens not predicted."""

    num_batches_per_epoch: int = 100

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        share = ROWS // world_size
        rows = [_row(index, row) for row in range(rank * share, (rank + 1) * share)]
        tokens, labels, positions, segments = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return TokenBatch(input_ids_BT=tokens, labels_BT=labels, positions_BT=positions, segments_BT=segments)


def _row(index: int, row: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(1000 * index + row)
    start, step = torch.randint(1, VOCABULARY, (2,), generator=draw).tolist()
    tokens = (start + step * torch.arange(LENGTH)) % VOCABULARY
    cuts = torch.randint(1, LENGTH, (3,), generator=draw).sort().values
    segments = torch.bucketize(torch.arange(LENGTH), cuts, right=True)
    first = torch.tensor([int((segments == segment).nonzero()[0]) for segment in segments])
    segments = torch.where(torch.arange(LENGTH) < LENGTH - 5 * (row % 3), segments, -1)
    labels = tokens.roll(-1)
    ends = torch.cat([segments[1:] != segments[:-1], torch.tensor([True])])
    labels[ends | (segments < 0) | (torch.rand(LENGTH, generator=draw) < 0.1 * row)] = IGNORED
    return tokens, labels, torch.arange(LENGTH) - first, segments.int()


POLICIES = {"fp32": "fp32", "bf16": "bf16_mixed"}


def settings_of(case: Case, compute: str, num_steps: int) -> TrainConfig:
    plain = {
        "num_steps": num_steps, "batch_tokens": ROWS * LENGTH, "learning_rate": 3e-3,
        "precision": {"policy": POLICIES[compute]},
        "eval_every_steps": 0, "checkpoint_every_minutes": 0.0, "keep_best": False,
    }  # fmt: skip
    return parse(TrainConfig, {**plain, **case.settings}, constants=True)


def train_once(case: Case, compute: str, num_steps: int, folder: Path, *, layout: bool) -> None:
    """One training, in this process's world; the first rank leaves weights.safetensors and metrics.jsonl."""
    torch.set_num_threads(1)
    model = Decoder(parse(ModelConfig, {**MODEL, **case.model}))
    model.init_weights(0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = settings_of(case, compute, num_steps)

    def run(world: Any, parallel: ParallelConfig) -> None:
        train(
            TrainJob(
                model=model,
                objective=NextToken(Rows()),
                config=config,
                num_steps=num_steps,
                stage=StageDir(folder),
                seed=1,
                name=case.name,
                input_digest="parity",
                parallel=parallel,
                heldout=[Rows().batch(900), Rows().batch(901), Rows().batch(902)],
            ),
            world,
            SilentProgress(),
        )
        if world.is_first:
            save_file(model.state_dict(), folder / AFTER)
            save_file(before, folder / BEFORE)

    if not layout:
        run(single(), ParallelConfig())
        return
    with join_world(torch.device("cpu")) as world:
        run(world, parse(ParallelConfig, dict(case.layout)))


def start(case: Case, compute: str, num_steps: int, folder: Path, num_processes: int) -> None:
    """Run `train_once` in processes of its own. Raises `SystemExit` with their output when one fails."""
    store = serve_store()
    command = [sys.executable, __file__, "--worker", case.name, "--compute", compute, "--steps", str(num_steps)]
    command += ["--folder", str(folder)] + ([] if num_processes == 1 else ["--layout"])
    shared = {**os.environ, "OMP_NUM_THREADS": "1", **store_environment(store)}
    processes = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(num_processes)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{case.name}, {compute}: rank failed\n{output[-3000:]}")


def compare(alone: Path, spread: Path) -> dict[str, float]:
    """Largest relative difference of losses and of the held-out loss; of weights, the norms' ratio."""
    differences = {}
    for metric in ("loss", "heldout_loss"):
        a, b = (torch.tensor(column(read_records(p / "metrics.jsonl"), metric))[:, 1] for p in (alone, spread))
        assert len(a) == len(b) > 0
        differences[metric] = float(((a - b).abs() / a).max())
    before, a, b = (load_file(file) for file in (alone / BEFORE, alone / AFTER, spread / AFTER))
    change, difference = (
        sum(float((a[name].double() - other[name].double()).square().sum()) for name in a) for other in (before, b)
    )
    differences["weights"] = math.sqrt(difference / change)
    return differences


def measure(cases: Sequence[Case], num_steps: int) -> list[dict[str, Any]]:
    """All cases in both formats, one after the other."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="modelwright-parity-") as scratch:
        for number, case in enumerate(cases):
            for compute, limits in LIMITS.items():
                folders = [Path(scratch) / f"{number}-{compute}-{kind}" for kind in ("alone", "spread")]
                for folder, count in zip(folders, (1, case.num_processes), strict=True):
                    start(case, compute, num_steps, folder, count)
                result = compare(*folders)
                same = all(result[name] <= limits[name.removeprefix("heldout_")] for name in result)
                row = {"case": case.name, "processes": case.num_processes, "compute": compute, "same": same, **result}
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


HEADER = """# Layouts against one process

Written by `make parity`; do not edit. The same model, batches and settings are trained by one process and by the
layout: {steps} steps, {rows} rows of {length} tokens in ragged documents, 4 layers. *losses*: the largest relative
difference of any step's loss or of the held-out loss; *weights*: the norm of the difference of the final weights over
the norm of the change that training made. Microbatches and activation checkpointing: see `benchmarks/parity.py`.
Limits of losses and weights: FP32 {fp32}, BF16 {bf16}.

| layout | processes | losses, FP32 | weights, FP32 | losses, BF16 | weights, BF16 | same |
| --- | --- | --- | --- | --- | --- | --- |
"""


def page(rows: Sequence[Mapping[str, Any]], num_steps: int) -> str:
    limits = {name: f"{of['loss']:g} and {of['weights']:g}" for name, of in LIMITS.items()}
    lines = [HEADER.format(steps=num_steps, rows=ROWS, length=LENGTH, **limits)]
    for a, b in zip(rows[::2], rows[1::2], strict=True):
        cells = [f"{max(row['loss'], row['heldout_loss']):.1e} | {row['weights']:.1e}" for row in (a, b)]
        same = "yes" if a["same"] and b["same"] else "**no**"
        lines.append(f"| {a['case']} | {a['processes']} | {cells[0]} | {cells[1]} | {same} |\n")
    around = circumstances()
    lines.append(f"\n{around['machine']}; gloo; {around['versions']}; commit {around['commit']}; {around['date']}.\n")
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Every layout against one process.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name contains one of these")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--page", type=Path, default=None, help="the Markdown page to write")
    for hidden in ("--worker", "--compute"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layout", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        case = next(case for case in CASES if case.name == options.worker)
        train_once(case, options.compute, options.steps, options.folder, layout=options.layout)
        return
    requested = [case for case in CASES if not options.only or any(word in case.name for word in options.only)]
    rows = measure(requested, options.steps)
    if options.page:
        write_atomic(options.page, page(rows, options.steps))
    raise SystemExit(0 if all(row["same"] for row in rows) else 1)


if __name__ == "__main__":
    main()
