"""What the corpus steps of cleaning measured of all documents, as they read it when they decide."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        self._ids: dict[int, list[str]] = {}
        self.starts = np.cumsum([0, *map(len, self.parts("kind"))])
        self.alive = np.ones(len(self), np.bool_)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def column(self, name: str) -> NDArray[Any]:
        """A column of the whole corpus, in memory."""
        return np.concatenate(list(self.parts(name)))

    def parts(self, name: str) -> Iterator[NDArray[Any]]:
        """The same column shard by shard, one at a time in memory."""
        return (files.array(self.stage, name) for files in self.shards)

    def identifier(self, number: int) -> str:
        """The `id` of a document, read from disk."""
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        if shard not in self._ids:
            self._ids[shard] = json.loads(self.shards[shard].array(self.stage, IDS).tobytes())
        return self._ids[shard][number - int(self.starts[shard])]
