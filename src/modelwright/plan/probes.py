"""Micro-measurements of what surrounds the processor: memory, disk, the loopback network, and gloo over it."""

import datetime
import mmap
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.cuda.nccl import version as nccl_version

from modelwright.ops.microbenchmark import repeated, seconds_of

BLOCK_BYTES = 4096
DISK_BYTES = 32 * 2**20
MEMORY_BYTES = 128 * 2**20
"""Several times the last-level cache of one core's share."""
MESSAGE_BYTES = 16 * 2**20
NUM_FSYNCS = 15
NUM_READS = 200
NUM_PINGS = 200
GLOO_TIMEOUT = datetime.timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Rates and latencies of this machine; 0 where something cannot be measured here."""

    memory_bytes_per_s: float
    """Bytes read and written by a copy, with PyTorch's threads."""
    fsync_s: float
    """Median time until a 4 KiB write is on disk."""
    disk_write_bytes_per_s: float
    """Rate of a sequential write, until it is on disk."""
    disk_read_iops: float
    """Random 4 KiB reads past the page cache, one after the other."""
    loopback_s: float
    """Half of a round trip over TCP."""
    loopback_bytes_per_s: float
    gloo_s: float
    """An all-reduce of one number between two ranks on this host."""
    gloo_bytes_per_s: float
    """Bytes of a large all-reduce between two ranks over its time: of the tensor, not of the link."""
    accelerator: str
    """Name, CUDA and NCCL versions; "" without one."""


def probe(folder: Path) -> Probes:
    """Measure everything in a few seconds. folder: on the disk that runs are written to; made if it is missing."""
    fsync_s, write_rate, iops = _disk(folder)
    loopback_s, loopback_rate = _loopback()
    gloo_s, gloo_rate = _gloo()
    return Probes(
        memory_bytes_per_s=_memory_rate(),
        fsync_s=fsync_s,
        disk_write_bytes_per_s=write_rate,
        disk_read_iops=iops,
        loopback_s=loopback_s,
        loopback_bytes_per_s=loopback_rate,
        gloo_s=gloo_s,
        gloo_bytes_per_s=gloo_rate,
        accelerator=_accelerator(),
    )


def probe_lines(probes: Probes) -> list[str]:
    """The figures as text."""
    values = asdict(probes)
    rate = {
        name: f"{value / 1e9:.2f} GB/s" if value else "-" for name, value in values.items() if name.endswith("_per_s")
    }
    micro = {
        name: f"{1e6 * value:,.0f} us" for name, value in values.items() if name.endswith("_s") and name not in rate
    }
    iops = f"{probes.disk_read_iops:,.0f} reads/s of 4 KiB" if probes.disk_read_iops else "reads not measurable here"
    return [
        f"memory      {rate['memory_bytes_per_s']} of a copy",
        f"disk        fsync {micro['fsync_s']}, writes {rate['disk_write_bytes_per_s']}, {iops}",
        f"loopback    {micro['loopback_s']} one way, {rate['loopback_bytes_per_s']}",
        f"gloo        {micro['gloo_s']} for an all-reduce, {rate['gloo_bytes_per_s']} (two ranks here)",
        *([f"accelerator {probes.accelerator}"] if probes.accelerator else []),
    ]


def _memory_rate() -> float:
    source = torch.ones(MEMORY_BYTES // 4)
    target = torch.empty_like(source)
    best_s = min(repeated(lambda: seconds_of(lambda: target.copy_(source), "cpu"), num_rounds=4, num_warmups=1))
    return 2 * MEMORY_BYTES / best_s


def _disk(folder: Path) -> tuple[float, float, float]:
    """Median time of an fsync, rate of sequential writes, random reads per second."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "probe"
        block = os.urandom(BLOCK_BYTES)
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            fsync_s = statistics.median(_seconds(lambda: _write_through(file, block)) for _ in range(NUM_FSYNCS))
            content = os.urandom(2**20) * (DISK_BYTES // 2**20)
            write_s = _seconds(lambda: _write_through(file, content))
        finally:
            os.close(file)
        return fsync_s, DISK_BYTES / write_s, _read_iops(path)


def _write_through(file: int, content: bytes) -> None:
    os.lseek(file, 0, os.SEEK_SET)
    written = 0
    while written < len(content):
        written += os.write(file, content[written:])
    os.fsync(file)


def _read_iops(path: Path) -> float:
    """Reads that the page cache cannot answer; 0 where the file system does not offer them."""
    if not hasattr(os, "O_DIRECT"):
        return 0.0
    draw = random.Random(0)
    offsets = [draw.randrange(DISK_BYTES // BLOCK_BYTES) * BLOCK_BYTES for _ in range(NUM_READS)]
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return 0.0
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:
            seconds = _seconds(lambda: [os.preadv(file, [buffer], offset) for offset in offsets])
        return NUM_READS / seconds
    except OSError:
        return 0.0
    finally:
        os.close(file)


def _loopback() -> tuple[float, float]:
    """Seconds one way, and bytes per second."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        other, _ = server.accept()
        with other:
            for end in (client, other):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            echo = threading.Thread(target=_answer, args=(other,), daemon=True)
            echo.start()
            trips = [_seconds(lambda: _exchange(client, b"x")) for _ in range(NUM_PINGS)]
            message = bytes(MESSAGE_BYTES)
            took_s = min(_seconds(lambda: _exchange(client, message)) for _ in range(3))
            client.shutdown(socket.SHUT_WR)
            echo.join()
    return statistics.median(trips) / 2, MESSAGE_BYTES / took_s


def _exchange(connection: socket.socket, message: bytes) -> None:
    """Send a message with its length, and wait for one byte."""
    connection.sendall(len(message).to_bytes(8, "big"))
    connection.sendall(message)
    connection.recv(1)


def _answer(connection: socket.socket) -> None:
    """Answer every message with a byte until the other end closes."""
    buffer = bytearray(2**20)
    while length := _receive(connection, bytearray(8)):
        left = int.from_bytes(length, "big")
        while left > 0:
            left -= connection.recv_into(buffer, min(left, len(buffer)))
        connection.sendall(b"y")


def _receive(connection: socket.socket, into: bytearray) -> bytes:
    view, filled = memoryview(into), 0
    while filled < len(into):
        received = connection.recv_into(view[filled:])
        if not received:
            return b""
        filled += received
    return bytes(into)


def _gloo() -> tuple[float, float]:
    """Seconds of a small all-reduce, and bytes per second of a large one, between two ranks that are threads here."""
    store = HashStore()
    results: list[tuple[float, float]] = []
    other = threading.Thread(target=lambda: _gloo_rank(store, 1), daemon=True)
    other.start()
    results.append(_gloo_rank(store, 0))
    other.join()
    return results[0]


def _gloo_rank(store: Store, rank: int) -> tuple[float, float]:
    group: Any = dist.ProcessGroupGloo(store, rank, 2, GLOO_TIMEOUT)
    small, large = torch.zeros(1), torch.zeros(MESSAGE_BYTES // 4)
    latencies = [_seconds(lambda: group.allreduce([small]).wait()) for _ in range(NUM_PINGS)]
    took = [_seconds(lambda: group.allreduce([large]).wait()) for _ in range(3)]
    return statistics.median(latencies), MESSAGE_BYTES / min(took)


def _accelerator() -> str:
    if not torch.cuda.is_available():
        return ""
    nccl = ".".join(map(str, nccl_version())) if dist.is_nccl_available() else "none"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, NCCL {nccl}"


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
