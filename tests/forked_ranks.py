"""The ranks of a claim, forked from a process that has imported PyTorch (`rank_processes`).

`modelwright_claims.launch` starts an interpreter for each rank, which takes longer to import the training loop than
most tests take to train. Tests of that start itself, such as those in `test_training_run.py`, do not use this.
"""

import gc
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import pytest

from distributed import Host, enter
from impatient import look_once
from modelwright_claims import launch
from modelwright_claims.netns import Network
from rank_processes import end_with_parent, fork_context


@dataclass(frozen=True)
class Forked:
    """What `launch` asks of a `subprocess.Popen`."""

    process: ForkServerProcess

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> None:
        self.process.join()


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """From now on `launch` forks its ranks, those on hosts of a `Network` too."""
    patch.setattr(launch, "subprocess", SimpleNamespace(Popen=_fork))
    patch.setattr(Network, "popen", _fork_on)


def _fork_on(network: Network, host: str, command: Sequence[str], **options: Any) -> Forked:
    return _fork(command, host=Host(name=host, namespace=f"{network.tag}-{host}", environment={}), **options)


def _fork(
    command: Sequence[str], *, env: dict[str, str], stdout: IO[bytes], stderr: IO[bytes], host: Host | None = None
) -> Forked:
    """Start `python -m module arguments...`."""
    assert command[:2] == [sys.executable, "-m"]
    files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (stdout, stderr)]
    process = fork_context().Process(target=_become, args=(list(command[2:]), env, files, host), daemon=True)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # the first start is that of the server, too
        process.start()
    return Forked(process)


def _become(words: list[str], environment: dict[str, str], files: Sequence[str], host: Host | None) -> None:
    """The rest of the life of a forked process."""
    gc.freeze()  # otherwise every full collection copies the pages of all modules that the server has imported
    end_with_parent()
    look_once()
    for path, descriptor in zip(files, (1, 2), strict=True):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if host is not None:
        enter(host)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
