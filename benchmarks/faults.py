"""Four "hosts" of which one after the other is killed, and a cable that is pulled: does the training go on by itself?

    python benchmarks/faults.py [--kills 10] [--steps 3000] [--out FILE]

Each host is a network namespace with what `modelwright launch` is made of (`parallel.elastic.launch`) and one process;
a fifth one keeps the rendezvous. At random steps all processes of a random host get SIGKILL, once a host's cable is
pulled and put back. Whatever starts a machine's services starts the launcher again when it has ended with an error:
here this program does, some seconds later. Nothing else is done by hand. Compared with a single process that nothing
happened to: every step's loss, the held-out loss (beside the spread over other initial weights), and for every step
which rows were trained on in the history that led to the end.

Needs root and iproute2 (`modelwright_claims/netns.py`).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelwright.core.artifacts import StageDir, write_atomic
from modelwright.core.config import dump, parse
from modelwright.core.progress import SilentProgress
from modelwright.core.records import column, read_records
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.objectives.next_token import NextToken
from modelwright.parallel.elastic import (
    LaunchConfig,
    join_as_fits,
    launch,
    serve_rendezvous,
    torchrun_environment,
)
from modelwright.parallel.mesh import ParallelConfig, World, single
from modelwright.train.build import train
from modelwright.train.config import TrainConfig
from modelwright.train.job import TrainJob
from modelwright_claims import netns
from modelwright_claims.results import circumstances

ROWS, LENGTH, VOCABULARY = 8, 64, 128
MODEL = ModelConfig(
    vocab_size=VOCABULARY, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=2, ffn_dim=128, head_dim=16,
    max_seq_len=LENGTH,
)  # fmt: skip
CHECKPOINT_EVERY = 50
HANG_AFTER_S = 20.0
UNPLUGGED_S = 35.0
START_AGAIN_S = 3.0
PAUSE_S = 0.3
"""Makes a step as long as one of a model worth training: a host that was cut off must find the run still going on."""
PORT = 29400


@dataclass(frozen=True)
class Rows:
    """Batch `index` is a function of its number; notes which rows this process was given, in a file of its own."""

    notes: Path
    attempt: int = 0
    pause_s: float = 0.0
    num_batches_per_epoch: int = 10**6

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        time.sleep(self.pause_s)
        share = ROWS // world_size
        rows = range(rank * share, (rank + 1) * share)
        tokens = torch.stack([_tokens(index, row) for row in rows])
        with open(self.notes, "a", encoding="utf-8") as file:
            seen = [[row, _digest(own)] for row, own in zip(rows, tokens, strict=True)]
            file.write(json.dumps([self.attempt, index, seen]) + "\n")
        labels = tokens.roll(-1, 1)
        labels[:, -1] = IGNORED
        positions = torch.arange(LENGTH).expand_as(tokens)
        segments = torch.zeros_like(tokens, dtype=torch.int32)
        return TokenBatch(input_ids_BT=tokens, labels_BT=labels, positions_BT=positions, segments_BT=segments)


def _tokens(index: int, row: int) -> torch.Tensor:
    """A walk through the vocabulary whose next step depends on the token, with a fifth of it left to chance."""
    draw = torch.Generator().manual_seed(100_003 * index + row)
    noise = torch.randint(VOCABULARY, (LENGTH,), generator=draw).tolist()
    chance = (torch.rand(LENGTH, generator=draw) < 0.2).tolist()
    walk = [noise[0]]
    for place in range(1, LENGTH):
        walk.append(noise[place] if chance[place] else (5 * walk[-1] + 17) % VOCABULARY)
    return torch.tensor(walk)


def _digest(tokens: torch.Tensor) -> int:
    return zlib.crc32(tokens.numpy().data)


def run(folder: Path, num_steps: int, world: World, *, layout: ParallelConfig, seed: int = 0) -> float:
    """Train, or go on, to the end; the held-out loss."""
    model = Decoder(MODEL)
    model.init_weights(seed)
    attempt = torch.tensor([time.time_ns()])
    world.broadcast(attempt)
    notes = folder / f"rows-{int(attempt)}-{world.rank}.jsonl"
    settings = {
        "num_steps": num_steps, "batch_tokens": ROWS * LENGTH, "learning_rate": 3e-3,
        "precision": {"policy": "fp32"}, "eval_every_steps": 0, "checkpoint_every_steps": CHECKPOINT_EVERY,
        "checkpoint_every_minutes": 0.0, "keep_best": False, "fault_tolerance": {"watchdog_timeout_s": HANG_AFTER_S},
    }  # fmt: skip
    heldout = [Rows(folder / "heldout.jsonl").batch(10**6 + number) for number in range(4)]
    rows = Rows(notes, int(attempt), pause_s=0.0 if world.size == 1 else PAUSE_S)
    result = train(
        TrainJob(
            model=model,
            objective=NextToken(rows),
            config=parse(TrainConfig, settings, constants=True),
            num_steps=num_steps,
            stage=StageDir(folder),
            seed=1,
            name="faults",
            input_digest="d",
            peak_flops=0.0,
            heldout=heldout,
            parallel=layout,
        ),
        world,
        SilentProgress(),
    )
    return result.heldout_loss


def work(folder: Path, num_steps: int) -> None:
    """What the launcher starts."""
    torch.set_num_threads(1)
    with join_as_fits(ParallelConfig(shared_memory=False), num_rows=ROWS, device=torch.device("cpu")) as joined:
        if joined is None:  # three hosts cannot share eight rows: this one waits, however long
            return
        world, layout = joined
        loss = run(folder, num_steps, world, layout=layout)
        if world.is_first:
            write_atomic(folder / "result.json", json.dumps({"heldout_loss": loss}))


class Hosts:
    """The hosts and what starts their services."""

    def __init__(self, net: netns.Network, folder: Path, num_steps: int) -> None:
        self.net = net
        self.folder = folder
        self.num_steps = num_steps
        self.names: tuple[str, ...] = ("h0", "h1", "h2", "h3")
        self.running: dict[str, subprocess.Popen] = {}
        self.starts_at: dict[str, float] = dict.fromkeys(self.names, 0.0)
        self.done: set[str] = set()

    def tend(self) -> None:
        """Start the launcher where it is due, as a machine's init would; not when the run is finished."""
        for name in self.names:
            process = self.running.get(name)
            if process is not None and process.poll() is not None:
                del self.running[name]
                self.starts_at[name] = time.monotonic() + START_AGAIN_S
                if process.returncode == 0 or (self.folder / "result.json").exists():
                    self.done.add(name)
            if name not in self.running and name not in self.done and time.monotonic() >= self.starts_at[name]:
                self.start(name)

    def start(self, name: str) -> None:
        config = LaunchConfig(
            min_hosts=1, max_hosts=len(self.names), rdzv_endpoint=f"{self.net.address('control')}:{PORT}",
            external_store=True, local_addr=self.net.address(name), last_call_timeout_s=6,
            keep_alive_timeout_s=6, max_restarts=1000,
        )  # fmt: skip
        words = ["work", str(self.folder), str(self.num_steps)]
        command = [sys.executable, __file__, "host", json.dumps(dump(config)), *words]
        environment = torchrun_environment(self.net.torch_environment(name, "control", PORT), threads=1)
        known = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(known)  # the launcher starts this file as a module
        with open(self.folder / f"{name}.log", "a") as log:
            self.running[name] = self.net.popen(name, command, env=environment, stdout=log, stderr=log)

    def progress(self) -> tuple[int, int]:
        """The last finished step and the number of ranks that did it; 0 when the run begins."""
        try:
            alive = json.loads((self.folder / "recoveries.jsonl.alive").read_text())
            return alive["step"], alive["num_ranks"]
        except (OSError, ValueError):
            return 0, 0


