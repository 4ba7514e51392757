"""Training runs on hosts that are joined by slow links: bytes on the interface, time spent exchanging, throughput.

Hosts are network namespaces joined by a switch whose links carry so many Mbit/s, or are not limited (`netns.py`, needs
root); each runs one process of one thread, which trains a small decoder through THE loop with the transports of
`compression_probe`. Counted from step 21 to the last but one (the last meeting of local steps is exact): the sending
interface's own byte counter, which sees every header and the loop's small messages too; `exchange_s` of the steps
(transport and meetings, with compression and waiting); tokens per second. Knows no claim.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modelwright.core.artifacts import write_atomic
from modelwright.core.config import dump, parse
from modelwright.core.errors import ModelwrightError
from modelwright.core.progress import SilentProgress
from modelwright.parallel.mesh import join_world
from modelwright.train.technique import StepInfo, Technique
from modelwright_claims.claim import Setting
from modelwright_claims.compression_probe import METHODS, one_run
from modelwright_claims.netns import Network, free_port, star
from modelwright_claims.workbench import Size, prepare_text

LINK_METHODS = {**METHODS, "exact-after": {"transport": {"overlap": False}}}
"""`exact-after`: exact sums that begin when backward has ended, so that all of their time shows."""
WARM_UP = 20
UNLIMITED = 0.0


@dataclass
class Meter:
    """Adds up steps after the first few."""

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
            techniques=[Technique(name="meter", on_step_end=meter.observe)],
        )  # fmt: skip
        if world.is_first:
            write_atomic(out, json.dumps(meter.figures()))


def measure(folder: Path, name: str, mbit: float, size: Size, num_hosts: int) -> dict[str, float]:
    """One run on hosts of their own."""
    with Network(star(num_hosts, mbit=mbit)) as net, tempfile.TemporaryDirectory(dir=folder) as place:
        port, out = free_port(net, "h0"), Path(place) / "figures.json"
        command = [sys.executable, "-m", "modelwright_claims.links_probe", name]
        command += [str(folder), str(out), json.dumps(dump(size))]
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
            raise ModelwrightError(f"{name}: a process failed\n{errors[0].decode()[-2000:]}")
        return json.loads(out.read_text())


def main() -> None:
    method, folder, out, size = sys.argv[1:]
    work(Path(folder), LINK_METHODS[method], parse(Size, json.loads(size)), Path(out))


if __name__ == "__main__":
    main()
