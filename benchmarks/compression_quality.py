"""What compressed gradients cost: held-out loss and bytes of each transport, at equal tokens.

    python benchmarks/compression_quality.py --folder runs/quality            all methods, three seeds
    python benchmarks/compression_quality.py --folder runs/quality --methods exact,three-level-local --seeds 0

Starts `--ranks` real processes of one thread each, joined by gloo on this machine; they make every run, one after the
other, through THE loop with the transports that training uses: nothing is simulated. Runs of a seed share initial
weights and data order. Bytes are those that the transports count (see their docstrings for the formulas), warm-up
included; small messages of the loop itself (losses, normalisers) are not among them. Finished runs are kept in
`<folder>/runs.jsonl` and not made again. Times are not measured here; `taskset -c 0` keeps the ranks on one core.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modelwright.claims.claim import Setting
from modelwright.claims.workbench import Size, Text, packed_rows, prepare_text
from modelwright.core.config import dump, parse
from modelwright.core.progress import SilentProgress
from modelwright.core.rundir import StageDir
from modelwright.core.seeds import derive_seed
from modelwright.data.loader import PackedLoader
from modelwright.model.decoder import Decoder
from modelwright.objectives.pretrain import Pretrain
from modelwright.parallel.mesh import World, join_world
from modelwright.train.config import TrainConfig
from modelwright.train.loop import train
from modelwright.train.objective import Controller

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
"""Name -> what it changes in the `TrainConfig`, as plain data. Clips were chosen on seed 0: report other seeds."""


def prepare(setting: Setting, size: Size) -> None:
    """Text and rows, before several processes want them at once."""
    text = prepare_text(setting)
    for split in ("train", "heldout"):
        packed_rows(setting, text, seq_len=size.seq_len, mode="best_fit", split=split)


def one_run(
    setting: Setting,
    text: Text,
    size: Size,
    method: Mapping[str, Any],
    *,
    seed: int,
    world: World,
    folder: Path,
    controllers: Mapping[str, Controller] | None = None,
) -> dict[str, float]:
    """Train once, in `folder`; the held-out loss at the end and the bytes that this rank's transport sent."""
    model = Decoder(size.model_config(text.vocab_size))
    model.init_weights(derive_seed(seed, "weights"))
    rows = packed_rows(setting, text, seq_len=size.seq_len, mode="best_fit", split="train")
    heldout = packed_rows(setting, text, seq_len=size.seq_len, mode="best_fit", split="heldout")
    loader = PackedLoader(rows, batch_rows=size.batch_rows, seed=derive_seed(seed, "order"))
    config = parse(TrainConfig, dump(size.train_config(learning_rate=size.learning_rate)) | dict(method))
    if world.is_first:
        shutil.rmtree(folder, ignore_errors=True)
    world.barrier()
    result = train(
        model,
        Pretrain(loader),
        config,
        num_steps=size.num_steps,
        world=world,
        stage=StageDir(folder),
        seed=seed,
        name=f"seed {seed}",
        input_digest="quality",
        progress=setting.progress,
        heldout=list(heldout.batches(32)),
        controllers=controllers,
    )
    return {"heldout_loss": result.heldout_loss, "bytes_sent": result.bytes_sent}


def work(folder: Path) -> None:
    """One rank: make the runs of `<folder>/plan.json` that are not in `<folder>/runs.jsonl`."""
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    setting = Setting(folder=folder / "text", quick=False, progress=SilentProgress())
    text = prepare_text(setting)
    size = Size(**plan["size"])
    with join_world(torch.device("cpu")) as world:
        done = {key(run) for run in read_runs(folder)}
        for run in plan["runs"]:
            if key(run) in done:
                continue
            at = replace(size, learning_rate=run["learning_rate"])
            found = one_run(setting, text, at, run["method"], seed=run["seed"], world=world, folder=folder / "stage")
            world.barrier()
            if world.is_first:
                with (folder / "runs.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**run, **found}) + "\n")
                print(run["name"], run["seed"], run["learning_rate"], found, flush=True)


def key(run: Mapping[str, Any]) -> str:
    return json.dumps([run[part] for part in ("name", "seed", "learning_rate", "ranks", "method", "size")])


def read_runs(folder: Path) -> list[dict[str, Any]]:
    path = folder / "runs.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def start_ranks(folder: Path, num_ranks: int) -> None:
    """Run `work` in processes of one thread each; raises `SystemExit` when one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
    command = [sys.executable, __file__, "--folder", str(folder), "--work"]
    processes = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}) for rank in range(num_ranks)
    ]
    if any(process.wait() for process in processes):
        raise SystemExit("a rank failed; see above")


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: mean held-out loss, its gap to exact (paired by seed) in percent, and bytes removed."""
    exact = {run["seed"]: run for run in runs if run["name"] == "exact"}
    lines = ["| transport | held-out loss | gap, mean (each seed) | bytes removed |", "| --- | --- | --- | --- |"]
    for name in dict.fromkeys(run["name"] for run in runs):
        mine = [run for run in runs if run["name"] == name and run["seed"] in exact]
        gaps = [100 * (run["heldout_loss"] / exact[run["seed"]]["heldout_loss"] - 1) for run in mine]
        removed = 100 * (1 - statistics.fmean(run["bytes_sent"] / exact[run["seed"]]["bytes_sent"] for run in mine))
        loss = statistics.fmean(run["heldout_loss"] for run in mine)
        each = ", ".join(f"{gap:+.2f}" for gap in gaps)
        lines.append(f"| {name} | {loss:.4f} | {statistics.fmean(gaps):+.2f}% ({each}) | {removed:.2f}% |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--rate", type=float, default=8e-3)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.work:
        work(given.folder)
        return
    size = Size(
        model_dim=given.dim, num_layers=2, seq_len=given.seq, batch_rows=given.rows, num_steps=given.steps
    )  # fmt: skip
    shared = {"learning_rate": given.rate, "ranks": given.ranks, "size": dump(size)}
    runs = [
        {"name": name, "seed": seed, "method": METHODS[name], **shared}
        for seed in map(int, given.seeds.split(","))
        for name in given.methods.split(",")
    ]
    (given.folder / "text").mkdir(parents=True, exist_ok=True)
    prepare(Setting(folder=given.folder / "text", quick=False, progress=SilentProgress()), size)
    (given.folder / "plan.json").write_text(json.dumps({"size": dump(size), "runs": runs}), encoding="utf-8")
    start_ranks(given.folder, given.ranks)
    keys = {key(run) for run in runs}
    print(table([run for run in read_runs(given.folder) if key(run) in keys]))


if __name__ == "__main__":
    main()
