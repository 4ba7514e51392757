"""Run a function on several gloo ranks of this host, and return what each rank returned.

`run_distributed` is for ranks that all succeed. `start_distributed` is for tests that watch ranks while they run, or
let one of them fail or die. Ranks are forked from a server that has imported PyTorch (`rank_processes.fork_context`),
so a rank starts in a fraction of a second. Use `rank_processes.start_process` for scripts and commands.
"""

import ctypes
import gc
import importlib.util
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Generic, TypeVar
from unittest import mock

import torch
from torch._C._distributed_c10d import TCPStore

from modelwright.parallel.mesh import join_world
from modelwright_claims import netns
from modelwright_claims.launch import serve_store, store_environment
from rank_processes import TIMEOUT_S, end_with_parent, fork_context

Case = TypeVar("Case")
Result = TypeVar("Result")
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
"""Flags of Linux's unshare(2) and setns(2): host name and network."""

GRACE_S = 1.0
"""How long to look for the rank that failed first once any rank has failed."""


class RankError(Exception):
    """A rank raised an exception or was killed. The message has the traceback."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A network namespace that ranks enter before they start, the name of the host there, and variables to set."""

    name: str
    namespace: str
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a rank ended."""

    code: int
    """The exit status, or minus the signal that killed the rank."""
    result: Any
    """The function's return value; None if it did not return."""
    output: str
    """Standard output and standard error."""


@dataclass(frozen=True)
class Ranks:
    """The processes of one world, by rank. Call `results` or `wait` once; both leave no process behind."""

    processes: list[ForkServerProcess]
    folder: tempfile.TemporaryDirectory[str]
    store: TCPStore
    """Held here because ranks find each other through it."""
    ended: dict[int, int] = field(default_factory=dict)
    """Exit codes of the ranks that have ended."""

    def output(self, rank: int) -> str:
        """What the rank has written so far."""
        path = self._path(rank, "output")
        return path.read_text() if path.exists() else ""

    def send_signal(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def is_alive(self, rank: int) -> bool:
        return self.processes[rank].is_alive()

    def results(self, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Return each rank's result. Raises `RankError` as soon as a rank fails, and kills the other ranks."""
        return [rank_exit.result for rank_exit in self._wait(timeout_s, stop_on_failure=True)]

    def wait(self, timeout_s: float = TIMEOUT_S) -> list[Exit]:
        """Wait until every rank has ended, with whatever exit code."""
        return self._wait(timeout_s, stop_on_failure=False)

    def _wait(self, timeout_s: float, *, stop_on_failure: bool) -> list[Exit]:
        deadline = time.monotonic() + timeout_s
        try:
            while len(self.ended) < len(self.processes):
                if not self._wait_for_any(deadline):
                    raise TimeoutError(f"ranks did not end within {timeout_s:g} s\n{self._describe(self._running())}")
                if stop_on_failure and any(self.ended.values()):
                    raise RankError(self._describe(self._failed()))
            return [self._exit(rank) for rank in range(len(self.processes))]
        finally:
            for process in self.processes:
                process.kill()
                process.join()
            self.folder.cleanup()

    def _running(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank not in self.ended]

    def _wait_for_any(self, deadline: float) -> bool:
        sentinels = {self.processes[rank].sentinel: rank for rank in self._running()}
        ready = connection.wait(list(sentinels), timeout=max(0.0, deadline - time.monotonic()))
        for rank in (sentinels[sentinel] for sentinel in ready if isinstance(sentinel, int)):
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            assert code is not None
            self.ended[rank] = code
        return bool(ready)

    def _failed(self) -> list[int]:
        """Return the ranks that failed, first the one that failed first.

        The others often fail only because its connections were closed, and may end before it does.
        """
        while self._running() and self._wait_for_any(time.monotonic() + GRACE_S):
            pass
        raised_at = {rank: at for rank in range(len(self.processes)) if (at := self._raised_at(rank)) is not None}
        killed = [rank for rank, code in self.ended.items() if code and rank not in raised_at]
        return killed + sorted(raised_at, key=lambda rank: raised_at[rank])

    def _raised_at(self, rank: int) -> float | None:
        path = self._path(rank, "raised_at")
        return float(path.read_text()) if path.exists() else None

    def _describe(self, ranks: Sequence[int]) -> str:
        size = len(self.processes)
        return "\n".join(f"rank {rank} of {size} ({self._state(rank)}):\n{self.output(rank)}" for rank in ranks)

    def _state(self, rank: int) -> str:
        if rank in self.ended:
            return f"exit code {self.ended[rank]}"
        return "running" if self._raised_at(rank) is None else "raised an exception"

    def _exit(self, rank: int) -> Exit:
        path = self._path(rank, "result")
        result = torch.load(path, weights_only=False) if path.exists() else None
        return Exit(code=self.ended[rank], result=result, output=self.output(rank))

    def _path(self, rank: int, name: str) -> Path:
        return Path(self.folder.name) / str(rank) / name


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S, **options: Any
) -> list[Any]:
    """Call `function(world, *args)` on every rank and return the results by rank; see `start_distributed`.

    Raises `RankError` with the traceback of the rank that failed first, and `TimeoutError`.
    """
    return start_distributed(function, world_size, *args, **options).results(timeout_s)


def start_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, joins_world: bool = True, hosts: Sequence[Host] = ()
) -> Ranks:
    """Start ranks that call `function(world, *args)` with one thread each and warnings as errors.

    function: of the top level of a module, because ranks import it. Arguments and results are pickled.
    joins_world: False calls `function(*args)`, which is then to call `join_world` or a part of the product that does.
    hosts: of each rank; none starts all of them on this host.
    """
    store = serve_store()
    folder = tempfile.TemporaryDirectory(prefix="ranks-")
    torch.save((function, args), Path(folder.name) / "call")
    module = sys.modules[function.__module__]
    assert module.__file__ is not None
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world_size),
        **store_environment(store),
    }
    processes = []
    for rank in range(world_size):
        host = hosts[rank] if hosts else None
        environment = {**shared, **(host.environment if host else {}), "RANK": str(rank)}
        call = _Call(module.__name__, module.__file__, Path(folder.name), rank, environment, host, joins_world)
        process = fork_context().Process(target=_run_rank, args=(call,), daemon=True)
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # for the server, which the first start starts too
            process.start()
        processes.append(process)
    return Ranks(processes, folder, store)


