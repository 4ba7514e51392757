"""What the corpus steps of cleaning measured of all documents, as they read it when they decide."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelwright.data.disk_file import DiskFile
from modelwright.data.shard_files import ShardFiles
from modelwright.data.workers import ShardEngine

DOCUMENTS, IDS = "documents", "ids"
"""Names of the columns that hold the documents of a shard (a frame of JSON lines) and their identifiers (JSON)."""


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
