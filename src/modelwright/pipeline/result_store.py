"""A folder for results on a store that fsspec knows: `s3://bucket/folder`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import fsspec.core

from modelwright.core.errors import ConfigError, StorageError

_LOCAL = "file://"


@dataclass(frozen=True)
class ResultStore:
    """url: as the user wrote it; path: of the folder on `filesystem`."""

    url: str
    filesystem: fsspec.AbstractFileSystem
    path: str

    @classmethod
    def open(cls, url: str, option: str) -> "ResultStore":
        """Raises `ConfigError` that names the option for a store that fsspec does not know, or whose package is
        missing.
        """
        protocol = url.partition("://")[0]
        try:
            filesystem, path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            remedy = "pip install 'modelwright[remote]'" if protocol == "s3" else str(error)
            raise ConfigError(f"{option}: {url} needs a package: {remedy}") from None
        except ValueError as error:
            raise ConfigError(f"{option}: {url} is not a usable URL ({error})") from None
        if not str(path).strip("/"):
            raise ConfigError(f"{option}: {url} names no folder; for example {protocol}://bucket/cleaned")
        return cls(url, filesystem, str(path).rstrip("/"))

    def check(self) -> None:
        """Write and remove a small file, so that missing rights are known before the work. Raises `StorageError`."""
        name = f"{self.path}/.modelwright-check"
        with self._reporting("be written"):
            self.filesystem.makedirs(self.path, exist_ok=True)
            self.filesystem.pipe_file(name, b"modelwright")
            self.filesystem.rm_file(name)

    def upload(self, folder: Path, names: Sequence[str]) -> None:
        """Copy files of a folder, in this order; one that exists is replaced as a whole. Raises `StorageError`."""
        with self._reporting("be written"):
            for parent in {name.rpartition("/")[0] for name in names} - {""}:
                self.filesystem.makedirs(f"{self.path}/{parent}", exist_ok=True)
            for name in names:
                self.filesystem.put_file(str(folder / name), f"{self.path}/{name}")

    def remove(self, folder: str, pattern: re.Pattern[str], *, keep: Sequence[str] = ()) -> None:
        """Remove the files of a folder, "" for the place itself, whose whole name matches, but not those of `keep`.

        Raises `StorageError`.
        """
        with self._reporting("be written"):
            self.filesystem.invalidate_cache()
            try:
                paths: Any = self.filesystem.ls(f"{self.path}/{folder}".rstrip("/"), detail=False)
            except FileNotFoundError:
                return
            for path in paths:
                name = path.rpartition("/")[2]
                if pattern.fullmatch(name) and name not in keep:
                    self.filesystem.rm_file(path)

    def fetch(self, folder: Path, names: Sequence[str]) -> None:
        """Copy files into a folder. Raises `StorageError`."""
        with self._reporting("be read"):
            for name in names:
                self.filesystem.get_file(f"{self.path}/{name}", str(folder / name))

    def read(self, name: str) -> bytes:
        """The content of a file; b"" if there is none. Raises `StorageError`."""
        with self._reporting("be read"):
            try:
                content: Any = self.filesystem.cat_file(f"{self.path}/{name}")
                return content
            except FileNotFoundError:
                return b""

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Missing credentials and names that do not resolve are errors of each store's own library.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StorageError(f"{self.url}: cannot {what} ({reason}); check the address and the credentials") from None


def is_store(out: str) -> bool:
    """Whether a result goes to a store and not into a folder of this machine."""
    return "://" in out and not out.startswith(_LOCAL)


def local_path(out: str) -> str:
    """The path of a folder of this machine, which may be written as a `file://` URL."""
    return out.removeprefix(_LOCAL)
