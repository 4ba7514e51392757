"""What is kept for backward waits in the host's memory.

`torch.autograd.graph.save_on_cpu` would move weights and their casts too, which FSDP frees and gathers by itself: here
only activations go, and what all blocks share stays. Copies run in the order of the device's stream through pinned
memory; they are not overlapped with compute.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from modelwright.ops.pieces import local

MIN_BYTES = 2**16
"""Smaller tensors stay: copying them costs more than their memory is worth."""


def offloading(modules: Sequence[nn.Module], shared: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Within the block what autograd saves goes to the host, but not the weights nor the tensors in `shared`.

    A weight, or its cast to another format, is known by its shape.
    """
    staying = {_pointer(tensor) for tensor in shared}

    def pack(tensor: Tensor) -> Any:
        shapes = {shape for module in modules for p in module.parameters() for shape in (p.shape, p.shape[::-1])}
        stays = tensor.shape in shapes or _pointer(tensor) in staying or local(tensor).nbytes < MIN_BYTES
        return tensor if stays else to_host(tensor)

    return saved_tensors_hooks(pack, lambda packed: packed if isinstance(packed, Tensor) else from_host(*packed))


def to_host(tensor: Tensor) -> tuple[Tensor, torch.device, tuple[Any, ...]]:
    """The values in the host's memory, the device they came from, and the layout of a DTensor (empty for others)."""
    piece = local(tensor)
    host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.device.type == "cuda")
    host.copy_(piece, non_blocking=True)
    layout = ()
    if isinstance(tensor, DTensor):
        layout = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
    return host, piece.device, layout


def from_host(host: Tensor, device: torch.device, layout: tuple[Any, ...]) -> Tensor:
    """The tensor that `to_host` took apart."""
    piece = host.to(device, non_blocking=True)
    if not layout:
        return piece
    mesh, placements, shape, stride = layout
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


def _pointer(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
