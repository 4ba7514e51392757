"""Offloads tensors saved for backward to host memory or to a file.

`torch.autograd.graph.save_on_cpu` would also move weights and their casts, which FSDP frees and gathers anyway, and
would move a tensor once for each operator that saves it. Here only activations move, each of them once, and tensors
that all blocks share stay.

Both stores move tensors beside the computation: the host's memory (`HostStore`) by a stream for copies, a file
(`DiskStore`) by one thread that writes in the order of arrival and one that reads. Backward asks in roughly the reverse
order, so fetching a tensor prefetches the ones before it. A tensor that is requested before it was written to the file
stays in memory. The file is unlinked at once, so nothing is left of it if the process is killed; its space is reused
from step to step.
"""

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.ops.dtensor import local
from modelwright.train.memory.activations import ActivationCheckpointingConfig

MIN_BYTES = 2**16
"""Smaller tensors stay: moving them costs more than their memory is worth."""


Fetch = Callable[[], Tensor]
"""Returns the tensor, on its original device; may be called more than once."""


class Store(Protocol):
    """Storage of offloaded tensors."""

    def put(self, piece: Tensor) -> Fetch:
        """Take a tensor, which may be freed as soon as this returns, and which nothing changes before it is fetched, as
        autograd demands of saved tensors; the tensor fetched later must not be modified.
        """
        ...


def check_tier(config: ActivationCheckpointingConfig, *, on_cpu: bool) -> None:
    """Raise `ConfigError` for offloading to host memory if the model is already there."""
    if config.offload == "host" and on_cpu:
        raise ConfigError(
            "offload: host moves activations to the host's memory, where they already are on a CPU run; "
            "disable it, use disk, or save memory with mode full, selective or budget"
        )


def open_store(config: ActivationCheckpointingConfig, *, device: torch.device, folder: Path) -> Store | None:
    """Returns the store for the tensors that blocks save, None if offloading is off. A file is in `folder`, unless the
    configuration names another one. Raises `ConfigError` like `check_tier`.
    """
    check_tier(config, on_cpu=device.type == "cpu")
    if config.offload == "disk":
        return DiskStore(Path(config.offload_dir) if config.offload_dir else folder)
    return HostStore(device) if config.offload == "host" else None


def offloading(modules: Sequence[nn.Module], shared: Iterable[Tensor], store: Store) -> AbstractContextManager[Any]:
    """Within the block, tensors that autograd saves go to the store, except weights and those in `shared`."""
    staying = {_storage(tensor) for tensor in shared}
    gone: dict[tuple[Any, ...], tuple[_Away, weakref.ref[Any]]] = {}

    def pack(tensor: Tensor) -> Any:
        # A weight is recognized by its shape, because gathered weights have their own storage.
        shapes = {shape for module in modules for p in module.parameters() for shape in (p.shape, p.shape[::-1])}
        piece = local(tensor).detach()
        if tensor.shape in shapes or _storage(tensor) in staying or piece.nbytes < MIN_BYTES:
            return tensor
        # The version tells values apart that an operator has changed in place between two savings.
        key = (_storage(tensor), piece.storage_offset(), piece.shape, piece.stride(), tensor._version)
        if key not in gone:
            # Once its memory is free another tensor may get the same address.
            watch = weakref.ref(piece.untyped_storage(), lambda _: gone.pop(key, None))
            gone[key] = _Away(store.put(piece)), watch
        away = gone[key][0]
        away.uses += 1
        is_laid_out = isinstance(tensor, DTensor)
        return away, (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()) if is_laid_out else ()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        away, layout = packed
        piece = away.fetch() if away.here is None else away.here
        away.uses -= 1
        away.here = piece if away.uses > 0 else None
        if not layout:
            return piece
        mesh, placements, shape, stride = layout
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)

    return saved_tensors_hooks(pack, unpack)


@dataclass
class _Away:
    """An offloaded tensor. uses: number of uses to come; here: the tensor, from its fetch until the last use."""

    fetch: Fetch
    uses: int = 0
    here: Tensor | None = None


def _storage(tensor: Tensor) -> int:
    return local(tensor).untyped_storage()._cdata


MOST_QUEUED_BYTES = 8 * 2**20
"""Bytes still to be written, without the newest tensor, above which `put` waits."""


READ_AHEAD = 2
"""Tensors that are read before they are asked for."""


_PAGE = 4096


T = TypeVar("T")


class CopyStream:
    """Copies between a device and the host beside the device's computation. On a CPU a copy is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)  # `torch.cpu` has the same names, which do nothing
        self._stream = self._module.Stream(device)

    def start(self, target: Tensor, source: Tensor) -> None:
        """Starts a copy after what the computation has been given so far. Until the computation waits for its end, the
        source may neither change nor be freed.
        """
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        if target.is_cuda:
            target.record_stream(self._stream)  # it may be freed unused, and its memory must not be given away at once

    def end(self) -> Any:
        """Returns the event after all copies so far, and after what the computation has been given so far."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        event = self._module.Event()
        event.record(self._stream)
        return event

    def wait(self, end: Any) -> None:
        """Lets what the computation is given from now on wait for such an event; the host does not wait."""
        self._module.current_stream(self._device).wait_event(end)


