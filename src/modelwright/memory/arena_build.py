"""The arena's allocator: compiled when it is first asked for, kept in the user's cache, and put in PyTorch's place.

One shared library for each version of PyTorch, of the source and of the compiler's name. Needs a C++ compiler (`CXX`,
else `g++`) and the headers that PyTorch comes with. What the allocator does stands in `arena_allocator.cpp`.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from modelwright.core.errors import ConfigError

SOURCE = Path(__file__).with_name("arena_allocator.cpp")
_WAY_OUT = "set memory_arena to false, or"
_TIMEOUT_S = 300


def check_machine(*, on_cpu: bool) -> None:
    """Raises `ConfigError` where there can be no arena, as far as that shows without building it."""
    if not on_cpu:
        raise ConfigError("memory_arena: is for CPUs; accelerators' allocators keep memory themselves; set it to false")
    if sys.platform != "linux":
        raise ConfigError(f"memory_arena: is made for Linux, not for {sys.platform}; set it to false")
    if not _library(cache_folder()).exists() and shutil.which(_compiler()[0]) is None:
        raise ConfigError(f"memory_arena: {_said(_compiler(), 'there is no such program')}")


@functools.cache
def allocator() -> ctypes.PyDLL:
    """The library, in PyTorch's place from now on; it passes everything through until it is told otherwise.

    Raises `ConfigError` where it cannot be built or another library has taken that place.
    """
    library = ctypes.PyDLL(str(built(cache_folder())))
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
        function = getattr(library, f"arena_{name}")
        function.restype, function.argtypes = result, arguments
    if library.arena_install():
        raise ConfigError(f"memory_arena: another library has replaced PyTorch's allocator; {_WAY_OUT} leave that out")
    return library


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelwright"


def built(folder: Path) -> Path:
    """The library in `folder`, compiled if it is not there; processes that do so at once leave one whole file."""
    command, found = [*_compiler(), *_options()], _library(folder)
    if found.exists():
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / found.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=_TIMEOUT_S)
            if done.returncode:
                raise ConfigError(f"memory_arena: {_said(command, done.stderr)}")
            made.replace(found)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"memory_arena: {_said(command, str(error))}") from error
    return found


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _library(folder: Path) -> Path:
    """Where it lies once it is built."""
    known = "\0".join([torch.__version__, *_compiler(), *_options()]).encode() + SOURCE.read_bytes()
    return folder / f"arena-{hashlib.sha256(known).hexdigest()[:16]}.so"


def _options() -> list[str]:
    """PyTorch's headers ask for C++20 from 2.12 on."""
    torch_folder = Path(torch.__file__).parent
    return [
        *("-std=c++20", "-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"),
        *(f"-I{torch_folder / 'include'}", str(SOURCE), f"-L{torch_folder / 'lib'}", "-lc10"),
    ]


def _said(command: list[str], text: str) -> str:
    way_out = f"{_WAY_OUT} install a C++ compiler (or name it in CXX)"
    return f"its allocator cannot be built with {command[0]!r}; {way_out}: {text.strip()[-600:]}"
