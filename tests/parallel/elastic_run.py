"""A tiny run under torchrun that loses a process or a host: `elastic_run.py FOLDER FAULT`, started by test_elastic.py.

FAULT: `process` kills rank 1 with SIGKILL after a step; `host` the process and the torchrun of host b. Once.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from modelwright.parallel.elastic import join_as_fits, num_restarts
from modelwright.parallel.mesh import ParallelConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import tiny_run

FAULT_AFTER = 7
NUM_STEPS = 16


class Fault:
    """Ends this process, and with `host` the torchrun above it, after a step."""

    every = 1

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def observe(self, info) -> None:
        if info.step == FAULT_AFTER:
            if self.kind == "host":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self):
        return {}

    def load_state_dict(self, state) -> None: ...


def main() -> None:
    torch.set_num_threads(1)
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    marker = folder / "fault"
    chosen = os.environ["RANK"] == "1" if kind == "process" else os.environ["HOST_NAME"] == "b"
    faulty = chosen and not marker.exists()
    with join_as_fits(ParallelConfig(), num_rows=tiny_run.ROWS, device=torch.device("cpu")) as joined:
        if joined is None:
            return
        world, layout = joined
        with open(folder / "starts.txt", "a") as file:
            file.write(f"{num_restarts()} {world.rank} {world.size}\n")
        if faulty:
            marker.touch()
        tiny_run.run(
            folder,
            tiny_run.settings(num_steps=NUM_STEPS),
            world=world,
            parallel=layout,
            techniques=tiny_run.watching(fault=Fault(kind)) if faulty else [],
        )


if __name__ == "__main__":
    main()
