"""Files of the work on shards, each whole or absent so that a killed process resumes, and the corpus that they make.

A shard's result is one or more files and a marker `NNNNN.STAGE.json`, written last, with the SHA-256 of each file and
small facts. A stage whose files do not have these hashes is not finished, so a shard that was changed on disk is done
again, by itself; if that happens while it is read, one error names the file. `MeasuredCorpus` gives corpus steps the
columns that they measured of all documents, shard after shard.
"""

import hashlib
import io
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ArtifactError
from modelwright.data.document import Document
from modelwright.data.workers import ShardEngine

_READ_AT_MOST = 2**30
Arrays = Mapping[str, NDArray[Any]]
_REMEDY = "run the same command again, which does this shard anew"
DOCUMENTS, IDS = "documents", "ids"
"""Names of the columns that hold the documents of a shard (a frame of JSON lines) and their identifiers (JSON)."""


class DiskFile:
    """Reads parts of a file. `num_read` counts the bytes that were read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY)
        self.num_read = 0
        weakref.finalize(self, os.close, self._handle)

    def read(self, dtype: Any, start: int, stop: int, *, offset: int = 0) -> NDArray[Any]:
        """The values from number `start` to below `stop`, counted from byte `offset`. Raises `EOFError` if the file
        ends before.
        """
        dtype = np.dtype(dtype)
        return np.frombuffer(self.read_bytes(offset + start * dtype.itemsize, (stop - start) * dtype.itemsize), dtype)

    def read_bytes(self, start: int, count: int) -> bytes:
        parts: list[bytes] = []
        left = count
        while left:
            part = os.pread(self._handle, min(left, _READ_AT_MOST), start + count - left)
            if not part:
                raise EOFError(f"{self._path} ends at byte {start + count - left}, {left} bytes too early")
            parts.append(part)
            left -= len(part)
        self.num_read += count
        return parts[0] if len(parts) == 1 else b"".join(parts)


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


@dataclass(kw_only=True)
class MeasuredCorpus:
    """The columns of N documents, shard after shard; a document's number is its place among them."""

    shards: Sequence[ShardFiles]
    stage: str
    """The stage that wrote the columns of each shard."""
    folder: Path
    """For files of the step; it stays until the command has finished, so that work can be resumed."""
    key: str
    """Stands for the documents and the steps: equal for equal input."""
    engine: ShardEngine
    alive: NDArray[np.bool_] = field(init=False)
    """Whether no earlier step dropped the document [N]."""
    starts: NDArray[np.int64] = field(init=False)
    """The number of the first document of each shard, and N [shards + 1]."""

    def __post_init__(self) -> None:
        for files in self.shards:
            files.verify(self.stage)
        self._ids: _Identifiers | None = None
        self.starts = np.cumsum([0, *map(len, self.parts("kind"))])
        self.alive = np.ones(len(self), np.bool_)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def column(self, name: str) -> NDArray[Any]:
        """A column of the whole corpus, in memory."""
        parts = self.parts(name)
        first = next(parts)
        if first.dtype.kind not in "biuf" or len(first) != self.starts[1]:
            return np.concatenate([first, *parts])
        whole = np.empty((len(self), *first.shape[1:]), first.dtype)  # never twice in memory, as parts and as a whole
        for start, part in zip(self.starts[:-1], chain([first], parts), strict=True):
            whole[start : start + len(part)] = part
        return whole

    def parts(self, name: str) -> Iterator[NDArray[Any]]:
        """The same column shard by shard, one at a time in memory."""
        return (files.array(self.stage, name) for files in self.shards)

    def identifier(self, number: int) -> str:
        """The `id` of a document, read from disk."""
        if self._ids is None:
            ids = (json.loads(part.tobytes()) for part in self.parts(IDS))
            self._ids = _Identifiers(self.folder / f"{self.stage}.ids", ids)
        return self._ids[number]


class _Identifiers:
    """Identifiers in a file, and a second file that says where each begins."""

    def __init__(self, path: Path, shards: Iterable[Sequence[str]]) -> None:
        starts, end = path.with_suffix(".starts"), 0
        with open(path, "wb") as texts, open(starts, "wb") as offsets:
            offsets.write(np.int64(0).tobytes())
            for shard in shards:
                encoded = [name.encode("utf-8", "surrogatepass") for name in shard]
                texts.write(b"".join(encoded))
                ends = end + np.cumsum([len(one) for one in encoded], dtype=np.int64)
                offsets.write(ends.tobytes())
                end = int(ends[-1]) if len(ends) else end
        self._texts, self._starts = DiskFile(path), DiskFile(starts)

    def __getitem__(self, number: int) -> str:
        start, end = map(int, self._starts.read(np.int64, number, number + 2))
        return self._texts.read_bytes(start, end - start).decode("utf-8", "surrogatepass")
