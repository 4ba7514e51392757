"""The same training on Modelwright, nanoGPT, Hugging Face `Trainer` and Lightning, side by side: `make bench`.

Same model and initial weights, same packed rows in the same order, same optimizer settings, same threads. Each run
is a process of its own; the trainers take turns (A B C A B C ...), so that a busy minute of the machine falls on all of
them; figures are medians. That the work is equal shows in the losses: before the first update they agree to rounding
(so the attention masks are the same), and after the last nearly so. nanoGPT alone takes as many tokens in random crops,
whose attention is plainly causal (`trainers/nanogpt.py`), so that its last loss is another; it is compiled. Trainers
whose packages are not installed are left out, and the record says so.

    python benchmarks/peers.py [--compute fp32 bf16] [--steps N] [--repeats N] [--threads N] [--rows N]
                               [--only NAME ...] [--model '{"num_layers": 12, "model_dim": 768, ...}'] [--seq-len N]
"""

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.resources import ResourceUse, num_usable_cores, peak_resident_bytes
from modelwright.data.rows.loader import PackedRows
from modelwright.data.rows.pack import PackConfig, pack
from modelwright.model.decoder import Decoder
from modelwright.model.hf import load_model, save_model
from modelwright.objectives.next_token import NextToken
from modelwright.ops.matmul import is_emulated
from modelwright.parallel.mesh import ParallelConfig, build_mesh, single
from modelwright.pipeline.stages.pack import PACK
from modelwright.recipes.load import RECIPES, recipe
from modelwright.train.objective import WholeModel, evaluate_heldout
from modelwright_claims.results import circumstances, machine_slug
from modelwright_claims.workbench import read_text
from trainers.own import loader, write_batches
from trainers.task import Task

TRAINERS = {
    "Modelwright": "own",
    "nanoGPT": "nanogpt",
    "Hugging Face Trainer": "hf_trainer",
    "Hugging Face Trainer, compiled": "hf_trainer_compiled",
    "Lightning": "lightning_trainer",
}
PACKAGES = {
    "Hugging Face Trainer": ("transformers", "accelerate"),
    "Hugging Face Trainer, compiled": ("transformers", "accelerate"),
    "Lightning": ("lightning", "transformers"),
}
"""What a trainer needs besides torch and this project."""
RESULTS = Path(__file__).parent / "results"
Compute = Literal["fp32", "bf16"]


def main() -> None:
    options = parse()
    if options.worker:
        work(options.worker, Task.load(options.task), options.out)
        return
    for compute in options.compute:
        if compute == "bf16" and is_emulated(torch.bfloat16, torch.device(options.device)):
            print("bf16 is left out: this processor multiplies it as FP32")
        else:
            compare(compute, options)


