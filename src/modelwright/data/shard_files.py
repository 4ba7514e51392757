"""Files of a piece of work that is cut into shards, each whole or absent, so that a killed process resumes.

A shard's result is one or more files and a marker `NNNNN.STAGE.json`, written last, with the SHA-256 of each file and
small facts. A stage whose files do not have these hashes is not finished, so a shard that was changed on disk is done
again, by itself; if that happens while it is read, one error names the file.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ArtifactError
from modelwright.data.document import Document

Arrays = dict[str, NDArray[Any]]
_REMEDY = "run the same command again, which does this shard anew"


@dataclass(frozen=True)
class ShardFiles:
    """The files of one shard in `folder`."""

    folder: Path
    number: int

    def path(self, name: str) -> Path:
        return self.folder / f"{self.number:05d}.{name}"

    def finish(self, stage: str, files: Iterable[str], facts: Mapping[str, Any]) -> None:
        """Write the marker of a stage whose `files` are written."""
        hashes = {name: hashlib.sha256(self.path(name).read_bytes()).hexdigest() for name in files}
        write_atomic(self.path(f"{stage}.json"), json.dumps({"files": hashes, "facts": facts}))

    def facts(self, stage: str) -> dict[str, Any] | None:
        """The facts of a finished stage whose files are as they were written, None for any other."""
        marker = self._marker(stage)
        return marker["facts"] if marker and all(self._is_whole(*entry) for entry in marker["files"].items()) else None

    def _is_whole(self, name: str, sha256: str) -> bool:
        try:
            return hashlib.sha256(self.path(name).read_bytes()).hexdigest() == sha256
        except OSError:
            return False

    def read(self, stage: str, name: str) -> bytes:
        """The content of a file that `stage` wrote. Raises `ArtifactError` if it is damaged."""
        path, marker = self.path(name), self._marker(stage)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from None
        if not marker or hashlib.sha256(content).hexdigest() != marker["files"].get(name):
            raise ArtifactError(f"{path}: its content has changed since it was written; {_REMEDY}")
        return content

    def _marker(self, stage: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.path(f"{stage}.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None


def pack_lines(lines: Iterable[str], *, level: int = 3) -> bytes:
    """Text lines as one Zstandard frame with a checksum."""
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)


def unpack_lines(content: bytes) -> list[str]:
    """The lines of `pack_lines`. Only a line feed ends a line: JSON may hold other line separators of Unicode."""
    return zstandard.ZstdDecompressor().decompress(content).decode("utf-8").split("\n")[:-1]


def unpack_documents(content: bytes) -> list[Document]:
    """The documents of a frame of JSON lines."""
    return [Document.from_json(line) for line in unpack_lines(content)]


def pack_arrays(arrays: Arrays) -> bytes:
    """Arrays as an uncompressed `.npz`."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


def unpack_arrays(content: bytes) -> Arrays:
    """The arrays of `pack_arrays`; nothing is unpickled."""
    with np.load(io.BytesIO(content), allow_pickle=False) as loaded:
        return {name: loaded[name] for name in loaded.files}


def write_file(path: Path, content: bytes) -> None:
    """Write a file of a shard; its marker, written afterwards, makes it count."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def numbered(folder: Path, count: int) -> Iterator[ShardFiles]:
    """The shards of a folder, in order."""
    return (ShardFiles(folder, number) for number in range(count))