@dataclass(frozen=True)
class OnDemand(Generic[Case, Result]):
    """Groups of cases. The first test that asks for a case runs it and the others of its group."""

    groups: Sequence[Sequence[Case]]
    run: Callable[[Sequence[Case]], Result]
    results: dict[int, Result] = field(default_factory=dict)
    """By the group's number."""

    def __getitem__(self, case: Case) -> Result:
        """Return what `run` returned for the group of the case."""
        number = next(number for number, group in enumerate(self.groups) if case in group)
        if number not in self.results:
            self.results[number] = self.run(self.groups[number])
        return self.results[number]


def hosts_of(network: netns.Network, *, ranks_per_host: int = 1) -> list[Host]:
    """Return the host of each rank, with the first ranks on the network's first host."""
    first = network.hosts[0]
    port = str(netns.free_port(network, first))
    return [
        Host(
            name=host,
            namespace=f"{network.tag}-{host}",
            environment={
                **network.torch_environment(host, first, int(port)),
                "TORCHELASTIC_USE_AGENT_STORE": "False",  # a store outside the network is out of reach
            },
        )
        for host in network.hosts
        for _ in range(ranks_per_host)
    ]


@dataclass(frozen=True)
class _Call:
    """What a rank is to do."""

    module: str
    file: str
    folder: Path
    rank: int
    environment: dict[str, str]
    host: Host | None
    joins_world: bool


def _run_rank(call: _Call) -> None:
    """The life of a forked process."""
    gc.freeze()  # otherwise every full collection copies the pages of all modules that the server has imported
    end_with_parent()
    folder = call.folder / str(call.rank)
    folder.mkdir()
    with open(folder / "output", "a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(call.environment)
    if call.host is not None:
        enter(call.host)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    _import_file(call.module, call.file)
    function, args = torch.load(call.folder / "call", weights_only=False)
    if call.joins_world:
        with join_world(torch.device("cpu")) as world:
            result = _note_error(folder, function, world, *args)
    else:
        result = _note_error(folder, function, *args)
    torch.save(result, folder / "unfinished")
    (folder / "unfinished").rename(folder / "result")


def _note_error(folder: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function; report an exception before the process group goes down, which makes other ranks fail."""
    try:
        return function(*args)
    except Exception as error:
        at = time.monotonic()  # one clock for all processes; times of files are too coarse
        traceback.print_exc()
        sys.stderr.flush()
        (folder / "unfinished").write_text(str(at))
        (folder / "unfinished").rename(folder / "raised_at")
        raise SystemExit(1) from error


def _import_file(name: str, file: str) -> None:
    """Import a test module under the name that pytest gave it, which no search path needs to lead to."""
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def enter(host: Host) -> None:
    """Move this thread, and those that it starts, into the host's network, under its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/run/netns/{host.namespace}", os.O_RDONLY)
    if libc.setns(namespace, CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"cannot enter {host.namespace}")
    os.close(namespace)
    socket.sethostname(host.name)
