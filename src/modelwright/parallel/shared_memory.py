"""Memory that all processes of one host map: writes by one are visible to all, without locks.

It is backed by a file in the host's memory whose name is removed once every process has opened it, so the memory is
freed even if the processes are killed.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from modelwright.core.errors import ConfigError, ModelwrightError, StorageError, writing
from modelwright.parallel.mesh import World

_ALIGNMENT = 64
"""Bytes of a cache line: no two tensors share one."""
_HOST_MEMORY = "/dev/shm"
_SPARE_BYTES = 64 * 2**20
"""Bytes left for others: checkpoints kept in memory, data loaders, other runs."""


def share(world: World, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors in shared memory with the first process's values; shapes and dtypes are the same on all
    processes. Raises `ConfigError` if the processes are not on one host or a tensor is not in host memory,
    `StorageError` if there is too little shared memory.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors):
        raise ConfigError("device: sharing weights in host memory requires the CPU")
    shared = shared_zeros(world, tensors)
    if world.is_first:
        for place, tensor in zip(shared, tensors, strict=True):
            place.copy_(tensor)
    # Nobody reads before the first process has written.
    world.barrier()
    return shared


def shared_zeros(world: World, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns zeros in shared memory in the shapes and dtypes of `tensors`, which are not read. Raises like `share`."""
    sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    starts = [0, *accumulate(sizes)]
    with shared_file(world, max(1, starts[-1])) as path:
        whole = torch.from_file(path, shared=True, size=max(1, starts[-1]), dtype=torch.uint8)
        shared = []
        for tensor, start in zip(tensors, starts, strict=False):
            used = whole[start : start + tensor.numel() * tensor.element_size()]
            shared.append(used.view(tensor.dtype).view(tensor.shape))
    return shared


def has_room(world: World, num_bytes: int) -> bool:
    """Returns whether all processes are on one host with that much shared memory left. Collective."""
    try:
        with shared_file(world, 1):
            folder = _folder()
            free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    except ModelwrightError:
        return False
    return world.maxima(free < num_bytes + _SPARE_BYTES)[0] == 0


@contextmanager
def shared_file(world: World, num_bytes: int) -> Iterator[str]:
    """Makes a zero-filled file under one name for all processes of one host; its name is removed at the end of the
    block. A failure on the first process is raised on all of them.
    """
    path, problem = "", ""
    if world.is_first:
        try:
            path = _make_file(num_bytes)
        except StorageError as error:
            problem = str(error)
    try:
        path, problem = world.gather_json((path, problem))[0]
        if problem:
            raise StorageError(problem)
        if any(world.maxima(not os.path.exists(path))):
            raise ConfigError("processes: all of them must be on one host to train on shared weights")
        yield path
        # All processes have opened the file before its name goes.
        world.barrier()
    finally:
        if world.is_first and path:
            os.unlink(path)


def _folder() -> str:
    return _HOST_MEMORY if os.access(_HOST_MEMORY, os.W_OK) else tempfile.gettempdir()


def _make_file(num_bytes: int) -> str:
    file, path = tempfile.mkstemp(prefix="modelwright-", dir=_folder())
    try:
        with writing(path):
            # A sparse file would end the run by SIGBUS in a step, when the host's memory is full.
            os.posix_fallocate(file, 0, num_bytes)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return path
