"""Offloads tensors saved for backward to host memory or to a file.

`torch.autograd.graph.save_on_cpu` would also move weights and their casts, which FSDP frees and gathers anyway, and
would move a tensor once for each operator that saves it. Here only activations move, each of them once, and tensors
that all blocks share stay. Copies to the host run in the order of the device's stream through pinned memory; a file is
written and read by its own threads (`disk.py`).
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from modelwright.core.errors import ConfigError
from modelwright.ops.dtensor import local
from modelwright.train.memory.config import ActivationCheckpointingConfig
from modelwright.train.memory.disk import DiskStore

MIN_BYTES = 2**16
"""Smaller tensors stay: moving them costs more than their memory is worth."""

Fetch = Callable[[], Tensor]
"""Returns the tensor, on its original device; may be called more than once."""


class Store(Protocol):
    """Storage of offloaded tensors."""

    def put(self, piece: Tensor) -> Fetch:
        """Take a tensor, which may be freed as soon as this returns; the tensor fetched later must not be modified."""
        ...


class HostStore:
    """Host memory, pinned if the device is CUDA."""

    def put(self, piece: Tensor) -> Fetch:
        device = piece.device
        host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=device.type == "cuda")
        host.copy_(piece, non_blocking=True)
        return lambda: host.to(device, non_blocking=True)


@dataclass(eq=False, kw_only=True)
class Nowhere:
    """Keeps only shapes and returns zeros, for tracing a step without real storage. queued_bytes, read_ahead: imitate a
    file (`disk.py`), whose queue is assumed to be as full as allowed; it empties in backward.
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
                if near in self._known:
                    self._known[near].read()
            if self._queued:
                self._queued.popleft()
            return shape.take()

        return fetch


class _Shape:
    """A tensor that may be offloaded."""

    def __init__(self, piece: Tensor) -> None:
        self.piece: Tensor | None = piece
        self.num_bytes = piece.nbytes
        self._shape, self._empty = piece.shape, piece.new_empty(0)

    def read(self) -> None:
        self.piece = self._empty.new_zeros(self._shape) if self.piece is None else self.piece

    def take(self) -> Tensor:
        result, self.piece = self.piece, None
        assert result is not None
        return result


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
    return HostStore() if config.offload == "host" else None


@dataclass
class _Away:
    """An offloaded tensor. uses: number of uses to come; here: the tensor, from its fetch until the last use."""

    fetch: Fetch
    uses: int = 0
    here: Tensor | None = None

    def take(self) -> Tensor:
        piece = self.fetch() if self.here is None else self.here
        self.uses -= 1
        self.here = piece if self.uses > 0 else None
        return piece


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
        piece = away.take()
        if not layout:
            return piece
        mesh, placements, shape, stride = layout
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)

    return saved_tensors_hooks(pack, unpack)


def _storage(tensor: Tensor) -> int:
    return local(tensor).untyped_storage()._cdata
