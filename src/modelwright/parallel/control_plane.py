"""Communication between the processes of a run that is separate from training: agreement for background threads,
heartbeats, and the count of the bytes that are sent.

A collective of a background thread must not mix with those of training, so it has its own process group, over gloo
whatever the device. No rank waits forever: a process that has died or is late becomes one clear error on the others.

A host that loses its network closes no connection, so a process that waits for it in a collective, or at a barrier
while data is prepared, would wait indefinitely. A heartbeat is a thread of each process that increments a counter in
the store through which the processes found each other, and reads the others' counters: it needs neither the main thread
nor a collective. A process exits when another falls silent, so that a launcher can restart all.
"""

import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Store

from modelwright.core.artifacts import StorageError
from modelwright.core.config import ModelwrightError
from modelwright.parallel.mesh import World

T = TypeVar("T")

TIMEOUT_S = 600.0
LOST = 3
"""Exit status of a process that ends because another is lost."""
_GONE = 1 << 32
"""Added to the counter of a process that leaves on purpose."""
_KEY = "heartbeat/"
SEGMENTS_OUT, BYTES_SENT = 136, 200
"""Offsets in `struct tcp_info` of <linux/tcp.h>: u32 `tcpi_segs_out`, u64 `tcpi_bytes_sent` (Linux 4.19)."""
TCP_INFO_BYTES = BYTES_SENT + 8
HEADER_BYTES = 14 + 20 + 20 + 12
"""Header bytes of one segment: Ethernet, IPv4, and TCP with its timestamps."""


class LostRankError(ModelwrightError):
    """Another process of the run has ended or did not answer in time."""

    exit_code = LOST


class ControlPlane:
    """Channel among all ranks of a world; every rank creates one and calls the same methods in the same order, from one
    thread at a time. With one process nothing is sent.
    """

    def __init__(self, world: World, *, timeout_s: float = TIMEOUT_S) -> None:
        self.rank = world.rank
        self.size = world.size
        self.timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        if world.size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._world = World(rank=world.rank, size=world.size, device=torch.device("cpu"), group=self._group)

    def exchange(self, value: Any, *, what: str = "agreement") -> list[Any]:
        """Returns the values of all ranks, in rank order, like `World.gather_json`. Raises `LostRankError`."""
        return self._guard(lambda: self._world.gather_json(value), what)

    def any(self, flag: bool, *, what: str = "agreement") -> bool:
        """Returns whether the flag is set on any rank, by one small message."""
        if self._group is None:
            return flag
        result = torch.tensor([int(flag)])
        self._guard(lambda: dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self._group), what)
        return bool(result)

    def attempt(self, action: Callable[[], T], *, what: str) -> T:
        """Runs `action` on every rank; if it raises on any, raises on every rank. `action` itself must not communicate.
        A rank's own error is raised unchanged, another rank's as `StorageError` with its rank and text.
        """
        if self._group is None:
            return action()
        problem: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as error:
            problem = error
        texts = self.exchange(None if problem is None else str(problem) or repr(problem), what=what)
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text is not None:
                raise StorageError(f"{what}: rank {rank} failed: {text}")
        return result

    def move(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[int, int]], *, what: str
    ) -> list[Tensor]:
        """Sends byte tensors to ranks and receives others, (number of bytes, rank) each; ordered between two ranks."""
        received = [torch.empty(size, dtype=torch.uint8) for size, _ in receives]
        if self._group is None:
            return received
        group = self._group

        def run() -> None:
            works = [dist.isend(tensor, group=group, group_dst=to) for tensor, to in sends]
            works += [
                dist.irecv(tensor, group=group, group_src=source)
                for tensor, (_, source) in zip(received, receives, strict=True)
            ]
            for work in works:
                assert work is not None
                work.wait()

        self._guard(run, what)
        return received

    def broadcast(self, tensor: Tensor, *, source: int, what: str) -> Tensor:
        """Broadcasts one rank's bytes, in place (uint8, on the CPU)."""
        if self._group is not None:
            self._guard(lambda: dist.broadcast(tensor, group_src=source, group=self._group), what)
        return tensor

    def _guard(self, action: Callable[[], T], what: str) -> T:
        try:
            return action()
        except RuntimeError as error:  # gloo's connection errors and timeouts, PyTorch's own
            text = str(error).splitlines()[0][:200]
            raise LostRankError(
                f"{what}: another process of the run has exited or did not answer within {self.timeout_s:.0f} s "
                f"({text})"
            ) from error


