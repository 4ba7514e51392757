"""Builds the arena's allocator on first use, caches it in the user's cache folder, and installs it in PyTorch.

There is one shared library for each version of PyTorch, of the source and of the compiler. Needs a C++ compiler (`CXX`,
else `g++`) and the headers that PyTorch ships. `step_arena.cpp` documents the allocator itself.
"""

import ctypes
import functools
import sys
from pathlib import Path

import torch

from modelwright.core.cpp_build import cache_folder, cannot_be_built, compiled, has_compiler, library
from modelwright.core.errors import ConfigError, ModelwrightError

SOURCE = Path(__file__).with_name("arena_allocator.cpp")
_ALLOCATOR, _WAY_OUT = "step_arena: its allocator", "set step_arena to false, or"


def check_machine(*, on_cpu: bool) -> None:
    """Raises `ConfigError` if an arena is impossible here, as far as that shows without building it."""
    if not on_cpu:
        raise ConfigError(
            "step_arena: is for CPUs only; accelerators' allocators cache memory themselves; set it to false"
        )
    if sys.platform != "linux":
        raise ConfigError(f"step_arena: requires Linux, not {sys.platform}; set it to false")
    result = library(SOURCE, _options(), folder=cache_folder(), known=torch.__version__)
    if not result.exists() and not has_compiler():
        raise ConfigError(f"{_ALLOCATOR} {cannot_be_built('program not found', _WAY_OUT)}")


@functools.cache
def allocator() -> ctypes.PyDLL:
    """The library, installed as PyTorch's allocator; it passes everything through until told otherwise. Raises
    `ConfigError` if it cannot be built or another allocator is installed.
    """
    made = ctypes.PyDLL(str(built(cache_folder())))
    numbers = ctypes.POINTER(ctypes.c_int64)
    for name, result, arguments in (
        ("install", ctypes.c_int, []),
        ("begin", None, [ctypes.c_int64, ctypes.c_int64]),
        ("end", None, []),
        ("plan", ctypes.c_int, [ctypes.c_int64, numbers, numbers, numbers, ctypes.c_int64]),
        ("drop", None, []),
        ("give_back", ctypes.c_int, []),
        ("num_recorded", ctypes.c_int64, []),
        ("time", ctypes.c_int64, []),
        ("copy_recorded", None, [numbers]),
        ("figures", None, [numbers]),
        ("living_bytes", ctypes.c_int64, []),
    ):
        function = getattr(made, f"arena_{name}")
        function.restype, function.argtypes = result, arguments
    if made.arena_install():
        raise ConfigError(f"step_arena: another library has replaced PyTorch's allocator; {_WAY_OUT} leave that out")
    return made


def built(folder: Path) -> Path:
    """The library in `folder`, compiled if missing. Raises `ConfigError` if it cannot be."""
    try:
        return compiled(SOURCE, _options(), folder=folder, way_out=_WAY_OUT, known=torch.__version__)
    except ModelwrightError as error:
        raise ConfigError(f"{_ALLOCATOR} {error}") from error


def _options() -> list[str]:
    """PyTorch's headers require C++20 from 2.12 on."""
    torch_folder = Path(torch.__file__).parent
    return [
        *("-std=c++20", "-O2", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"),
        *(f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"),
    ]
