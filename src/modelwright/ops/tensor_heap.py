"""A separate heap for PyTorch's larger tensors on the CPU (`tensor_heap.cpp`), built on first use.

In glibc's heap the resident memory of a training grows to two or three times the living tensors: small objects pin the
pages between large blocks that have been freed. Results are the same to the bit with either. Each version of PyTorch,
of the source and of the compiler has its own shared library; the build needs a C++ compiler (`CXX`, else `g++`) and the
headers that PyTorch ships. Without it glibc maps each larger block separately and returns it at once, which needs as
little memory but takes page faults.
"""

import ctypes
import functools
import gc
import logging
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.ops.cpp_build import cache_folder, compiled

log = logging.getLogger("modelwright.train.memory")
SOURCE = Path(__file__).with_name("tensor_heap.cpp")
SWITCH = "MODELWRIGHT_TENSOR_HEAP"
"""Environment variable: `1`, the heap wherever it can be built (the default); `0`, glibc's instead."""
LEAST_BYTES = 2**16
"""Size below which tensors stay in glibc's heap: they are most of the number and next to nothing of the bytes."""
_MMAP_THRESHOLD = -3
"""Option number of mallopt(3), from glibc's malloc.h."""
MAPPED_BYTES = 4 * 2**20
"""Without the heap, size from which glibc maps blocks separately. BF16 pretraining of the quickstart then held 791 MiB
(740 with the heap, 1,582 with neither) and took 8% longer."""


@dataclass(frozen=True, kw_only=True)
class HeapFigures:
    """Sizes of the heap. living_bytes: of tensors now; peak_bytes: their maximum since the last reset; mapped_bytes: of
    the heap's address range, which bound its resident memory.
    """

    living_bytes: int
    peak_bytes: int
    mapped_bytes: int


def use_tensor_heap() -> bool:
    """Allocate larger tensors of this process in the heap from now on; returns false where that is impossible, for the
    reason in the log. Raises `ConfigError` for an unknown value of `SWITCH`.
    """
    return _library() is not None


def give_back_memory() -> None:
    """Return unused memory to the system, between pieces of work."""
    gc.collect()  # first, because reference cycles may hold tensors
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if _library.cache_info().currsize and (heap := _library()) and (error := heap.heap_give_back()):
        raise OSError(error, "the tensor heap's memory")
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def heap_figures(*, reset_peak: bool = False) -> HeapFigures | None:
    """Returns the present sizes of the heap; None without a heap."""
    heap = _library()
    if heap is None:
        return None
    numbers = (ctypes.c_int64 * 3)()
    heap.heap_figures(numbers)
    if reset_peak:
        heap.heap_reset_peak()
    return HeapFigures(living_bytes=numbers[0], peak_bytes=numbers[1], mapped_bytes=numbers[2])


def built(folder: Path) -> Path:
    """The library in `folder`, compiled if missing. Raises `ModelwrightError` if it cannot be."""
    torch_folder = Path(torch.__file__).parent
    options = [
        # PyTorch's headers require C++20 from 2.12 on
        *("-std=c++20", "-O2", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"),
        *(f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"),
    ]
    way_out = f"set {SWITCH}=0 to do without, or"
    return compiled(SOURCE, options, folder=folder, way_out=way_out, known=torch.__version__)


@functools.cache
def _library() -> ctypes.PyDLL | None:
    """The library, installed as PyTorch's allocator for the life of the process; None without it. Tried once."""
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise ConfigError(f"{SWITCH}: must be 0 or 1, got {switch!r}; leave it out for 1")
    if switch == "1" and sys.platform == "linux":
        try:
            library = ctypes.PyDLL(str(built(cache_folder())))
            library.heap_install.argtypes = [ctypes.c_int64]
            if library.heap_install(LEAST_BYTES):
                text = f"is off, because another library has replaced PyTorch's allocator; set {SWITCH}=0"
                raise ModelwrightError(text)
            return library
        except (ModelwrightError, OSError) as error:
            log.warning("the heap for tensors %s. glibc's heap serves them, with more page faults.", error)
    # A threshold that the user has set in the environment is respected.
    if platform.libc_ver()[0] == "glibc" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
    return None
