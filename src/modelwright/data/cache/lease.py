"""Folders that the processes of a host share and the last one removes, or else the next start, if all were killed.

Beside the folder stands an empty file that every user holds a shared lock on. The kernel gives up the locks of a
process that dies, however it dies, so a folder whose file can be locked exclusively has no user.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SUFFIX = ".lease"
_READY = "ready"
_POLL_S = 0.01


@dataclass
class SharedFolder:
    """A folder in use by this process, and perhaps by others."""

    path: Path
    _handle: int

    @classmethod
    def attach(cls, path: Path, prepare: Callable[[Path], None]) -> "SharedFolder":
        """Use a folder. The first user calls `prepare` with it, which may find it as users left it that were killed."""
        while True:
            handle = os.open(path.with_name(path.name + _SUFFIX), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _try_alone(handle) and _is_current(handle, path):
                    _prepare(path, prepare)
                # The exclusive lock is given up before the shared one is there: another process may come in between.
                fcntl.flock(handle, fcntl.LOCK_SH)
                if _is_current(handle, path) and (path / _READY).exists():
                    return cls(path, handle)
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
            time.sleep(_POLL_S)

    def detach(self, *, remove: bool) -> None:
        """End the use. remove: the folder, if this is its last user."""
        if remove and _try_alone(self._handle):
            _remove(self.path)
        os.close(self._handle)


def sweep(parent: Path, prefix: str, *, keep: str = "") -> None:
    """Remove the shared folders with this prefix that nobody uses; not those whose names begin with `keep`."""
    names = {path.name.removesuffix(_SUFFIX) for path in parent.glob(f"{prefix}*")}
    for name in sorted(name for name in names if not keep or not name.startswith(keep)):
        handle = os.open(parent / (name + _SUFFIX), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if _try_alone(handle) and _is_current(handle, parent / name):
                _remove(parent / name)
        finally:
            os.close(handle)


def _prepare(path: Path, prepare: Callable[[Path], None]) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    (path / _READY).unlink(missing_ok=True)
    try:
        prepare(path)
    except BaseException:
        _remove(path)
        raise
    (path / _READY).touch()


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.with_name(path.name + _SUFFIX).unlink(missing_ok=True)


def _try_alone(handle: int) -> bool:
    """Take the exclusive lock if nobody else has one. A shared lock is lost when that fails."""
    with suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_current(handle: int, path: Path) -> bool:
    """Whether the locked file is still the one beside the folder: its last user may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path.with_name(path.name + _SUFFIX)))
    except FileNotFoundError:
        return False
