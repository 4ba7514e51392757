"""Keeps freed memory in the process while it trains.

glibc returns large blocks to the system as soon as they are freed and asks for them again in the next step; every page
is then faulted in and zeroed anew. Keeping them avoids that. Only where the C library is glibc; elsewhere, and on
accelerators (which have caching allocators), nothing changes.
"""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
"""Option numbers of mallopt(3), from glibc's malloc.h."""
_KEPT_BYTES = 2**30
_DEFAULTS = {_TRIM_THRESHOLD: 64 * 2**20, _TOP_PAD: 128 * 2**10, _MMAP_THRESHOLD: 32 * 2**20, _MMAP_MAX: 65536}
"""What glibc arrives at by itself in a process that frees large blocks (its dynamic thresholds at their maximum)."""


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Within the block up to 1 GiB of freed memory is kept and blocks of any size come from the heap. Yields whether
    that is in effect. On exit the process returns to glibc's defaults and releases unused memory.
    """
    if platform.libc_ver()[0] != "glibc":
        yield False
        return
    libc = ctypes.CDLL(None)
    _set(libc, {_MMAP_MAX: 0, _TRIM_THRESHOLD: _KEPT_BYTES, _TOP_PAD: 64 * 2**20})
    try:
        yield True
    finally:
        _set(libc, _DEFAULTS)
        libc.malloc_trim(0)


def give_back_freed_memory() -> None:
    """Release freed memory to the system now, as far as fragmentation allows."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _set(libc: ctypes.CDLL, options: dict[int, int]) -> None:
    for option, value in options.items():
        libc.mallopt(option, value)
