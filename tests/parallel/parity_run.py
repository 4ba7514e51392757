"""The tiny run under a layout: losses and final whole weights, to compare with those of one process.

Start it under torchrun, or with MASTER_ADDR and MASTER_PORT set and the number of processes given:

    parity_run.py FOLDER --processes 2 --layout '{"tensor": 2}' --steps 20 --compute bf16 --microbatches 2 \\
        --activation '{"mode": "unit", "unit_layers": 1}'
    parity_run.py FOLDER --cases CASES.json        a list of objects with the fields of `Case`, one after the other

Each case leaves FOLDER/NAME/metrics.jsonl (first rank) and FOLDER/NAME/rank<r>.safetensors (every rank).
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

import tiny_run as tiny

from modelwright.core.config import parse
from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import World, join_world, single


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run. `compute` fp64 computes with the definition of the loss; shape: changes to the model's shape;
    settings: changes to the training config."""

    name: str = "run"
    layout: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    compute: str = "fp32"
    microbatches: int = 1
    activation: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def run_case(case: Case, folder: Path, world: World | None = None) -> dict[str, torch.Tensor]:
    """Train; leave metrics.jsonl and return the whole final weights, the same on every rank."""
    model = Decoder(replace(tiny.SHAPE, **case.shape))
    model.init_weights(0)
    exact = case.compute == "fp64"
    config = tiny.settings(
        num_steps=case.steps,
        num_microbatches=case.microbatches,
        activations=case.activation,
        **{"precision": {"compute": "bf16" if case.compute == "bf16" else "fp32"}, **case.settings},
    )
    model = model.double() if exact else model
    tiny.run(
        folder / case.name,
        config,
        model=model,
        world=world or single(),
        parallel=parse(ParallelConfig, case.layout),
        **({"objective": tiny.Float64Objective(tiny.Rows())} if exact else {}),
    )
    return model.state_dict()


def launch(script: str, folder: Path, num_processes: int, *arguments: str, timeout_s: float = 280) -> None:
    """Run a script that calls `fork_ranks`, in processes of one thread each; all must end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-W", "error", script, str(folder), "--processes", str(num_processes), *arguments]
    subprocess.run(command, env=environment, check=True, timeout=timeout_s)


def start(folder: Path, cases: Sequence[Case], num_processes: int) -> None:
    """Run the cases, one after the other."""
    listing = folder / f"cases-{num_processes}.json"
    listing.write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
    launch(__file__, folder, num_processes, "--cases", str(listing))


def fork_ranks(num_processes: int) -> None:
    """Become that many processes, each with its rank, which have imported everything already; 0: stay as it is.

    The parent waits and ends as they do: with an error as soon as one of them has one.
    """
    children = set()
    for rank in range(num_processes):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_processes)}
            return
        children.add(child)
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:
            for other in children:  # they would wait for the lost one
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank failed with status {os.waitstatus_to_exitcode(status)}")
    if num_processes:
        sys.exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--processes", type=int, default=0, help="fork this many; 0 under torchrun")
    for name, default in asdict(Case()).items():
        as_json = isinstance(default, dict)
        parser.add_argument(f"--{name}", type=json.loads if as_json else type(default), default=default)
    arguments = vars(parser.parse_args())
    folder, listing, num_processes = (arguments.pop(name) for name in ("folder", "cases", "processes"))
    cases = [Case(**fields) for fields in json.loads(listing.read_text())] if listing else [Case(**arguments)]
    torch.set_num_threads(1)
    fork_ranks(num_processes)
    with join_world(torch.device("cpu")) as world:
        for case in cases:
            weights = run_case(case, folder, world)
            save_file(weights, folder / case.name / f"rank{world.rank}.safetensors")


if __name__ == "__main__":
    main()