class HostStore:
    """Host memory, pinned if the device is CUDA, where PyTorch keeps freed pages for the next tensor."""

    def __init__(self, device: torch.device) -> None:
        self._copies = CopyStream(device)
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        """Tensors on their way to the host, with the ends of their copies."""
        self._number = 0
        self._known: weakref.WeakValueDictionary[int, _OnHost] = weakref.WeakValueDictionary()

    def put(self, piece: Tensor) -> Fetch:
        """See `Store`. The computation waits while more than `MOST_QUEUED_BYTES`, besides this tensor, are leaving."""
        while sum(leaving.nbytes for leaving, _ in self._leaving) > MOST_QUEUED_BYTES:
            # A tensor that is freed behind the computation's wait is overwritten after its copy.
            self._copies.wait(self._leaving[0][1])
            self._leaving.popleft()
        host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.is_cuda)
        self._copies.start(host, piece)
        self._leaving.append((piece, self._copies.end()))
        one = _OnHost(host, piece.device, self._number)
        self._known[self._number] = one
        self._number += 1
        return partial(self.fetch, one)

    def fetch(self, one: "_OnHost") -> Tensor:
        """Fetch the tensor; starts reading those put shortly before it."""
        while self._leaving:
            self._copies.wait(self._leaving[0][1])
            self._leaving.popleft()
        for number in range(one.number, one.number - 1 - READ_AHEAD, -1):
            near = self._known.get(number)
            if near is not None and near.arriving is None and (near is one or not near.was_fetched):
                here = torch.empty(near.host.shape, dtype=near.host.dtype, device=near.device)
                self._copies.start(here, near.host)
                near.arriving = here, self._copies.end()
        assert one.arriving is not None
        (here, end), one.arriving, one.was_fetched = one.arriving, None, True
        self._copies.wait(end)
        return here


@dataclass(eq=False)
class _OnHost:
    """A tensor in the host's memory. arriving: it on its device, and the end of the copy, from its reading on."""

    host: Tensor
    device: torch.device
    number: int
    arriving: tuple[Tensor, Any] | None = None
    was_fetched: bool = False


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
        self.free: dict[int, list[int]] = {}
        """Places that tensors of so many pages have left."""
        self._end = 0
        self._number = 0
        self._waiting: weakref.WeakValueDictionary[int, _Waiting] = weakref.WeakValueDictionary()

    def put(self, piece: Tensor) -> Callable[[], Tensor]:
        """See `Store`. Waits while more than `MOST_QUEUED_BYTES`, besides this tensor, are to be written."""
        # Only strides that a dense tensor has can be restored from bytes in storage order.
        dense = piece if torch.empty_like(piece, device="meta").stride() == piece.stride() else piece.contiguous()
        # A free slot of the same size, else the end of the file: sizes recur in every step.
        pages = max(1, -(-dense.nbytes // _PAGE))
        if self.free.get(pages):
            place = self.free[pages].pop()
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
        self._store.free.setdefault(self.pages, []).append(self.place)


def _failed(folder: Path, error: OSError) -> ModelwrightError:
    return ModelwrightError(
        f"activation_checkpointing.offload: the file in {folder} failed ({error}); make room there, or put the run "
        "on another disk with --run-dir"
    )


def _let_go(waiting: "weakref.ref[_Waiting]", written: Future[None]) -> None:
    """Release the tensor once it is written; if writing failed it stays available."""
    one = waiting()
    if one is not None and written.exception() is None:
        one.held = None


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes of its memory, in storage order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(eq=False, kw_only=True)
class Nowhere:
    """Keeps only shapes and returns zeros, for tracing a step without real storage. queued_bytes, read_ahead: imitate
    the stores, whose queue is assumed to be as full as allowed; it empties in backward.
    """

    queued_bytes: int = 0
    read_ahead: int = 0
    _queued: "deque[_Shape]" = field(default_factory=lambda: deque[_Shape]())
    _number: int = 0
    _known: "weakref.WeakValueDictionary[int, _Shape]" = field(
        default_factory=lambda: weakref.WeakValueDictionary[int, _Shape]()
    )

    def put(self, piece: Tensor) -> Fetch:
        shape, number = _Shape(piece), self._number
        self._known[number] = shape
        self._number += 1
        self._queued.append(shape)
        newest = 1 if self.queued_bytes else 0
        while len(self._queued) > newest and sum(one.num_bytes for one in self._queued) > self.queued_bytes:
            self._queued.popleft().piece = None

        def fetch() -> Tensor:
            for near in range(number, number - 1 - self.read_ahead, -1):
                known = self._known.get(near)
                if known is not None and known.piece is None:
                    known.piece = known.empty.new_zeros(known.shape)
            if self._queued:
                self._queued.popleft()
            result, shape.piece = shape.piece, None
            assert result is not None
            return result

        return fetch


class _Shape:
    """A tensor that may be offloaded."""

    def __init__(self, piece: Tensor) -> None:
        self.piece: Tensor | None = piece
        self.num_bytes = piece.nbytes
        self.shape, self.empty = piece.shape, piece.new_empty(0)
