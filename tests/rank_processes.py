"""Start one Python script as every rank of a world over gloo on this host, and hear what became of each."""

import os
import socket
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 120


def start_ranks(script: Path, *arguments: object, size: int) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def wait_for(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each; none is left behind."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def run_ranks(script: Path, *arguments: object, size: int) -> list[str]:
    """The output of each rank; all of them have to succeed."""
    ended = wait_for(start_ranks(script, *arguments, size=size))
    assert [status for status, _, _ in ended] == [0] * size, "\n".join(errors for _, _, errors in ended)
    return [output for _, output, _ in ended]
