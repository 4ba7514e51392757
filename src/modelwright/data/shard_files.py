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

Arrays = Mapping[str, NDArray[Any]]
_REMEDY = "run the same command again, which does this shard anew"


@dataclass(frozen=True)
class ShardFiles:
    """The files of one shard in `folder`."""

    folder: Path
    number: int

    def path(self, name: str) -> Path:
        return self.folder / f"{self.number:05d}.{name}"

    def write(self, stage: str, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
        """Write the files of a stage, and its marker last."""
        for name, content in files.items():
            write_file(self.path(name), content)
        marker = {"files": {name: _sha256(content) for name, content in files.items()}, "facts": facts}
        write_atomic(self.path(f"{stage}.json"), json.dumps({**marker, "sha256": _sha256(_plain(marker))}))

    def write_arrays(self, stage: str, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        """Write the arrays of a stage, and its marker last."""
        self.write(stage, {_arrays_of(stage): pack_arrays(arrays)}, facts)

    def facts(self, stage: str) -> dict[str, Any] | None:
        """The facts of a finished stage whose files are as they were written, None for any other."""
        marker = self._marker(stage)
        return marker["facts"] if marker and all(self._is_whole(*entry) for entry in marker["files"].items()) else None

    def finished(self, stage: str) -> dict[str, Any]:
        """The facts of a stage that must be finished. Raises `ArtifactError` if it is damaged."""
        facts = self.facts(stage)
        if facts is None:
            raise ArtifactError(f"{self.path(f'{stage}.json')}: is damaged, or a file of it; {_REMEDY}")
        return facts

    def _is_whole(self, name: str, sha256: str) -> bool:
        try:
            return _sha256(self.path(name).read_bytes()) == sha256
        except OSError:
            return False

    def read(self, stage: str, name: str) -> bytes:
        """The content of a file that `stage` wrote. Raises `ArtifactError` if it is damaged."""
        path, marker = self.path(name), self._marker(stage)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from None
        if not marker or _sha256(content) != marker["files"].get(name):
            raise ArtifactError(f"{path}: its content has changed since it was written; {_REMEDY}")
        return content

    def read_arrays(self, stage: str) -> Arrays:
        """The arrays of a stage. Raises `ArtifactError` if they are damaged."""
        return unpack_arrays(self.read(stage, _arrays_of(stage)))

    def verify(self, stage: str) -> None:
        """Raise `ArtifactError` if the arrays of a stage are not as they were written."""
        self.read(stage, _arrays_of(stage))

    def array(self, stage: str, name: str) -> NDArray[Any]:
        """One array of a stage; only this one is read, and nothing is verified."""
        with np.load(self.path(_arrays_of(stage)), allow_pickle=False) as loaded:
            return loaded[name]

    def _marker(self, stage: str) -> dict[str, Any] | None:
        try:
            marker = json.loads(self.path(f"{stage}.json").read_bytes())
            return marker if marker.pop("sha256", "") == _sha256(_plain(marker)) else None
        except (FileNotFoundError, ValueError, AttributeError, TypeError):
            return None


def _arrays_of(stage: str) -> str:
    return f"{stage}.npz"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _plain(marker: Mapping[str, Any]) -> bytes:
    return json.dumps(marker).encode()


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


def as_array(content: bytes) -> NDArray[np.uint8]:
    """Bytes as an array, to be stored beside others."""
    return np.frombuffer(content, np.uint8)


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
    """Write a file and flush it to disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def numbered(folder: Path, count: int) -> Iterator[ShardFiles]:
    """The shards of a folder, in order."""
    return (ShardFiles(folder, number) for number in range(count))