def stay(config: LaunchConfig, words: list[str]) -> int:
    """One host's launcher; 0 when the run is over."""
    with tempfile.TemporaryDirectory() as logs:
        ending = launch(config, "faults", words, logs=Path(logs), before_restart=lambda: None)
    return int(ending.failed or ending.closed or bool(ending.asked))


def disturb(folder: Path, num_steps: int, num_kills: int, seed: int, limit_s: float) -> list[dict[str, Any]]:
    """Run to the end under faults; returns them."""
    draw = random.Random(seed)
    moments = sorted(draw.sample(range(20, num_steps - 20), num_kills + 1))
    early = moments[1 : max(2, len(moments) // 2)]  # so that the host is back before the last faults
    cut_at = draw.choice(early or moments)
    faults: list[dict[str, Any]] = []
    topology = netns.star(5)
    names = ("h0", "h1", "h2", "h3", "control")
    rename = dict(zip(topology.hosts, names, strict=True))
    links = tuple(
        netns.Link(ends=tuple(rename.get(end, end) for end in link.ends), mbit=1000.0)  # pyright: ignore
        for link in topology.links
    )
    started = time.monotonic()
    with netns.Network(netns.Topology(hosts=names, links=links)) as net:
        hosts = Hosts(net, folder, num_steps)
        store = net.popen("control", [sys.executable, __file__, "serve"])
        plugged_in_at = 0.0
        cut = ""
        time.sleep(3)
        while len(hosts.done) < len(hosts.names):
            hosts.tend()
            if time.monotonic() - started > limit_s:
                store.kill()
                raise SystemExit(f"not finished after {limit_s:.0f} s, at step {hosts.progress()[0]}; logs in {folder}")
            if cut and time.monotonic() > plugged_in_at:
                net.restore(cut, "switch")
                cut = ""
            step, num_ranks = hosts.progress()
            if moments and step >= moments[0] and num_ranks == len(hosts.names):  # the next fault hits a whole run
                due = moments.pop(0)
                victim = draw.choice(hosts.names)
                fault = {"step": step, "host": victim, "kind": "cut" if due == cut_at else "kill"}
                if fault["kind"] == "cut":
                    net.cut(victim, "switch")
                    cut, plugged_in_at = victim, time.monotonic() + UNPLUGGED_S
                else:
                    net.kill(victim)
                print(json.dumps(fault), flush=True)
                faults.append(fault)
            time.sleep(0.05)
        store.kill()
        store.wait()
    return faults


def trained_rows(folder: Path) -> dict[int, list[list[int]]]:
    """The rows of each step in the history that led to the end: of the last start that did it."""
    last: dict[int, dict[int, list[list[int]]]] = {}
    for path in folder.glob("rows-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):
                attempt, step, seen = json.loads(line)
                last.setdefault(step, {}).setdefault(attempt, []).extend(seen)
    return {step: sorted(by_attempt[max(by_attempt)]) for step, by_attempt in last.items()}


def compare(folder: Path, num_steps: int, faults: list[dict[str, Any]]) -> dict[str, Any]:
    """The disturbed run beside undisturbed ones of a single process."""
    heldout = []
    for seed in range(3):
        alone = folder / f"alone-{seed}"
        alone.mkdir()
        heldout.append(run(alone, num_steps, single(), layout=ParallelConfig(), seed=seed))
    losses = {
        name: column(read_records(path / "metrics.jsonl"), "loss")
        for name, path in (("disturbed", folder), ("alone", folder / "alone-0"))
    }
    plan = {step: [[row, _digest(_tokens(step, row))] for row in range(ROWS)] for step in range(num_steps)}
    seen = trained_rows(folder)
    recoveries = read_records(folder / "recoveries.jsonl")
    final = json.loads((folder / "result.json").read_text())["heldout_loss"]
    gaps = [abs(a - b) for (_, a), (_, b) in zip(losses["disturbed"], losses["alone"], strict=True)]
    return {
        "faults": faults,
        "num_steps": num_steps,
        "checkpoint_every_steps": CHECKPOINT_EVERY,
        "recoveries": recoveries,
        "mean_time_to_recover_s": statistics.mean(entry["down_s"] for entry in recoveries),
        "most_steps_lost": max(entry["steps_lost"] for entry in recoveries),
        "rows_as_planned": all(seen.get(step) == rows for step, rows in plan.items()),
        "largest_loss_gap": max(gaps),
        "heldout_loss": final,
        "heldout_loss_alone": heldout[0],
        "heldout_loss_other_seeds": heldout[1:],
        "heldout_spread_of_seeds": statistics.stdev(heldout),
    }


def verdict(found: Mapping[str, Any], num_faults: int) -> list[str]:
    """What is not as it must be."""
    checks = {
        "not all faults could be brought about": len(found["faults"]) == num_faults,
        "some fault was not recovered from": len(found["recoveries"]) >= num_faults,
        "some rows were not trained on as planned": found["rows_as_planned"],
        "more than one checkpoint interval was lost": found["most_steps_lost"] <= CHECKPOINT_EVERY,
        "the held-out loss left the noise of seeds": abs(found["heldout_loss"] - found["heldout_loss_alone"])
        <= found["heldout_spread_of_seeds"],
    }
    return [text for text, holds in checks.items() if not holds]


def main() -> None:
    if sys.argv[1:2] == ["host"]:
        sys.exit(stay(parse(LaunchConfig, json.loads(sys.argv[2])), sys.argv[3:]))
    if sys.argv[1:2] == ["work"]:
        work(Path(sys.argv[2]), int(sys.argv[3]))
        return
    if sys.argv[1:2] == ["serve"]:
        serve_rendezvous(PORT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which it has failed")
    parser.add_argument("--folder", type=Path, help="keep the run here")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if why := netns.missing():
        raise SystemExit(why)
    torch.set_num_threads(1)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    faults = disturb(folder, options.steps, options.kills, options.seed, options.limit)
    result = {**compare(folder, options.steps, faults), "circumstances": circumstances()}
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        write_atomic(options.out, text + "\n")
    if problems := verdict(result, options.kills + 1):
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main()
