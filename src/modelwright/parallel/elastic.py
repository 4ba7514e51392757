"""Training that goes on when processes come and go: how `torchrun` is started, and what layout its processes get.

`torchrun` starts the processes of every host again when one of them ends, and with as many hosts as there are then.
The data axis of the layout grows and shrinks with them; the global batch and the order of the data do not change. Each
start goes on from the last checkpoint. Knows nothing about steps or checkpoints.
"""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from modelwright.core.errors import ConfigError
from modelwright.parallel.config import ParallelConfig
from modelwright.parallel.mesh import World, join_world

FINISHED, HEARD = "finished", "heard"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How the processes of a run are started; the same on every host, but for what `torchrun` finds out itself.

    processes: on each host. min_hosts and max_hosts: the run waits for the first number and takes in hosts up to the
    second; rendezvous: HOST:PORT that the hosts ask for each other, empty when there is one host only; with
    separate_store nobody of them runs what answers there, but `serve_rendezvous` does, so that any host may go;
    address: where the others reach this host, its host name when empty; name: of the run, equal on all hosts;
    max_restarts: after so many it gives up; join_timeout_s: how long to wait for min_hosts; last_call_s: how long more
    hosts may join once there are enough; lost_after_s: a host that was not heard of for so long is gone.
    """

    processes: int = 1
    min_hosts: int = 1
    max_hosts: int = 1
    rendezvous: str = ""
    separate_store: bool = False
    address: str = ""
    name: str = "modelwright"
    max_restarts: int = 100
    join_timeout_s: int = 600
    last_call_s: int = 5
    lost_after_s: int = 15

    def __post_init__(self) -> None:
        for name in ("processes", "min_hosts", "join_timeout_s", "last_call_s"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.max_hosts < self.min_hosts:
            raise ConfigError(f"max_hosts: must not be below min_hosts ({self.min_hosts}), got {self.max_hosts}")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts: must not be negative, got {self.max_restarts}")
        if self.lost_after_s < 3:
            raise ConfigError(f"lost_after_s: must be at least 3, got {self.lost_after_s}")
        if self.max_hosts > 1 and ":" not in self.rendezvous:
            raise ConfigError("rendezvous: several hosts need HOST:PORT of one of them, equal on all")


def torchrun_command(config: LaunchConfig, command: Sequence[str]) -> list[str]:
    """The command line that starts `command` (a Python script or `-m MODULE`, and its arguments) on this host."""
    waits = {
        "join_timeout": config.join_timeout_s,
        "last_call_timeout": config.last_call_s,
        "keep_alive_interval": max(1, config.lost_after_s // 3),
        "keep_alive_max_attempt": 3,
        "read_timeout": max(10, config.lost_after_s),
    }
    if config.separate_store:
        waits["is_host"] = 0
    address = [f"--local-addr={config.address}"] if config.address else []
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={config.min_hosts}:{config.max_hosts}",
        f"--nproc-per-node={config.processes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={config.rendezvous or 'localhost:0'}",
        f"--rdzv-id={config.name}",
        f"--rdzv-conf={','.join(f'{key}={value}' for key, value in waits.items())}",
        f"--max-restarts={config.max_restarts}",
        "--monitor-interval=0.5",
        *address,
        *command,
    ]


def torchrun_environment(environment: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """The environment that goes with `torchrun_command`; threads: of each process.

    A store that the rendezvous and the workers share keeps addresses of processes that are gone, so restarts over gloo
    fail now and then: each start gets a store of its own.
    """
    return {**environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": str(threads)}


def serve_rendezvous(port: int) -> None:
    """Answer at HOST:`port` until this process is ended: where hosts find each other, on a machine that stays."""
    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)  # pyright: ignore
    while True:
        time.sleep(3600)
        store.num_keys()


def num_restarts() -> int:
    """How often this host's processes were started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def fit(config: ParallelConfig, *, num_processes: int, num_rows: int) -> ParallelConfig:
    """The layout for as many of the processes as can be used: the data axis takes the largest number of copies that
    divides the rows of the global batch; the other axes stay.

    A `data` of the config is the most that is taken. Where its copies no longer make up whole shard groups, the groups
    get smaller, or take all copies. Raises `ConfigError` when one copy of the model no longer fits.
    """
    others = config.pipeline * config.context * config.tensor
    most = min(num_processes // others, config.data or num_rows)
    if most < 1:
        raise ConfigError(
            f"data: one copy of the model takes {others} processes (pipeline {config.pipeline} x context "
            f"{config.context} x tensor {config.tensor}), {num_processes} are left; start more, or change the layout"
        )
    data = next(copies for copies in range(most, 0, -1) if num_rows % copies == 0)
    group = config.shard_group
    if group and data % group:
        group = math.gcd(data, group) if math.gcd(data, group) > 1 else 0
    return replace(config, data=data, shard_group=group)


def num_used(config: ParallelConfig) -> int:
    """Processes of a layout that `fit` has settled."""
    return config.pipeline * config.data * config.context * config.tensor


@contextmanager
def join_as_fits(
    config: ParallelConfig, *, num_rows: int, device: torch.device | None = None
) -> Iterator[tuple[World, ParallelConfig] | None]:
    """The world and layout for the processes that `torchrun` has started now; None for one that is left over.

    A process that is left over (three processes cannot share eight rows) waits at the context's end until the others
    have finished, so that its host is there when the layout changes again.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    layout = fit(config, num_processes=size, num_rows=num_rows)
    used = num_used(layout)
    if used == size:
        with join_world(device) as world:
            yield world, layout
        return
    store = _store(rank, size)
    if rank >= used:
        yield None
        _wait_until_finished(store)
        return
    os.environ["WORLD_SIZE"] = str(used)
    try:
        with join_world(device) as world:
            yield world, layout
            world.barrier()
        if rank == 0:
            _tell_finished(store, size - used)
    finally:
        os.environ["WORLD_SIZE"] = str(size)


def _store(rank: int, size: int) -> Store:
    """A store of all processes at MASTER_ADDR:MASTER_PORT, run by the first one (or by `torchrun`)."""
    found, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timedelta(minutes=10))))
    return PrefixStore("modelwright", found)


def _wait_until_finished(store: Store) -> None:
    """Returns when the run is finished; a store that is gone before is an error, so that the process starts again."""
    while not store.check([FINISHED]):
        time.sleep(0.5)
    store.add(HEARD, 1)


def _tell_finished(store: Store, num_waiting: int) -> None:
    """Stay, with the store, until the waiting processes have heard it, or are gone."""
    store.set(FINISHED, "")
    deadline = time.monotonic() + 30
    while store.add(HEARD, 0) < num_waiting and time.monotonic() < deadline:
        time.sleep(0.1)