def compare(compute: Compute, options: argparse.Namespace) -> None:
    around, started = circumstances(), time.perf_counter()
    lacking = {
        name: [package for package in PACKAGES.get(name, ()) if importlib.util.find_spec(package) is None]
        for name in options.only or TRAINERS
    }
    with tempfile.TemporaryDirectory(prefix="modelwright-bench-") as folder:
        task = prepare(Path(folder), compute, options)
        runs = measure(task, [name for name, packages in lacking.items() if not packages], options.repeats)
        model = json.loads((task.folder / "model" / "config.json").read_text())
    summary = {name: summarize(of) for name, of in runs.items()}
    print_table(summary, task)
    record = {
        "benchmark": "peers",
        "task": {key: value for key, value in vars(task).items() if key != "folder"},
        "model": model,
        "not_installed": {name: packages for name, packages in lacking.items() if packages},
        "summary": summary,
        "runs": runs,
        **around,
        "threads": task.threads,
        "wall_s": time.perf_counter() - started,
    }
    save(record, options.results, f"peers-{task.compute}-{machine_slug(around['machine'])}.json")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The same training on three trainers, side by side.")
    parser.add_argument("--compute", nargs="+", choices=get_args(Compute), default=["fp32"])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=4, help="untimed steps at the start, part of --steps")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--recipe", choices=list(RECIPES), default="quickstart", help="whose model and row length")
    parser.add_argument("--model", type=json.loads, default={}, help="fields that replace those of its model, as JSON")
    parser.add_argument("--seq-len", type=int, default=0, help="tokens of a row instead of the recipe's")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=list(TRAINERS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not 0 < options.warmup < options.steps:
        parser.error(f"--warmup: {options.warmup} must be above 0 and below --steps ({options.steps})")
    return options


def prepare(folder: Path, compute: Compute, options: argparse.Namespace) -> Task:
    """Tokenize, pack, initialize, and write down the very batches that our loader gives."""
    base = recipe(options.recipe)
    seq_len = options.seq_len or base.section(PACK).seq_len
    text = read_text(fraction=0.4, vocab_size=base.tokenizer.vocab_size, heldout_bytes=150_000)["prose"]
    for split, sequences in (("shards", text.train), ("heldout", text.test)):
        config = PackConfig(seq_len=seq_len)
        pack(((ids, None) for ids in sequences), folder / split, config, vocab_size=text.vocab_size, eos_id=text.eos_id)
    model = Decoder(replace(base.model, **options.model, vocab_size=text.vocab_size))
    model.init_weights(seed=0)
    save_model(model, folder / "model", eos_id=text.eos_id)
    task = Task(
        folder=folder,
        compute=compute,
        num_steps=options.steps,
        warmup_steps=options.warmup,
        batch_rows=options.rows,
        seq_len=seq_len,
        threads=options.threads,
        device=options.device,
    )
    task.save()
    write_batches(task)
    return task


def measure(task: Task, names: Sequence[str], repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Run the trainers in turn, each in a process of its own."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names:
            out = task.folder / f"{TRAINERS[name]}-{repeat}"
            out.mkdir()
            command = [sys.executable, __file__, "--worker", name, "--task", str(task.folder), "--out", str(out)]
            threads = {key: str(task.threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
            done = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
            runs[name].append(json.loads((out / "measured.json").read_text()))
            print(f"{repeat + 1}/{repeats} {name}: {runs[name][-1]['tokens_per_s']:,.0f} tokens/s", flush=True)
    return runs


def work(name: str, task: Task, out: Path) -> None:
    """One run, in this process."""
    torch.set_num_threads(task.threads)
    trainer = importlib.import_module(f"trainers.{TRAINERS[name]}")
    with ResourceUse() as use:
        before = peak_resident_bytes()
        trained = trainer.run(task, out)
    device_bytes = torch.cuda.max_memory_allocated() if task.device == "cuda" else 0
    model = load_model(trained.weights).to(task.device)
    rows = PackedRows(task.folder / "heldout")
    alone = build_mesh(single(task.device), ParallelConfig())
    runner = WholeModel(model, alone.context, scatters_each=False)
    heldout = evaluate_heldout(runner, NextToken(loader(task)), list(rows.batches(8))[:16], alone, alive=lambda: None)
    measured = {
        "tokens_per_s": trained.clock.tokens_per_s,
        "tokens_per_cpu_s": trained.clock.tokens_per_cpu_s,
        "peak_bytes": device_bytes or use.peak_bytes,
        "peak_bytes_above_start": device_bytes or use.peak_bytes - before,
        "first_loss": trained.first_loss,
        "heldout_loss": heldout.loss,
        "step_ends_s": [end - trained.clock.ends[0] for end in trained.clock.ends],
    }
    (out / "measured.json").write_text(json.dumps(measured))


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over the repeats, and the spread of the speed as (max - min) / median."""
    keys = ("tokens_per_s", "tokens_per_cpu_s", "peak_bytes", "peak_bytes_above_start", "first_loss", "heldout_loss")
    summary = {key: statistics.median(run[key] for run in runs) for key in keys}
    speeds = [run["tokens_per_s"] for run in runs]
    return summary | {"spread": (max(speeds) - min(speeds)) / summary["tokens_per_s"]}


def print_table(summary: Mapping[str, Mapping[str, float]], task: Task) -> None:
    own = summary.get("Modelwright", {})
    print(f"\n{task.compute}, {task.threads} threads, batches of {task.batch_tokens} tokens, {task.device}")
    print(f"{'trainer':31}{'tokens/s':>10}{'spread':>8}{'ours is':>9}{'per CPU s':>11}{'ours is':>9}", end="")
    print(f"{'peak MiB':>10}{'first loss':>12}{'held-out':>10}")
    for name, of in summary.items():
        wall, cpu = (own.get(key, float("nan")) / of[key] for key in ("tokens_per_s", "tokens_per_cpu_s"))
        print(
            f"{name:31}{of['tokens_per_s']:10,.0f}{of['spread']:8.1%}{wall:8.2f}x{of['tokens_per_cpu_s']:11,.0f}{cpu:8.2f}x"
            f"{of['peak_bytes'] / 2**20:10,.0f}{of['first_loss']:12.5f}{of['heldout_loss']:10.4f}"
        )


def save(record: Mapping[str, Any], folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    write_atomic(folder / name, json.dumps(record, indent=1, default=float) + "\n")
    print(f"written to {folder / name}")


if __name__ == "__main__":
    main()