class Heartbeat:
    """Context for all processes of a world alike; does nothing in a world of one. lost_after_s: a process is considered
    lost if its counter did not change for this long, and this process exits with status `LOST` after a line on stderr;
    0 disables it.
    """

    def __init__(self, world: World, *, lost_after_s: float) -> None:
        self.world = world
        self.lost_after_s = lost_after_s
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self.world.size > 1 and self.lost_after_s:
            # A separate connection: on a shared one, waiting for a key would block the counting.
            store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=max(1.0, self.lost_after_s / 2)),
            )
            self._thread = threading.Thread(target=self._beat, args=(store,), name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(self.lost_after_s)

    def _beat(self, store: Store) -> None:
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        counts, heard = dict.fromkeys(others, -1), dict.fromkeys(others, time.monotonic())
        while True:
            started = time.monotonic()
            if self._leaving.wait(self.lost_after_s / 8):
                break
            # If this process itself was stopped for long (Ctrl-Z, a paused machine), the others may have been too, so
            # everyone gets the full time again.
            if time.monotonic() - started > self.lost_after_s / 2:
                heard = dict.fromkeys(others, time.monotonic())
            result = _ask(lambda: {rank: store.add(f"{_KEY}{rank}", 0) for rank in others if counts[rank] < _GONE})
            _ask(lambda: store.add(f"{_KEY}{self.world.rank}", 1))
            now = time.monotonic()
            for rank, count in (result or {}).items():
                if count != counts[rank]:
                    counts[rank], heard[rank] = count, now
            silent = [rank for rank in others if counts[rank] < _GONE and now - heard[rank] > self.lost_after_s]
            if silent:
                named = ", ".join(map(str, silent))
                print(
                    f"process {self.world.rank}: nothing was heard of process {named} for {self.lost_after_s:g} s; "
                    "ending, so that the run can be started again and goes on from its last checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                # `sys.exit` would end this thread only, while the main thread waits in a collective.
                os._exit(LOST)
        _ask(lambda: store.add(f"{_KEY}{self.world.rank}", _GONE))


def _ask(question: Callable[[], T]) -> T | None:
    """Returns the store's answer, None if it does not answer: its host may be the lost one."""
    try:
        return question()
    except RuntimeError:
        return None


class Traffic:
    """Counts the bytes that this process has sent since the counter was created, by the kernel's figures of its TCP
    connections.

    Everything is counted, whoever sent it: gradients, FSDP's gathered parameters, a pipeline's activations, sums of a
    few values, checkpoint and control messages. Only gloo sends all of it over TCP; for other backends nothing is
    reported.
    """

    def __init__(self, world: World) -> None:
        self._sends = world.size > 1
        self._counts = sys.platform == "linux" and world.device.type == "cpu"
        self._num_bytes = 0
        self._of_connection: dict[int, int] = {}
        # The first call records what the rendezvous has sent already, which does not count.
        self.bytes_sent()
        self._num_bytes = 0

    def bytes_sent(self) -> int | None:
        """Payload and headers of all segments so far; None if the kernel does not report it, 0 for a single process."""
        if not self._sends:
            return 0
        if not self._counts:
            return None
        now = connections_sent()
        self._counts = bool(now)
        # Differences per connection, because connections come and go.
        before, self._of_connection = self._of_connection, now
        self._num_bytes += sum(sent - before.get(connection, 0) for connection, sent in now.items())
        return self._num_bytes if self._counts else None


def connections_sent() -> dict[int, int]:
    """Bytes that each TCP connection of this process has sent, by inode; empty where Linux is too old to count."""
    result = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=int(name))
            try:
                info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            finally:
                # The descriptor is its owner's: the garbage collector would close it with this object.
                borrowed.detach()
            (segments,) = struct.unpack_from("=I", info, SEGMENTS_OUT)
            (payload,) = struct.unpack_from("=Q", info, BYTES_SENT)
            result[status.st_ino] = payload + HEADER_BYTES * segments
        except (OSError, struct.error):  # closed meanwhile, not TCP, or an older kernel that reports less
            continue
    return result
