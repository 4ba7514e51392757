"""The source of the files of rows and images: a folder, or any store that fsspec has a package for."""

import errno
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import fsspec.core

from modelwright.core.errors import ArtifactError, ConfigError, StorageError, writing

ROWS_AT = "rows_at.json"
"""File next to rows and images that another run has packed: `{"url": ...}` names the folder of their large files."""
NUM_TRIES = 5
FIRST_PAUSE_S = 0.2
"""Pause before the second try; it doubles for every further one."""
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that another try cannot mend."""


def rows_at(folder: Path) -> str:
    """Returns the folder or URL with the large files of a folder of rows or images."""
    try:
        return json.loads((folder / ROWS_AT).read_text(encoding="utf-8"))["url"]
    except FileNotFoundError:
        return str(folder)


def is_remote(place: str) -> bool:
    """Returns True for a URL of a store, where files cannot be mapped into memory."""
    return "://" in place


def open_store(url: str, setting: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the file system of a path or URL, and the path on it. Raises `ConfigError`, which names the setting, if
    fsspec does not know the store or the store's package is missing.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = "pip install 'modelwright[remote]'" if url.startswith("s3") else str(error)
        raise ConfigError(f"{setting}: {url} needs a package: {package}") from None
    except ValueError as error:
        raise ConfigError(f"{setting}: {url} is not a usable URL ({error})") from None
    return filesystem, str(path).rstrip("/")


@dataclass
class ColdStore:
    """Reads parts of the files at `url`, from any thread, with retries after transient errors."""

    url: str
    pause_s: float = FIRST_PAUSE_S
    _opened: tuple[fsspec.AbstractFileSystem, str] | None = None
    _opening: threading.Lock = field(default_factory=threading.Lock)

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Reads bytes of a file. Raises `ArtifactError` if it is missing or short, `StorageError` for other errors."""
        place, pause_s = f"{self.url.rstrip('/')}/{name}", self.pause_s
        for attempt in range(1, NUM_TRIES + 1):
            try:
                filesystem, path = self._open()
                content: Any = filesystem.cat_file(f"{path}/{name}", start=offset, end=offset + num_bytes)
            except FileNotFoundError:
                raise ArtifactError(f"{place}: is missing; put the file back, or run the pack stage again") from None
            except ConfigError:
                raise
            # Each store has its own types of errors.
            except Exception as error:
                if attempt == NUM_TRIES or isinstance(error, _FINAL):
                    raise self._unreadable(name, error) from None
                time.sleep(pause_s)
                pause_s *= 2
                continue
            if len(content) != num_bytes:
                raise ArtifactError(f"{place}: is truncated; put the file back, or run the pack stage again")
            return bytes(content)
        raise AssertionError("unreachable")

    def read_whole(self, name: str) -> bytes | None:
        """Returns the content of a small file, None if it is missing. Raises `StorageError` if it cannot be read."""
        filesystem, path = self._open()
        with self._reporting(name):
            try:
                content: Any = filesystem.cat_file(f"{path}/{name}")
            except FileNotFoundError:
                return None
        return bytes(content)

    def copy(self, name: str, target: Path) -> None:
        """Copies a file. Raises `StorageError` if it cannot be read, or the disk is full."""
        filesystem, path = self._open()
        with writing(target), self._reporting(name):
            filesystem.get_file(f"{path}/{name}", str(target))

    @contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, ConfigError):
            raise
        except Exception as error:  # each store has errors of its own
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # the target's fault, which `writing` reports
            raise self._unreadable(name, error) from None

    def _unreadable(self, name: str, error: Exception) -> StorageError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return StorageError(
            f"{self.url.rstrip('/')}/{name}: cannot be read ({reason}); check the address, the credentials and the "
            "network"
        )

    def _open(self) -> tuple[fsspec.AbstractFileSystem, str]:
        with self._opening:
            if self._opened is None:
                self._opened = open_store(self.url, "rows_from")
            return self._opened
