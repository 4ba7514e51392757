"""Compiles C++ sources of this package as shared libraries on first use and caches them in the user's cache folder.

There is one library for each combination of source text, compiler and options. Needs a C++ compiler (`CXX`, else
`g++`).
"""

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from modelwright.core.config import ModelwrightError

_TIMEOUT_S = 300


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelwright"


def library(source: Path, options: Sequence[str], *, folder: Path, known: str = "") -> Path:
    """Path of the library once it is built. known: further text that the library depends on."""
    # Any other source, compiler or option gives another file, so that versions never overwrite each other.
    parts = "\0".join([known, *_compiler(), *options]).encode() + source.read_bytes()
    return folder / f"{source.stem}-{hashlib.sha256(parts).hexdigest()[:16]}.so"


def compiled(source: Path, options: Sequence[str], *, folder: Path, way_out: str, known: str = "") -> Path:
    """Returns the library in `folder`, compiled if missing. Concurrent builds leave one whole file. Raises
    `ModelwrightError` with the remedy and the compiler's output.
    """
    result = library(source, options, folder=folder, known=known)
    if result.exists():
        return result
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Next to its final place, because a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / result.name
            command = [*_compiler(), "-fPIC", "-shared", str(source), *options, "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
            if done.returncode:
                raise ModelwrightError(cannot_be_built(done.stderr, way_out))
            made.replace(result)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelwrightError(cannot_be_built(str(error), way_out)) from error
    return result


def cannot_be_built(text: str, way_out: str) -> str:
    """Error message with the reason, the remedy and the last 600 characters of the compiler's output."""
    said = f"cannot be built with {_compiler()[0]!r}; {way_out} install a C++ compiler (or name it in CXX)"
    return f"{said}: {text.strip()[-600:]}"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]
