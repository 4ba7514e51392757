"""C++ sources of this package as shared libraries: compiled when they are first asked for, kept in the user's cache.

One library for each text of the source, compiler's name and options. Needs a C++ compiler (`CXX`, else `g++`).
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from modelwright.core.errors import ModelwrightError

_TIMEOUT_S = 300


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelwright"


def library(source: Path, options: Sequence[str], *, folder: Path, known: str = "") -> Path:
    """Where the library lies once it is built. known: what else it depends on."""
    parts = "\0".join([known, *_compiler(), *options]).encode() + source.read_bytes()
    return folder / f"{source.stem}-{hashlib.sha256(parts).hexdigest()[:16]}.so"


def has_compiler() -> bool:
    return shutil.which(_compiler()[0]) is not None


def compiled(source: Path, options: Sequence[str], *, folder: Path, way_out: str, known: str = "") -> Path:
    """The library in `folder`, compiled if it is not there; processes that do so at once leave one whole file.

    Raises `ModelwrightError` with the way out and what the compiler said.
    """
    found = library(source, options, folder=folder, known=known)
    if found.exists():
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / found.name
            command = [*_compiler(), "-fPIC", "-shared", str(source), *options, "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
            if done.returncode:
                raise ModelwrightError(cannot_be_built(done.stderr, way_out))
            made.replace(found)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelwrightError(cannot_be_built(str(error), way_out)) from error
    return found


def cannot_be_built(text: str, way_out: str) -> str:
    """Why, for an error's message."""
    said = f"cannot be built with {_compiler()[0]!r}; {way_out} install a C++ compiler (or name it in CXX)"
    return f"{said}: {text.strip()[-600:]}"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]
