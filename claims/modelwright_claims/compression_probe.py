"""Training runs with compressed gradients, by real processes joined by gloo: held-out loss, and bytes sent.

Every run goes through THE loop with the transports that training uses. Runs of a seed share initial weights and data
order. Bytes are those of the metric `bytes_sent` (`parallel/traffic.py`): all that the first process sent over TCP,
headers, the loop's small messages, warm-up and the last, exact meeting of local steps included. Knows no claim.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model

from modelwright.core.config import dump, parse
from modelwright.core.errors import ModelwrightError
from modelwright.core.progress import SilentProgress
from modelwright.core.rundir import StageDir
from modelwright.core.seeds import derive_seed
from modelwright.data.loader import PackedLoader
from modelwright.model.decoder import Decoder
from modelwright.objectives.pretrain import Pretrain
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import World, join_world
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.technique import Technique
from modelwright_claims.claim import Setting
from modelwright_claims.workbench import Size, Text, packed_rows, prepare_text

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
    begin: Path | None = None,
    keep: Path | None = None,
    techniques: Sequence[Technique] = (),
) -> dict[str, float]:
    """Train once, in `folder`; the held-out loss at the end and the bytes that this rank sent.

    begin: a file of weights to start from; keep: where to put the last ones.
    """
    model = Decoder(size.model_config(text.vocab_size))
    model.init_weights(derive_seed(seed, "weights"))
    if begin is not None:
        load_model(model, begin)
    rows = packed_rows(setting, text, seq_len=size.seq_len, mode="best_fit", split="train")
    heldout = packed_rows(setting, text, seq_len=size.seq_len, mode="best_fit", split="heldout")
    order = "order" if begin is None else "order of more training"
    loader = PackedLoader(rows, batch_rows=size.batch_rows, seed=derive_seed(seed, order))
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
        parallel=ParallelConfig(share_memory=False),  # the ranks stand for hosts
        heldout=list(heldout.batches(32)),
        techniques=techniques,
    )
    if keep is not None and world.is_first:
        save_model(model, str(keep))
    if result.bytes_sent is None:
        raise ModelwrightError("compression_probe: bytes sent over TCP can be counted on Linux 4.19 or newer only")
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
            found = one_run(
                setting,
                text,
                at,
                run["method"],
                seed=run["seed"],
                world=world,
                folder=folder / "stage",
                begin=folder / run["begin"] if run["begin"] else None,
                keep=folder / run["keep"] if run["keep"] else None,
            )
            world.barrier()
            if world.is_first:
                with (folder / "runs.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**run, **found}) + "\n")
                print(run["name"], run["seed"], run["learning_rate"], found, flush=True)


def key(run: Mapping[str, Any]) -> str:
    return json.dumps([run[part] for part in ("name", "seed", "learning_rate", "ranks", "method", "size", "begin")])


def read_runs(folder: Path) -> list[dict[str, Any]]:
    path = folder / "runs.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def make_runs(folder: Path, runs: Sequence[Mapping[str, Any]], size: Size, num_ranks: int) -> list[dict[str, Any]]:
    """The runs with what came of them; those that `<folder>/runs.jsonl` has are not made again."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    prepare(Setting(folder=folder / "text", quick=False, progress=SilentProgress()), size)
    (folder / "plan.json").write_text(json.dumps({"size": dump(size), "runs": list(runs)}), encoding="utf-8")
    start_ranks(folder, num_ranks)
    keys = {key(run) for run in runs}
    return [run for run in read_runs(folder) if key(run) in keys]


def plan(names: Sequence[str], seeds: Sequence[int], size: Size, num_ranks: int) -> list[dict[str, Any]]:
    """One run of each method for each seed, from weights drawn by the seed; those of exact sums are kept."""
    shared = {"learning_rate": size.learning_rate, "ranks": num_ranks, "size": dump(size), "begin": ""}
    return [
        {"name": name, "seed": seed, "method": METHODS[name], "keep": _kept(seed) if name == "exact" else "", **shared}
        for seed in seeds
        for name in names
    ]


def plan_continued(
    names: Sequence[str], seeds: Sequence[int], size: Size, num_ranks: int, *, learning_rate: float
) -> list[dict[str, Any]]:
    """One run of each method for each seed, from the weights with which the exact run of `plan` has ended."""
    later = {"learning_rate": learning_rate, "keep": ""}
    return [{**run, **later, "begin": _kept(run["seed"])} for run in plan(names, seeds, size, num_ranks)]


def _kept(seed: int) -> str:
    return f"exact-{seed}.safetensors"


def start_ranks(folder: Path, num_ranks: int) -> None:
    """Run `work` in processes of one thread each; raises `ModelwrightError` when one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
    command = [sys.executable, "-m", "modelwright_claims.compression_probe", str(folder)]
    processes = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}) for rank in range(num_ranks)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise ModelwrightError("compression_probe: a rank failed; its output above tells why")


def main() -> None:
    torch.set_num_threads(1)
    work(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
