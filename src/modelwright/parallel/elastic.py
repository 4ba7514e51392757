"""Elastic training: starts `torchrun`, and chooses the layout of its processes.

`torchrun` restarts the processes of every host when one of them ends, with the hosts that remain or have joined. The
data axis of the layout grows and shrinks with them; the global batch and the order of the data do not change. Each
start resumes from the last checkpoint.
"""

import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.rendezvous import rendezvous
from torch.distributed.run import parse_args
from torch.distributed.run import run as run_agent

from modelwright.core.config import ConfigError
from modelwright.parallel.mesh import ParallelConfig, World, join_world

FINISHED, HEARD = "finished", "heard"
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOOK_AGAIN_S = 2.0
SAVING_S = 120
"""Longest time in seconds that processes that are asked to stop may take to save, before they are killed."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Settings with which the processes of a run are started; the same on every host, except for those that `torchrun`
    determines itself.

    processes: on each host. min_hosts, max_hosts: the run starts with the first number and admits hosts up to the
    second. rdzv_endpoint: HOST:PORT of the rendezvous; empty for one host. external_store: the port is served by
    `serve_rendezvous` instead of one of the hosts, so that any host may leave. local_addr: address at which the others
    reach this host; empty for its host name. run_id: equal on all hosts. max_restarts: after that many restarts the run
    fails. join_timeout_s: longest wait for min_hosts. last_call_timeout_s: time after that in which more hosts may
    join. keep_alive_timeout_s: a host that was silent for this long is considered gone.
    """

    processes: int = 1
    min_hosts: int = 1
    max_hosts: int = 1
    rdzv_endpoint: str = ""
    external_store: bool = False
    local_addr: str = ""
    run_id: str = "modelwright"
    max_restarts: int = 100
    join_timeout_s: int = 600
    last_call_timeout_s: int = 5
    keep_alive_timeout_s: int = 15

    def __post_init__(self) -> None:
        for name in ("processes", "min_hosts", "join_timeout_s", "last_call_timeout_s"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.max_hosts < self.min_hosts:
            raise ConfigError(f"max_hosts: must not be below min_hosts ({self.min_hosts}), got {self.max_hosts}")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts: must not be negative, got {self.max_restarts}")
        if self.keep_alive_timeout_s < 3:
            raise ConfigError(f"keep_alive_timeout_s: must be at least 3, got {self.keep_alive_timeout_s}")
        if self.max_hosts > 1 and ":" not in self.rdzv_endpoint:
            raise ConfigError("rdzv_endpoint: several hosts need HOST:PORT of one of them, equal on all")


def torchrun_options(config: LaunchConfig, backend: str) -> list[str]:
    """Returns the options with which `torchrun` starts the processes of this host. backend: of the rendezvous."""
    waits = {
        "join_timeout": config.join_timeout_s,
        "last_call_timeout": config.last_call_timeout_s,
        "keep_alive_interval": max(1, config.keep_alive_timeout_s // 3),
        "keep_alive_max_attempt": 3,
        "read_timeout": max(10, config.keep_alive_timeout_s),
    }
    if config.external_store:
        waits["is_host"] = 0
    # Many a laptop's own name does not resolve; a lone host needs none.
    address = config.local_addr or ("" if config.rdzv_endpoint else "localhost")
    return [
        f"--nnodes={config.min_hosts}:{config.max_hosts}",
        f"--nproc-per-node={config.processes}",
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint={config.rdzv_endpoint or 'localhost:0'}",
        f"--rdzv-id={config.run_id}",
        f"--rdzv-conf={','.join(f'{key}={value}' for key, value in waits.items())}",
        f"--max-restarts={config.max_restarts}",
        "--monitor-interval=0.5",
        *([f"--local-addr={address}"] if address else []),
    ]


def torchrun_environment(environment: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """Returns the environment for `torchrun_options`. threads: threads of each process."""
    return {
        # PyTorch's long warnings when a process loses another one add nothing to the error that ended the other; they
        # are suppressed unless the environment asks for them.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **environment,
        # A store that the rendezvous and the workers share keeps addresses of dead processes, so restarts over gloo
        # fail occasionally: each start uses a separate store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVING_S),
        "OMP_NUM_THREADS": str(threads),
    }


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables within the block, for the processes that are started there. Others are left alone: another thread
    may read or change them meanwhile.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Outcome of `launch` on this host; without any of these its processes have finished. failed: processes failed more
    often than allowed; killed: the signals that ended some of them, by rank; asked: the signal that this process
    received; closed: another host has ended the run.
    """

    failed: bool = False
    killed: Mapping[int, int] = field(default_factory=dict)
    asked: int = 0
    closed: bool = False


def launch(
    config: LaunchConfig, module: str, words: Sequence[str], *, logs: Path, before_restart: Callable[[], None]
) -> Ending:
    """Does the work of `torchrun` for `python -m MODULE WORDS`, in this process and with its environment.

    Call it from the main thread. A signal that asks this process to stop is forwarded to the processes it started, and
    they are waited for. logs: a folder for the library's own files. before_restart: called whenever the processes are
    about to be restarted; an exception that it raises ends the run on all hosts, and propagates. A host that loses its
    connection to the others rejoins automatically if it reaches them again within `join_timeout_s`. Raises
    `RendezvousError` if the hosts do not find each other.
    """
    backend, gates, stop = f"modelwright-{uuid.uuid4().hex}", list[_Gate](), _StopSignals()

    def gate(wanted: RendezvousParameters) -> RendezvousHandler:
        gates.append(_Gate(wanted, before_restart, stop))
        return gates[-1]  # pyright: ignore[reportReturnType]

    rendezvous_handler_registry.register(backend, gate)
    options = torchrun_options(config, backend)
    arguments = parse_args([*options, f"--log-dir={logs}", "--module", "--", module, *words])
    arguments.signals_to_handle = "none"  # torch's own handlers would replace these
    try:
        with stop:
            _run_until_found(lambda: run_agent(arguments), gates, config.join_timeout_s)
    except ChildFailedError as error:
        # Processes that ended by SIGTERM, or more than 2 s after the first, were stopped as a consequence.
        first = min(failure.timestamp for failure in error.failures.values())
        killed = {
            rank: -failure.exitcode
            for rank, failure in error.failures.items()
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and failure.timestamp <= first + 2
        }
        return Ending(failed=True, killed=killed, asked=stop.asked[0] if stop.asked else 0)
    except SignalException:
        return Ending(asked=stop.asked[0])
    except RendezvousClosedError:
        return Ending(closed=True)
    return Ending()


def _run_until_found(run: Callable[[], object], gates: Sequence["_Gate"], patience_s: float) -> None:
    """Runs this host's agent; retries for `patience_s` if it loses the others after it had found them."""
    given_up_at = 0.0
    while True:
        num_before = len(gates)
        try:
            run()
            return
        except RendezvousConnectionError:
            if any(gate.has_been_in for gate in gates[num_before:]):
                given_up_at = time.monotonic() + patience_s
            if time.monotonic() >= given_up_at:
                raise
            time.sleep(_LOOK_AGAIN_S)


class _Gate:
    """A rendezvous handler over c10d that checks before this host rejoins.

    A host that loses the others does not close the rendezvous behind it, as torch's agent would: the message might get
    through once the connection is back, and nobody could join again.
    """

    def __init__(self, wanted: RendezvousParameters, before_return: Callable[[], None], stop: "_StopSignals") -> None:
        names = wanted.endpoint, wanted.run_id, wanted.min_nodes, wanted.max_nodes, wanted.local_addr
        parameters = RendezvousParameters("c10d", *names, **wanted.config)
        self._handler: RendezvousHandler = rendezvous_handler_registry.create_handler(parameters)
        self._backend = wanted.backend
        self._before_return = before_return
        self._stop = stop
        self.has_been_in = False
        self._is_cut_off = False

    def get_backend(self) -> str:
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        self._stop.release()
        if self.has_been_in:
            self._before_return()
        result = self._asked(self._handler.next_rendezvous)
        self.has_been_in = True
        self._stop.hold()  # torch's agent starts its workers next
        return result

    def num_nodes_waiting(self) -> int:
        """The agent polls this while its workers run."""
        self._stop.release()
        return self._asked(self._handler.num_nodes_waiting)

    def shutdown(self) -> bool:
        return not self._is_cut_off and self._handler.shutdown()

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RendezvousConnectionError:
            self._is_cut_off = True
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


class _StopSignals:
    """Context in which a signal that asks this process to stop is added to `asked` and raises torch's exception.

    torch forwards the signal of its exception to the workers: always SIGTERM, because a Ctrl-C would show the traceback
    of a worker that is still importing. While workers are being started the exception is deferred; otherwise torch
    would forget those already started, which would then wait for the others forever.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._is_starting = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Signals that are ignored from the start (nohup) stay ignored.
        handled = [number for number in _STOPPING if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """Defers the exception: workers are being started from here on."""
        self._is_starting = True

    def release(self) -> None:
        """Ends the deferral, after the start of workers; raises `SignalException` if a signal has arrived meanwhile."""
        self._is_starting = False
        if self.asked:
            raise SignalException(f"got signal {self.asked[0]}", signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(number)
        if not self._is_starting:
            self.release()


def serve_rendezvous(port: int) -> None:
    """Serves the rendezvous at HOST:`port` until this process is stopped, on a machine that stays. Raises `ConfigError`
    if the port is unavailable.
    """
    if not 0 < port < 2**16:
        raise ConfigError(f"serve_rendezvous: {port} is not a port; choose one from 1024 to 65535")
    try:
        store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)  # pyright: ignore
    except dist.DistNetworkError:
        raise ConfigError(f"serve_rendezvous: port {port} is in use or not permitted; choose another") from None
    while True:
        time.sleep(3600)
        store.num_keys()


def num_restarts() -> int:
    """Number of times that this host's processes were restarted."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def fit(config: ParallelConfig, *, num_processes: int, num_rows: int) -> ParallelConfig:
    """Returns the layout that uses the most processes.

    The data axis takes the largest number of replicas that divides the rows of the global batch; the other axes stay. A
    `data` in the config is the maximum. If its replicas no longer make up whole shard groups, the groups shrink, or
    take all replicas. Raises `ConfigError` if one replica of the model no longer fits.
    """
    others = config.pipeline * config.context * config.tensor
    most = min(num_processes // others, config.data or num_rows)
    if most < 1:
        raise ConfigError(
            f"data: one replica of the model takes {others} processes (pipeline {config.pipeline} x context "
            f"{config.context} x tensor {config.tensor}), {num_processes} remain; start more, or change the layout"
        )
    data = next(copies for copies in range(most, 0, -1) if num_rows % copies == 0)
    group = config.shard_group_size
    if group and data % group:
        group = math.gcd(data, group) if math.gcd(data, group) > 1 else 0
    return replace(config, data=data, shard_group_size=group)


def num_used(config: ParallelConfig) -> int:
    """Number of processes of a layout that `fit` has chosen."""
    return config.pipeline * config.data * config.context * config.tensor


@contextmanager
def join_as_fits(
    config: ParallelConfig, *, num_rows: int, device: torch.device | None = None
) -> Iterator[tuple[World, ParallelConfig] | None]:
    """Yields the world and layout for the processes that `torchrun` has started; None for a process that is left over.

    A process that is left over (three processes cannot share eight rows) waits at the end of the context until the
    others have finished, so that its host is available when the layout changes again.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    layout = fit(config, num_processes=size, num_rows=num_rows)
    used = num_used(layout)
    if used == size:
        with join_world(device) as world:
            yield world, layout
        return
    # A store of all processes at MASTER_ADDR:MASTER_PORT, served by the first one (or by `torchrun`).
    shared, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timedelta(minutes=10))))
    store = PrefixStore("modelwright", shared)
    if rank >= used:
        yield None
        # A store that disappears before the run has finished is an error, so that the process restarts.
        while not store.check([FINISHED]):
            time.sleep(0.5)
        store.add(HEARD, 1)
        return
    os.environ["WORLD_SIZE"] = str(used)
    try:
        with join_world(device) as world:
            yield world, layout
            world.barrier()
        if rank == 0:
            # The store lives in this process: keep it until the waiting processes have been notified, or are gone.
            store.set(FINISHED, "")
            deadline = time.monotonic() + 30
            while store.add(HEARD, 0) < size - used and time.monotonic() < deadline:
                time.sleep(0.1)
    finally:
        os.environ["WORLD_SIZE"] = str(size)
