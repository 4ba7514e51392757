"""Packed rows to training batches: a pure function of (seed, batch number), so resume is exact and needs no state.

All ranks see one global order: rows are shuffled anew in every epoch, epochs follow one another without a gap, and
batch `i` holds places `i * batch_rows` to `(i + 1) * batch_rows` of that order. A rank takes its equal share of
consecutive rows, so any number of ranks gives the same global batch. Where rows were packed in groups, a group takes
the place of a row in all of that: groups are numbered, counted, shuffled and shared among ranks.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from modelwright.core.errors import ArtifactError, ConfigError
from modelwright.core.seeds import derive_seed
from modelwright.data.rows.batch import IGNORED, TokenBatch
from modelwright.data.rows.batching.order import permutation
from modelwright.data.rows.cache.cold import ColdStore, is_remote, rows_at
from modelwright.data.rows.cache.layout import RowLayout
from modelwright.data.rows.cache.reader import NUM_READERS, BlockReader, Tiers
from modelwright.data.rows.pack import FORMAT, INDEX


@dataclass(frozen=True)
class RowShare:
    """A rank's rows of a batch. groups: their numbers [B] int64; epochs: how often each group was read before, or the
    number of the draw where rows are drawn with replacement [B] int64; num_tokens: of each row, 0 for whole rows.
    """

    groups: np.ndarray
    epochs: np.ndarray
    num_tokens: int = 0


ReadRows = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]
"""What `RowReader.read` does."""


class RowReader(Protocol):
    """Reads the tokens and loss masks of rows."""

    def read(self, rows: np.ndarray, /) -> tuple[np.ndarray, np.ndarray | None]:
        """The tokens [N, seq_len] and, where the rows have one, the loss mask [N, seq_len] of rows [N]."""
        ...


class MappedRows:
    """`RowReader` of the files of a folder, mapped into memory. Raises `ArtifactError` when one is missing or short."""

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        files, seq_len, dtype = index["files"], index["seq_len"], np.dtype(index["dtype"])
        self._tokens = [_map(folder / f["tokens"], dtype, (f["rows"], seq_len)) for f in files]
        self._masks = [_map(folder / f["mask"], np.dtype(np.uint8), (f["rows"], seq_len)) for f in files if "mask" in f]
        self._file_starts = np.cumsum([0] + [f["rows"] for f in files])

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        files = np.searchsorted(self._file_starts, rows, side="right") - 1
        places = list(zip(files.tolist(), (rows - self._file_starts[files]).tolist(), strict=True))
        tokens = np.stack([self._tokens[file][row] for file, row in places])
        return tokens, np.stack([self._masks[file][row] for file, row in places]) if self._masks else None


class PackedRows:
    """The rows of a shard folder that `pack` has written. Their tokens are read with `reader`, by default from the
    folder, or from where its file `rows_at.json` says that they are. Raises `ArtifactError` when the folder is missing
    or damaged.
    """

    def __init__(self, folder: Path, reader: RowReader | None = None) -> None:
        self.folder = folder
        index = read_index(folder)
        self.seq_len: int = index["seq_len"]
        self.vocab_size: int = index["vocab_size"]
        self.eos_id: int = index["eos_id"]
        self.num_rows: int = index["num_rows"]
        self.group_size: int = index.get("group_size", 1)
        """Consecutive rows that belong together; 1 where each row is a group of its own."""
        self.num_groups: int = self.num_rows // self.group_size
        self.num_tokens: int = index["num_tokens"]
        self.num_targets: int = index["num_targets"]
        self.reader = reader or _reader(folder, index)
        self._offsets = _map(folder / "offsets.bin", np.dtype(np.int64), (self.num_rows + 1,))
        self._lengths = _map(folder / "lengths.bin", np.dtype(np.uint32), (index["num_pieces"],))
        sources: dict[str, int] = index.get("sources", {"": self.num_rows})
        self.sources = {name: num_rows // self.group_size for name, num_rows in sources.items()}
        """The number of groups of each source, in the order of the rows."""
        self.has_scores: bool = index.get("has_scores", False)
        self._values: np.ndarray | None = None
        if index.get("has_values", False):
            self._values = _map(folder / "values.bin", np.dtype(np.float32), (index["num_pieces"],))

    def group_lengths(self) -> np.ndarray:
        """Tokens without padding of the longest row of each group, [groups] int32."""
        ends = np.cumsum(self._lengths, dtype=np.int64)[self._offsets[1:] - 1]
        return np.diff(ends, prepend=0).astype(np.int32).reshape(-1, self.group_size).max(axis=1)

    def group_scores(self) -> np.ndarray:
        """The mean score of the rows of each group, [groups] float32. Raises `ArtifactError` if they were packed
        without scores.
        """
        if not self.has_scores:
            raise ArtifactError(
                f"{self.folder}: the rows have no scores; run the pack stage again with this curriculum"
            )
        scores = _map(self.folder / "scores.bin", np.dtype(np.float32), (self.num_rows,))
        return scores.reshape(-1, self.group_size).mean(axis=1, dtype=np.float32)

    def source_groups(self, name: str) -> np.ndarray:
        """The groups of one source, [N] int64."""
        first = 0
        for source, num_groups in self.sources.items():
            if source == name:
                return np.arange(first, first + num_groups)
            first += num_groups
        raise KeyError(name)

    def gather(self, groups: np.ndarray, num_tokens: int = 0) -> TokenBatch:
        """The rows of the given groups as a batch, in the given order. num_tokens: how many of each row, which must
        include all that are not padding; 0 for whole rows. Where sequences were packed with values, the extra
        `values_BT` has that of each token's piece; 0 for padding.
        """
        return self.assemble(groups, num_tokens, self.reader.read)

    def assemble(self, groups: np.ndarray, num_tokens: int, read: ReadRows) -> TokenBatch:
        """`gather` with rows that `read` reads; may be called in any thread if `read` may."""
        rows = self.rows_of(groups)
        shape = (len(rows), num_tokens or self.seq_len)
        tokens, targets = _tokens_and_targets(rows, shape[1], read)
        pieces, counts = self._pieces_of(rows)
        lengths = np.asarray(self._lengths)[pieces].astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        first_pieces = np.cumsum(counts) - counts
        used = ends[first_pieces + counts] - ends[first_pieces]
        is_used = np.arange(shape[1]) < used[:, None]  # its true entries are the tokens of the pieces, in their order
        positions, segments = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int32)
        positions[is_used] = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
        segments[is_used] = np.repeat(np.arange(len(pieces)) - np.repeat(first_pieces, counts), lengths)
        extras = dict[str, torch.Tensor]()
        if self._values is not None:
            values = np.zeros(shape, dtype=np.float32)
            values[is_used] = np.repeat(np.asarray(self._values)[pieces], lengths)
            extras["values_BT"] = torch.from_numpy(values)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        predicted = (segments[:, 1:] == segments[:, :-1]) & is_used[:, 1:] & targets[:, 1:]
        np.copyto(labels[:, :-1], tokens[:, 1:], where=predicted)
        return TokenBatch(
            input_ids_BT=torch.from_numpy(tokens),
            labels_BT=torch.from_numpy(labels),
            positions_BT=torch.from_numpy(positions),
            segments_BT=torch.from_numpy(segments),
            extras=extras,
            group_size=self.group_size,
        )

    def rows_of(self, groups: np.ndarray) -> np.ndarray:
        """The rows of groups [N], one group after another."""
        return (groups[:, None] * self.group_size + np.arange(self.group_size)).flatten()

    def values_of(self, groups: np.ndarray) -> np.ndarray:
        """The values of the pieces of groups, one row after another, [pieces] float32, without reading their rows. Only
        of rows that were packed with values.
        """
        assert self._values is not None
        pieces, _ = self._pieces_of(self.rows_of(groups))
        return np.asarray(self._values)[pieces]

    def _pieces_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the pieces of rows [N], one row after another, and how many each row has [N]."""
        first = np.asarray(self._offsets)[rows]
        counts = np.asarray(self._offsets)[rows + 1] - first
        ends = np.cumsum(counts)
        return np.repeat(first - (ends - counts), counts) + np.arange(counts.sum()), counts

    def batches(self, batch_rows: int) -> Iterator[TokenBatch]:
        """Every row once, in the order on disk, `batch_rows` rows or groups at a time; the last batch may be smaller.
        For evaluation.
        """
        for first in range(0, self.num_groups, batch_rows):
            yield self.gather(np.arange(first, min(first + batch_rows, self.num_groups)))


