"""Start the ranks of a distributed program, on this machine or on the hosts of a `Network`, and wait for them."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from torch._C._distributed_c10d import TCPStore

from modelwright.core.config import ModelwrightError
from modelwright_claims.netns import Network
from modelwright_claims.netns import free_port as free_port_on

NUM_ERROR_CHARS = 4000
POLL_S = 0.02


@dataclass(frozen=True)
class Rank:
    """A single process and the files that take its output.

    store: where the ranks find each other, served by this process while it is referred to; None where the first rank
    serves it.
    """

    process: subprocess.Popen[Any]
    output: IO[bytes]
    errors: IO[bytes]
    store: TCPStore | None = None


def start_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    ranks_per_host: int = 0,
    threads: int = 1,
    network: Network | None = None,
    hosts: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Rank]:
    """Start `python -m module arguments` once per rank, with the environment that `join_world` reads.

    ranks_per_host: 0 puts all ranks on one host; threads: of each rank; network: the hosts' network, None for this
    machine; hosts: where the ranks are placed, in order (default: all hosts of the network).
    """
    ranks_per_host = ranks_per_host or (num_ranks if network is None else 1)
    command = [sys.executable, "-m", module, *arguments]
    names = list(hosts or network.hosts) if network else []
    store = None if network else serve_store()
    local = {} if store is None else store_environment(store)
    port = free_port_on(network, names[0]) if network else 0
    ranks = []
    for rank in range(num_ranks):
        variables = {
            **(network.torch_environment(names[rank // ranks_per_host], names[0], port) if network else os.environ),
            **local,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": str(threads),
            "WORLD_SIZE": str(num_ranks),
            "RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "LOCAL_RANK": str(rank % ranks_per_host),
            **(environment or {}),
        }
        output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed by finish_ranks
        options: dict[str, Any] = {"env": variables, "stdout": output, "stderr": errors}
        if network:
            process = network.popen(names[rank // ranks_per_host], command, **options)
        else:
            process = subprocess.Popen(command, **options)
        ranks.append(Rank(process, output, errors, store))
    return ranks


def finish_ranks(ranks: Sequence[Rank], *, timeout_s: float = 7200.0) -> list[str]:
    """Wait for the ranks and return what each wrote to standard output.

    Raises `ModelwrightError` with the errors of the first rank that failed.
    """
    try:
        deadline = time.monotonic() + timeout_s
        while None in (codes := [rank.process.poll() for rank in ranks]) and not any(codes):
            if time.monotonic() > deadline:
                raise ModelwrightError(f"processes did not end within {timeout_s:g} s")
            time.sleep(POLL_S)
        failed = [number for number, rank in enumerate(ranks) if rank.process.returncode]
        if failed:
            codes = ", ".join(f"rank {number} with {ranks[number].process.returncode}" for number in failed)
            raise ModelwrightError(f"a process failed ({codes}):\n{_text(ranks[failed[0]].errors)[-NUM_ERROR_CHARS:]}")
        return [_text(rank.output) for rank in ranks]
    finally:
        for rank in ranks:
            rank.process.kill()  # of the others, once one has failed
            rank.process.wait()
            rank.output.close()
            rank.errors.close()


def run_ranks(module: str, arguments: Sequence[str], **options: Any) -> list[str]:
    """Start ranks (options as in `start_ranks`), wait for them, and return their standard output."""
    return finish_ranks(start_ranks(module, arguments, **options))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def answer_of(command: Sequence[str], name: str, *, text: str = "", **options: Any) -> Any:
    """Run a program to its end and return the JSON in the last line of its output. text: its standard input; options:
    of `subprocess.run`. Raises `ModelwrightError` with its last words if it fails or takes too long; name: of it.
    """
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise ModelwrightError(f"{name}: did not end within {error.timeout:g} s") from None
    if done.returncode:
        raise ModelwrightError(f"{name}: failed:\n{done.stderr[-NUM_ERROR_CHARS:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def serve_store() -> TCPStore:
    """Serve a store for ranks on this machine while the result is referred to.

    A port that is looked up and released may be taken before the first rank has it; the port of this store cannot.
    """
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def store_environment(store: TCPStore) -> dict[str, str]:
    """Return the variables that `torchrun` sets for ranks whose store is served by another process, on this machine."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
