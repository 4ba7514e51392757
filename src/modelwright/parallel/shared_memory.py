"""Memory that all processes of a world on one host map: what one writes the others see. No locks.

Backed by a file in the host's memory that loses its name as soon as everybody has opened it, so nothing is left behind
however the processes end.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from modelwright.core.errors import ConfigError, writing
from modelwright.parallel.mesh import World

_ALIGNMENT = 64
"""Bytes of a cache line: no two tensors share one."""
_HOST_MEMORY = "/dev/shm"


def share(world: World, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors in shared memory, with the first process's values; the same shapes and formats on all of them.

    Raises `ConfigError` when the processes are not on one host or a tensor is not in host memory, `StorageError` when
    there is too little shared memory.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors):
        raise ConfigError("device: weights are shared in host memory; train on the CPU")
    sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    starts = [0, *accumulate(sizes)]
    with shared_file(world, max(1, starts[-1])) as path:
        whole = torch.from_file(path, shared=True, size=max(1, starts[-1]), dtype=torch.uint8)
        shared = []
        for tensor, start in zip(tensors, starts, strict=False):
            used = whole[start : start + tensor.numel() * tensor.element_size()]
            shared.append(used.view(tensor.dtype).view(tensor.shape))
        if world.is_first:
            for place, tensor in zip(shared, tensors, strict=True):
                place.copy_(tensor)
    return shared


@contextmanager
def shared_file(world: World, num_bytes: int) -> Iterator[str]:
    """A file of zeros under one name for all processes of one host; it loses its name at the end of the block."""
    path = ""
    if world.is_first:
        folder = _HOST_MEMORY if os.access(_HOST_MEMORY, os.W_OK) else tempfile.gettempdir()
        file, path = tempfile.mkstemp(prefix="modelwright-", dir=folder)
        try:
            with writing(path):
                os.posix_fallocate(file, 0, num_bytes)  # a full host memory shows here, not as a SIGBUS in a step
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(file)
    try:
        path = _same_on_all(world, path)
        yield path
        world.barrier()
    finally:
        if world.is_first:
            os.unlink(path)


def _same_on_all(world: World, path: str) -> str:
    if world.size == 1:
        return path
    paths = [path]
    dist.broadcast_object_list(paths, group_src=0, group=world.group)
    if any(world.maxima(not os.path.exists(paths[0]))):
        raise ConfigError("processes: all of them must be on one host to train on shared weights")
    return paths[0]