class PackedLoader:
    """Global batches of `batch_rows` rows (or groups of rows), in an order that `seed` fixes."""

    def __init__(self, rows: PackedRows, *, batch_rows: int, seed: int) -> None:
        if batch_rows < 1:
            raise ConfigError(f"batch_rows: {batch_rows} is not positive; choose 1 or more")
        self.rows = rows
        self.batch_rows = batch_rows
        self.seed = seed
        # A batch touches two epochs at most, unless it is huge.
        self._epoch_order = lru_cache(maxsize=2)(
            lambda epoch: permutation(derive_seed(seed, "rows", epoch), rows.num_groups)
        )

    @property
    def num_batches_per_epoch(self) -> int:
        """Number of batches after which every row was seen at least once."""
        return -(-self.rows.num_groups // self.batch_rows)

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """This rank's share of global batch `index` (from 0, without end). Raises `ConfigError` for uneven shares."""
        return self.rows.gather(self.share(index, rank=rank, world_size=world_size).groups)

    def share(self, index: int, *, rank: int = 0, world_size: int = 1) -> RowShare:
        """The rows of `batch`."""
        if self.batch_rows % world_size:
            text = f"batch_rows: {self.batch_rows} rows cannot be shared equally by {world_size} ranks"
            raise ConfigError(f"{text}; choose a multiple of {world_size}")
        share = self.batch_rows // world_size
        first = index * self.batch_rows + rank * share
        epochs = np.arange(first, first + share) // self.rows.num_groups
        return RowShare(self.order(first, first + share), epochs)

    @property
    def plan_version(self) -> tuple[int, int]:
        """The plan of the batches never changes."""
        return (0, 0)

    def fork(self) -> "PackedLoader":
        """A loader with the same plan, which can be asked for other batches at the same time."""
        return self

    def order(self, first: int, last: int) -> np.ndarray:
        """Rows, or groups, at places `first` to `last` of the endless global order [last - first] int64."""
        num_groups = self.rows.num_groups
        places = np.arange(first, last)
        epochs = places // num_groups
        numbers = range(first // num_groups, -(-last // num_groups))
        parts = [self._epoch_order(epoch)[places[epochs == epoch] % num_groups] for epoch in numbers]
        return np.concatenate(parts)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a shard folder. Raises `ArtifactError` if there is none, or one of another format."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{folder}: holds no packed rows (it has no {INDEX}); run the pack stage") from None
    except ValueError as error:
        raise ArtifactError(f"{path}: is damaged ({error}); run the pack stage again") from None
    if index.get("format") != FORMAT:
        raise ArtifactError(f"{path}: is of format {index.get('format')!r}, not {FORMAT!r}; run the pack stage again")
    return index


def row_layout(folder: Path) -> RowLayout:
    """The blocks of the rows of a shard folder, wherever its `rows_at.json` says that they are. Raises `ArtifactError`
    if they were packed without checksums.
    """
    return RowLayout(folder, read_index(folder), ColdStore(rows_at(folder)))


def _reader(folder: Path, index: Mapping[str, Any]) -> RowReader:
    """Maps row files that are on this machine, and reads others with nothing kept."""
    place = rows_at(folder)
    if not is_remote(place):
        return MappedRows(Path(place), index)
    layout = RowLayout(folder, index, ColdStore(place))
    return BlockReader(Tiers(layout), layout, num_readers=NUM_READERS)


def _tokens_and_targets(rows: np.ndarray, num_tokens: int, read: ReadRows) -> tuple[np.ndarray, np.ndarray]:
    """The first tokens of rows as int64, and which of them are targets."""
    if not len(rows):
        return np.empty((0, num_tokens), dtype=np.int64), np.ones((0, num_tokens), dtype=bool)
    tokens, mask = read(rows)
    targets = np.ones((len(rows), num_tokens), dtype=bool) if mask is None else mask[:, :num_tokens].astype(bool)
    return tokens[:, :num_tokens].astype(np.int64), targets


def _map(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    expected = int(np.prod(shape)) * dtype.itemsize
    if not path.is_file() or path.stat().st_size != expected:
        raise ArtifactError(f"{path}: is missing or truncated; run the pack stage again")
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)
