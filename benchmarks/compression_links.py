"""What compressed gradients save on real links: bytes on the interface, time spent exchanging, training throughput.

    python benchmarks/compression_links.py [--methods exact,bf16,...] [--hosts 2] [--steps 60] [--mbit 100]

Hosts are network namespaces joined by a switch whose links carry `--mbit`, or are not limited (`netns.py`, needs
root); each runs one process of one thread, which trains a small decoder through THE loop with the transports of
`compression_quality.py`. Counted from step 21 to the last but one (the last meeting of local steps is exact): the
sending interface's own byte counter, which sees every header and the loop's small messages too; `exchange_s` of the
steps (transport and meetings, with compression and waiting); tokens per second. The links and the unlimited ones take
turns within each method; each figure is the median over repeats. Held-out losses are those of
`compression_quality.py`, measured at equal tokens.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modelwright.claims.claim import Setting
from modelwright.claims.compression_probe import METHODS, one_run, prepare
from modelwright.claims.results import circumstances, machine_slug
from modelwright.claims.workbench import Size, prepare_text
from modelwright.core.artifacts import write_atomic
from modelwright.core.config import dump, parse
from modelwright.core.progress import SilentProgress
from modelwright.parallel.mesh import join_world
from modelwright.train.objective import StepInfo
from netns import Network, free_port, missing, star

RESULTS = Path(__file__).parent / "results"
WARM_UP = 20
UNLIMITED = 0.0
TARGETS = {"bytes_removed_%": 98.0, "exchange_shorter": 20.0, "throughput_of_unlimited": 0.9}


@dataclass
class Meter:
    """Controller that adds up steps after the first few."""

    last: int
    every: int = 1
    exchange_s: float = 0.0
    step_s: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def observe(self, info: StepInfo) -> None:
        if info.step > self.last:
            return
        self.bytes_after = sent_bytes()
        if info.step <= WARM_UP:
            self.bytes_before = self.bytes_after
            return
        self.exchange_s += info.exchange_s
        self.step_s += info.step_time_s
        self.num_tokens += info.num_tokens
        self.num_steps += 1

    def figures(self) -> dict[str, float]:
        return {
            "bytes_per_step": (self.bytes_after - self.bytes_before) / self.num_steps,
            "exchange_ms": 1e3 * self.exchange_s / self.num_steps,
            "step_ms": 1e3 * self.step_s / self.num_steps,
            "tokens_per_s": self.num_tokens / self.step_s,
        }

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def sent_bytes() -> int:
    """What this host's interfaces have sent, loopback left out."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if not line.strip().startswith("lo:"))


def work(folder: Path, method: Mapping[str, Any], size: Size, out: Path) -> None:
    """One host's process."""
    torch.set_num_threads(1)
    setting = Setting(folder=folder, quick=False, progress=SilentProgress())
    meter = Meter(last=size.num_steps)
    with join_world(torch.device("cpu")) as world:
        longer = replace(size, num_steps=size.num_steps + 1)
        one_run(
            setting, prepare_text(setting), longer, method, seed=0, world=world, folder=out.with_suffix(""),
            controllers={"meter": meter},
        )  # fmt: skip
        if world.is_first:
            write_atomic(out, json.dumps(meter.figures()))


def measure(folder: Path, name: str, mbit: float, size: Size, num_hosts: int) -> dict[str, float]:
    """One run on hosts of their own."""
    with Network(star(num_hosts, mbit=mbit)) as net, tempfile.TemporaryDirectory(dir=folder) as place:
        port, out = free_port(net, "h0"), Path(place) / "figures.json"
        command = [sys.executable, __file__, "--work", name, "--folder", str(folder), "--out", str(out)]
        command += ["--size", json.dumps(dump(size))]
        ranks = [
            net.popen(
                host,
                command,
                env={
                    **net.torch_environment(host, "h0", port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(num_hosts),
                    "OMP_NUM_THREADS": "1",
                },
                stderr=subprocess.PIPE,
            )
            for rank, host in enumerate(net.hosts)
        ]
        errors = [rank.communicate()[1] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"{name}: a process failed\n{errors[0].decode()[-2000:]}")
        return json.loads(out.read_text())


def summary(found: Mapping[str, Mapping[float, Mapping[str, float]]], mbit: float) -> list[dict[str, Any]]:
    """One row a method, beside exact on the same link."""
    exact = found["exact"][mbit]
    return [
        {
            "method": name,
            "bytes_per_step": on[mbit]["bytes_per_step"],
            "bytes_removed_%": 100 * (1 - on[mbit]["bytes_per_step"] / exact["bytes_per_step"]),
            "exchange_ms": on[mbit]["exchange_ms"],
            "exchange_shorter": exact["exchange_ms"] / on[mbit]["exchange_ms"],
            "step_ms": on[mbit]["step_ms"],
            "faster_than_exact": on[mbit]["tokens_per_s"] / exact["tokens_per_s"],
            "throughput_of_unlimited": on[mbit]["tokens_per_s"] / on[UNLIMITED]["tokens_per_s"],
        }
        for name, on in found.items()
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| transport | bytes a step | removed | exchange, ms | shorter | step, ms | against exact | of unlimited |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['method']} | {row['bytes_per_step']:,.0f} | {row['bytes_removed_%']:.2f}% | {row['exchange_ms']:.2f} "
        f"| {row['exchange_shorter']:.1f}x | {row['step_ms']:.1f} | {row['faster_than_exact']:.2f}x "
        f"| {100 * row['throughput_of_unlimited']:.0f}% |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.folder, METHODS[given.work], parse(Size, json.loads(given.size)), given.out)
        return
    if reason := missing():
        raise SystemExit(f"cannot build networks: {reason}")
    size = Size(model_dim=128, num_layers=2, seq_len=128, batch_rows=32, num_steps=given.steps, learning_rate=4e-3)
    around = circumstances()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(Setting(folder=folder, quick=False, progress=SilentProgress()), size)
        runs: dict[str, dict[float, list[dict[str, float]]]] = {}
        for _ in range(given.repeats):
            for method in given.methods.split(","):
                for mbit in (given.mbit, UNLIMITED):
                    found = measure(folder, method, mbit, size, given.hosts)
                    runs.setdefault(method, {}).setdefault(mbit, []).append(found)
                    print(method, mbit, {key: round(value, 2) for key, value in found.items()}, flush=True)
    medians = {
        method: {
            mbit: {key: statistics.median(run[key] for run in several) for key in several[0]}
            for mbit, several in on.items()
        }
        for method, on in runs.items()
    }
    rows = summary(medians, given.mbit)
    print(table(rows))
    record = {
        "benchmark": "compression_links", "targets": TARGETS, "mbit": given.mbit, "hosts": given.hosts,
        "threads_of_each_host": 1, "repeats": given.repeats, "size": dump(size), "methods": METHODS, "rows": rows,
        "runs": {method: {str(mbit): several for mbit, several in on.items()} for method, on in runs.items()}, **around,
    }  # fmt: skip
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / f"compression-links-{machine_slug(around['machine'])}.json"
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
