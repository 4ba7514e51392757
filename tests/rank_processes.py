"""Start one Python script as every rank of a world over gloo on this host, and hear what became of each.

The processes are forked from one that has imported PyTorch and the training loop already (the "forkserver" of
`multiprocessing`), for importing takes seconds of a core and what a test runs often takes less. In all else each is a
process of its own: environment, arguments, working folder, output, and a status or a signal that ended it.
"""

import ctypes
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest import mock

from torch._C._distributed_c10d import TCPStore

from forked_commands import fork_commands
from impatient import look_once
from modelwright_claims.launch import serve_store, store_environment

TIMEOUT_S = 240
"""Far more than anything here takes: a machine that is busy with other things must fail no test."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): the signal that a process gets when the one that forked it ends."""
IMPORTED = (
    "forked_commands",
    "functorch.compile",
    "matplotlib.backends.backend_svg",  # most commands write a report
    "matplotlib.figure",
    "modelwright.cli.main",
    "modelwright.data.clean.clean",
    "modelwright.train.build",
    "modelwright.parallel.strategies.delayed",
    "modelwright.parallel.topology.collectives",
    "modelwright.parallel.strategies.hogwild",
    "modelwright.parallel.pipeline.runner",
    "modelwright.parallel.strategies.config",
    "modelwright.pipeline.run",
    "modelwright.recipes.load",
    "modelwright.serve.engines.process",
    "modelwright.serve.server",
    "modelwright_continual.loop",
    "pytest",
    "tensorboardX",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)


@dataclass(frozen=True)
class Started:
    """A process, the folder of the files that hold what it writes, and the store that it finds other ranks by."""

    process: ForkServerProcess
    folder: Path
    store: TCPStore | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.exitcode is None

    @property
    def output(self) -> str:
        """What it has written so far."""
        path = self.folder / "stdout"
        return path.read_text() if path.exists() else ""

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, deadline: float | None = None) -> tuple[int, str, str]:
        """Exit status (or minus the signal that ended it), output and errors.

        Waits until that time of the monotonic clock, or for `TIMEOUT_S` from now.
        """
        deadline = time.monotonic() + TIMEOUT_S if deadline is None else deadline
        self.process.join(max(0.0, deadline - time.monotonic()))
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        output, errors = ((self.folder / name).read_text() for name in ("stdout", "stderr"))
        shutil.rmtree(self.folder)
        if code is None:
            raise TimeoutError(f"still at work after the time that it had; its errors:\n{errors}")
        return code, output, errors


def fork_context() -> ForkServerContext:
    """The kind of process that all of these are, to be given to code that starts its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def start_process(
    script: Path | str,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: Path | str = os.devnull,
) -> Started:
    """What `python -W error script arguments...` would start, or `python -m` for the name of a module.

    environment: added to this process's, with one thread. The output goes to files, so nobody has to read it.
    stdin: file or named pipe that the process reads as its standard input.
    """
    folder = Path(tempfile.mkdtemp(prefix="process-"))
    for name in ("stdout", "stderr"):
        (folder / name).touch()
    wanted = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    words = [str(script), *map(str, arguments)]
    arguments = (words, isinstance(script, str), wanted, cwd, folder, stdin)
    process = fork_context().Process(target=_become, args=arguments, daemon=True)  # ends with the tests at the latest
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # the first start is that of the server, too
        process.start()
    return Started(process, folder)


def start_ranks(script: Path, *arguments: object, size: int) -> list[Started]:
    store = serve_store()
    shared = {**store_environment(store), "WORLD_SIZE": str(size)}
    ranks = [start_process(script, *arguments, environment={**shared, "RANK": str(rank)}) for rank in range(size)]
    return [replace(rank, store=store) for rank in ranks]


def wait_for(processes: Sequence[Started]) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each; none is left behind."""
    deadline = time.monotonic() + TIMEOUT_S
    try:
        return [process.end(deadline) for process in processes]
    finally:
        for process in processes:
            process.process.kill()


def run_ranks(script: Path, *arguments: object, size: int) -> list[str]:
    """The output of each rank; all of them have to succeed."""
    return all_well(wait_for(start_ranks(script, *arguments, size=size)))


def all_well(ended: Sequence[tuple[int, str, str]]) -> list[str]:
    assert [status for status, _, _ in ended] == [0] * len(ended), "\n".join(errors for _, _, errors in ended)
    return [output for _, output, _ in ended]


def end_with_parent() -> None:
    """Have this process killed when the tests end: it may be waiting for other ranks forever.

    The server ends when no process is left that could ask it for another one.
    """
    forkserver = multiprocessing.forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    os.close(forkserver._forkserver_alive_fd)
    forkserver._forkserver_alive_fd = None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _become(
    words: list[str], is_module: bool, environment: dict[str, str], cwd: Path | None, folder: Path, stdin: Path | str
) -> None:
    """The rest of the life of a forked process."""
    gc.freeze()  # otherwise every full collection copies the pages of all modules that the server has imported
    end_with_parent()
    look_once()
    fork_commands()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with open(folder / name, "a") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    sys.argv = words
    with open(stdin) as sys.stdin:
        if is_module:
            sys.modules.pop(words[0], None)  # it begins anew
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            warnings.simplefilter("error")
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
