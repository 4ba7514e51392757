"""One run under one layout after the other, in processes forked from this one; a script for `test_three_axes`.

three_axes_run.py FOLDER CASES.json: each case has a folder, a number of processes, settings and a layout.
"""

import json
import os
import socket
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny_run
import torch

from modelwright.core.config import parse
from modelwright.model.decoder import Decoder
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import join_world


def run_rank(folder: Path, case: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    model = Decoder(replace(tiny_run.SHAPE, num_kv_heads=4))  # four ranks can share its heads
    model.init_weights(0)
    with join_world(torch.device("cpu")) as world:
        tiny_run.run(
            folder / case["folder"],
            tiny_run.settings(**case["settings"]),
            model=model,
            world=world,
            parallel=parse(ParallelConfig, case["parallel"]),
        )


def run_case(folder: Path, case: dict[str, Any]) -> list[int]:
    """Exit codes of the ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    size = case["size"]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ["RANK"] = str(rank)
                run_rank(folder, case)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    import tensorboardX  # noqa: F401 - imported before the forks, to save time

    folder = Path(sys.argv[1])
    for case in json.loads(Path(sys.argv[2]).read_text()):
        codes = run_case(folder, case)
        if any(codes):
            raise SystemExit(f"{case['folder']}: ranks ended with {codes}")


if __name__ == "__main__":
    main()
