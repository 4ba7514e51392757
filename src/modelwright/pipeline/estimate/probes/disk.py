"""Rates of the disk under a folder: sequential writes that reach it, reads past the page cache, fsync.

The file is unlinked once it is open, so that nothing remains on the disk, whatever ends the process.
"""

import contextlib
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from modelwright.pipeline.estimate.probes.probe import (
    Probe,
    ProbeResult,
    ProbeSetting,
    ProbeUnavailable,
    rate_text,
    time_text,
)

BLOCK_BYTES = 4096
CHUNK_BYTES = 2**20
CHUNKS_PER_FSYNC = 8
"""Chunks between two fsyncs: a slow disk then delays the probe by 8 MiB, not by all that the page cache holds."""
LARGEST_FILE_BYTES = 256 * 2**20
ROOM_SHARE = 0.25
"""Largest share of the free space for the file."""
MOST_FSYNCS = 200
MOST_READS = 20_000
PERCENTILES = (50, 95, 99)
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
MOUNTS = Path("/proc/mounts")


@dataclass(frozen=True)
class _OpenFile:
    """writer: a descriptor through the page cache; reader: one that bypasses it, or else the writer."""

    writer: int
    reader: int

    @property
    def is_direct(self) -> bool:
        return self.reader != self.writer


def file_system(folder: Path, mounts: Path = MOUNTS) -> str:
    """Returns the type of the file system of a folder, "" if the system does not tell it."""
    target, best, kind = str(folder.resolve()), "", ""
    with contextlib.suppress(OSError):
        for line in mounts.read_text(encoding="utf-8").splitlines():
            _, where, what, *_ = line.split()
            is_above = target == where or target.startswith(where.rstrip("/") + "/")
            if is_above and len(where) >= len(best):
                best, kind = where, what
    return kind


def _measure(setting: ProbeSetting) -> ProbeResult:
    free = os.statvfs(setting.folder)
    size = min(LARGEST_FILE_BYTES, int(ROOM_SHARE * free.f_bavail * free.f_frsize)) // CHUNK_BYTES * CHUNK_BYTES
    if size < CHUNKS_PER_FSYNC * CHUNK_BYTES:
        raise ProbeUnavailable(f"{setting.folder} has less than {CHUNKS_PER_FSYNC * 4} MiB of free space")
    part_s = setting.budget_s / 4
    with _unlinked_file(setting.folder) as file, mmap.mmap(-1, CHUNK_BYTES) as buffer:
        block = os.urandom(BLOCK_BYTES)
        fsyncs = _timed(lambda: (os.pwrite(file.writer, block, 0), os.fsync(file.writer)), part_s, most=MOST_FSYNCS)
        chunk, written, start = os.urandom(CHUNK_BYTES), 0, time.perf_counter()  # random: a disk may compress zeros
        while written < size and (written == 0 or time.perf_counter() - start < part_s):
            for _ in range(CHUNKS_PER_FSYNC):
                if os.pwrite(file.writer, chunk, written) < CHUNK_BYTES:
                    raise ProbeUnavailable("the disk is full")
                written += CHUNK_BYTES
            os.fsync(file.writer)
        write_s = time.perf_counter() - start
        figures = {f"fsync_p{percent}_s": float(np.percentile(fsyncs, percent)) for percent in PERCENTILES}
        figures |= {"num_fsyncs": float(len(fsyncs)), "write_bytes_per_s": written / write_s}
        avoids_cache = file.is_direct or hasattr(os, "posix_fadvise")
        if avoids_cache:
            _forget(file, 0, written)
            start, num_chunks = time.perf_counter(), 0
            for offset in range(0, written, CHUNK_BYTES):
                _read(file.reader, [buffer], offset, CHUNK_BYTES)
                num_chunks += 1
                if time.perf_counter() - start > part_s:
                    break
            figures["read_bytes_per_s"] = num_chunks * CHUNK_BYTES / (time.perf_counter() - start)
            # Reads of 4 KiB, one after the other.
            _forget(file, 0, written)
            draw = random.Random(0)
            # Through the page cache, few enough reads that hardly any block is read twice, the second time from memory.
            most = MOST_READS if file.is_direct else written // BLOCK_BYTES // 8
            with memoryview(buffer)[:BLOCK_BYTES] as target:
                times = _timed(
                    lambda: _read(
                        file.reader, [target], draw.randrange(written // BLOCK_BYTES) * BLOCK_BYTES, BLOCK_BYTES
                    ),
                    part_s,
                    most=most,
                )
            figures["reads_per_s"] = len(times) / sum(times)
    how = "O_DIRECT" if file.is_direct else "cache dropped by advice" if avoids_cache else "not measurable here"
    facts = {"reads": how, "file_system": file_system(setting.folder)}
    return ProbeResult(state="measured", figures=figures, facts=facts)


@contextlib.contextmanager
def _unlinked_file(folder: Path) -> Iterator[_OpenFile]:
    writer, path = tempfile.mkstemp(dir=folder, prefix=".modelwright-probe-")
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, writer)
        reader = writer
        try:
            if hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):  # not every file system offers it
                    reader = os.open(path, os.O_RDONLY | os.O_DIRECT)
                    stack.callback(os.close, reader)
        finally:
            os.unlink(path)
        yield _OpenFile(writer, reader)


def _forget(file: _OpenFile, offset: int, length: int) -> None:
    """Makes the page cache drop the written data, for reads that go through it."""
    if not file.is_direct:
        os.posix_fadvise(file.reader, offset, length, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.reader, offset, length, os.POSIX_FADV_RANDOM)  # no reading ahead


def _read(file: int, buffers: list, offset: int, length: int) -> None:
    if os.preadv(file, buffers, offset) < length:
        raise ProbeUnavailable("the disk returned less than was written")


def _timed(call: Callable[[], object], budget_s: float, *, most: int) -> list[float]:
    """Returns the seconds of each call, at least one, until the budget or the number is spent."""
    times, deadline = list[float](), time.perf_counter() + budget_s
    while not times or (len(times) < most and time.perf_counter() < deadline):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _text(result: ProbeResult) -> str:
    iops = result.figures.get("reads_per_s")
    reads = f"{iops:,.0f} random reads/s of 4 KiB" if iops else "no reads past the cache"
    kind = result.facts["file_system"]
    note = f"; {kind} is memory, not a disk" if kind in MEMORY_FILE_SYSTEMS else ""
    fsync = ", ".join(f"p{percent} {time_text(result, f'fsync_p{percent}_s')}" for percent in PERCENTILES)
    return (
        f"writes {rate_text(result, 'write_bytes_per_s')}, reads {rate_text(result, 'read_bytes_per_s')}, {reads} "
        f"({result.facts['reads']}, {kind or 'unknown file system'}{note}); fsync {fsync}"
    )


DISK = Probe(name="disk", budget_s=5.0, measure=_measure, text=_text)
