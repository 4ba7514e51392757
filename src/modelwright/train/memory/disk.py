"""Offloads tensors to a file, concurrently with the computation, and reads them ahead of their use.

One thread writes in the order of arrival, one reads. Backward asks in roughly the reverse order, so fetching a tensor
prefetches the ones before it. A tensor that is requested before it was written stays in memory. The file is unlinked
at once, so nothing is left of it if the process is killed; its space is reused from step to step.
"""

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from modelwright.core.errors import ModelwrightError

MOST_QUEUED_BYTES = 8 * 2**20
"""Bytes still to be written, without the newest tensor, above which `put` waits."""
READ_AHEAD = 2
"""Tensors that are read before they are asked for."""
_PAGE = 4096
T = TypeVar("T")


class DiskStore:
    """A file in `folder`. written_bytes, read_bytes: so far. Raises `ModelwrightError` if the disk fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written_bytes = self.read_bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file, name = tempfile.mkstemp(prefix="offload-", dir=folder)
            os.unlink(name)
        except OSError as error:
            raise _failed(folder, error) from error
        weakref.finalize(self, os.close, self._file)
        self._writer = ThreadPoolExecutor(1, "offload-writer")
        self._reader = ThreadPoolExecutor(1, "offload-reader")
        self._queued: deque[_Waiting] = deque()
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self._number = 0
        self._waiting: weakref.WeakValueDictionary[int, _Waiting] = weakref.WeakValueDictionary()

    def put(self, piece: Tensor) -> Callable[[], Tensor]:
        """See `offload.Store`. Waits while more than `MOST_QUEUED_BYTES`, besides this tensor, are to be written."""
        # Only strides that a dense tensor has can be restored from bytes in storage order.
        dense = piece if torch.empty_like(piece, device="meta").stride() == piece.stride() else piece.contiguous()
        # A free slot of the same size, else the end of the file: sizes recur in every step.
        pages = max(1, -(-dense.nbytes // _PAGE))
        if self._free.get(pages):
            place = self._free[pages].pop()
        else:
            place = self._end
            self._end += pages * _PAGE
        waiting = _Waiting(self, dense, place, pages, self._number)
        self._waiting[self._number] = waiting
        self._number += 1
        waiting.written = self._writer.submit(self._write, dense, place)
        waiting.written.add_done_callback(partial(_let_go, weakref.ref(waiting)))
        queued = self._queued
        queued.append(waiting)
        while len(queued) > 1 and sum(o.num_bytes for o in queued if not o.written.done()) > MOST_QUEUED_BYTES:
            self._result(queued[0].written)
            queued.popleft()
        while queued and queued[0].written.done():
            self._result(queued.popleft().written)
        return partial(self.fetch, waiting)

    def fetch(self, waiting: "_Waiting") -> Tensor:
        """Fetch the tensor; starts reading those put shortly before it."""
        held = waiting.held
        reading = self._reading(waiting) if held is None else None
        # After its own reading has begun: the one thread reads in the order of submission.
        for number in range(waiting.number - 1, waiting.number - 1 - READ_AHEAD, -1):
            before = self._waiting.get(number)
            if before is not None and before.held is None:
                self._reading(before)
        if reading is None:
            assert held is not None
            return held
        waiting.reading = None
        return self._result(reading)

    def release(self, place: int, pages: int) -> None:
        """Free the space of a tensor that is no longer needed."""
        self._free.setdefault(pages, []).append(place)

    def _reading(self, waiting: "_Waiting") -> "Future[Tensor]":
        if waiting.reading is None:
            waiting.reading = self._reader.submit(self._read, waiting.like, waiting.device, waiting.place)
        return waiting.reading

    def _write(self, piece: Tensor, place: int) -> None:
        rest = _bytes(piece.cpu()).numpy().data
        self.written_bytes += len(rest)
        while rest:
            written = os.pwrite(self._file, rest, place)
            rest, place = rest[written:], place + written

    def _read(self, like: Tensor, device: torch.device, place: int) -> Tensor:
        result = torch.empty_like(like, device="cpu")
        rest = _bytes(result).numpy().data
        self.read_bytes += len(rest)
        while rest:
            read = os.preadv(self._file, [rest], place)
            if not read:
                raise OSError(f"{len(rest)} bytes are missing")
            rest, place = rest[read:], place + read
        return result.to(device)

    def _result(self, work: "Future[T]") -> T:
        try:
            return work.result()
        except OSError as error:
            raise _failed(self.folder, error) from error


class _Waiting:
    """A tensor in the file, or on its way there. held: the tensor until it is written."""

    def __init__(self, store: DiskStore, dense: Tensor, place: int, pages: int, number: int) -> None:
        self.held: Tensor | None = dense
        self.like = torch.empty_like(dense, device="meta")
        self.device = dense.device
        self.num_bytes = dense.nbytes
        self.place, self.pages = place, pages
        self.number = number
        self.written: Future[None] = Future()
        self.reading: Future[Tensor] | None = None
        self._store = store

    def __del__(self) -> None:
        self._store.release(self.place, self.pages)


def _failed(folder: Path, error: OSError) -> ModelwrightError:
    return ModelwrightError(
        f"activation_checkpointing.offload: the file in {folder} failed ({error}); make room there or choose "
        "another place with offload_dir"
    )


def _let_go(waiting: "weakref.ref[_Waiting]", written: Future[None]) -> None:
    """Release the tensor once it is written; if writing failed it stays available."""
    one = waiting()
    if one is not None and written.exception() is None:
        one.held = None


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes of its memory, in storage order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
