"""Loads packed rows as training batches, in one global order that all ranks see; any number of ranks gives the same
batches.

`PackedLoader` is a pure function of (seed, batch number), so resume is exact without state: rows are shuffled anew in
every epoch, epochs follow one another without a gap, and batch `i` has the places `i * batch_rows` to `(i + 1) *
batch_rows` of that order. A rank takes an equal share of consecutive rows.

`PlannedLoader` has a token budget, a curriculum and a mixture of sources. The global sequence is planned in blocks: one
batch of whole rows, or about `POOL_BATCHES` batches of a token budget, whose rows are sorted by length before they are
divided into batches. Competence and shares of sources are those of a block's first batch. Every rank plans all blocks
identically, from the lengths alone, and reads its share of a batch's rows. Batch number n is a function of n and of the
updates of the mixture; a resumed run plans the earlier blocks again.

Where rows were packed in groups, a group replaces a row in all of that: groups are numbered, counted, shuffled and
divided among ranks, and the length of a group is that of its longest row.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import ConfigError, derive_seed
from modelwright.data.rows.batch import IGNORED, TokenBatch, cut, padded_len
from modelwright.data.rows.cache.layout import ColdStore, RowLayout, is_remote, rows_at
from modelwright.data.rows.cache.reader import NUM_READERS, BlockReader, Tiers
from modelwright.data.rows.order import BatchingConfig, Mixture, Pacing, RowOrder, apportion, permutation
from modelwright.data.rows.pack import FORMAT, INDEX

POOL_BATCHES = 50
"""Batches of a block; at most a quarter of an epoch (like the length-grouped sampler of Hugging Face Transformers)."""
GRADUAL_BLOCKS = 20
"""Minimum number of blocks over which a curriculum grows or shares of sources change."""


@dataclass(frozen=True)
class RowShare:
    """A rank's rows of a batch. groups: their numbers [B] int64; epochs: number of earlier reads of each group, or the
    number of the draw where rows are drawn with replacement [B] int64; num_tokens: tokens per row, 0 for whole rows.
    """

    groups: np.ndarray
    epochs: np.ndarray
    num_tokens: int = 0


ReadRows = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]
"""Signature of `RowReader.read`."""


class RowReader(Protocol):
    """Reads the tokens and loss masks of rows."""

    def read(self, rows: np.ndarray, /) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the tokens [N, seq_len] of rows [N] and their loss mask [N, seq_len], None for rows without one."""
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
    """The rows of a shard folder that `pack` has written. `reader` reads their tokens, by default from the folder or
    from the place that its file `rows_at.json` names. Raises `ArtifactError` when the folder is missing or damaged.
    """

    def __init__(self, folder: Path, reader: RowReader | None = None) -> None:
        self.folder = folder
        index = read_index(folder)
        self.seq_len: int = index["seq_len"]
        self.vocab_size: int = index["vocab_size"]
        self.eos_id: int = index["eos_id"]
        self.num_rows: int = index["num_rows"]
        self.group_size: int = index.get("group_size", 1)
        """Number of consecutive rows that belong together; 1 if every row is a group."""
        self.num_groups: int = self.num_rows // self.group_size
        self.num_tokens: int = index["num_tokens"]
        self.num_targets: int = index["num_targets"]
        if reader is None:
            # Files on this machine are mapped; those of a store are read without a cache.
            place = rows_at(folder)
            if is_remote(place):
                layout = RowLayout(folder, index, ColdStore(place))
                reader = BlockReader(Tiers(layout), layout, num_readers=NUM_READERS)
            else:
                reader = MappedRows(Path(place), index)
        self.reader = reader
        self._offsets = _map(folder / "offsets.bin", np.dtype(np.int64), (self.num_rows + 1,))
        self._lengths = _map(folder / "lengths.bin", np.dtype(np.uint32), (index["num_pieces"],))
        sources: dict[str, int] = index.get("sources", {"": self.num_rows})
        self.sources = {name: num_rows // self.group_size for name, num_rows in sources.items()}
        """Number of groups of each source, in the order of the rows."""
        self.has_scores: bool = index.get("has_scores", False)
        self._values: np.ndarray | None = None
        if index.get("has_values", False):
            self._values = _map(folder / "values.bin", np.dtype(np.float32), (index["num_pieces"],))

    def group_lengths(self) -> np.ndarray:
        """Returns the length of the longest row of each group without padding, [groups] int32."""
        ends = np.cumsum(self._lengths, dtype=np.int64)[self._offsets[1:] - 1]
        return np.diff(ends, prepend=0).astype(np.int32).reshape(-1, self.group_size).max(axis=1)

    def group_scores(self) -> np.ndarray:
        """Returns each group's mean score, [groups] float32. Raises `ArtifactError` for rows without scores."""
        if not self.has_scores:
            raise ArtifactError(f"{self.folder}: the rows lack scores; run the pack stage again with this curriculum")
        scores = _map(self.folder / "scores.bin", np.dtype(np.float32), (self.num_rows,))
        return scores.reshape(-1, self.group_size).mean(axis=1, dtype=np.float32)

    def source_groups(self, name: str) -> np.ndarray:
        """Returns the groups of one source, [N] int64."""
        first = 0
        for source, num_groups in self.sources.items():
            if source == name:
                return np.arange(first, first + num_groups)
            first += num_groups
        raise KeyError(name)

    def gather(self, groups: np.ndarray, num_tokens: int = 0) -> TokenBatch:
        """Returns the rows of the given groups as a batch, in the given order. num_tokens: number of tokens per row,
        which must include all that are not padding; 0 for whole rows. For sequences that were packed with values, the
        extra `values_BT` has the value of each token's piece, 0 for padding.
        """
        return self.assemble(groups, num_tokens, self.reader.read)

    def assemble(self, groups: np.ndarray, num_tokens: int, read: ReadRows) -> TokenBatch:
        """Does `gather` with rows that `read` reads; may be called in any thread if `read` may."""
        rows = self.rows_of(groups)
        shape = (len(rows), num_tokens or self.seq_len)
        tokens, targets = np.empty(shape, dtype=np.int64), np.ones(shape, dtype=bool)
        if len(rows):  # a rank may have none; a reader could not tell their shape
            read_tokens, mask = read(rows)
            tokens = read_tokens[:, : shape[1]].astype(np.int64)
            targets = targets if mask is None else mask[:, : shape[1]].astype(bool)
        pieces, counts = self._pieces_of(rows)
        lengths = np.asarray(self._lengths)[pieces].astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        first_pieces = np.cumsum(counts) - counts
        used = ends[first_pieces + counts] - ends[first_pieces]
        # The true entries are the tokens of the pieces, in their order, so that a flat array of values fits them.
        is_used = np.arange(shape[1]) < used[:, None]
        positions, segments = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int32)
        positions[is_used] = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
        segments[is_used] = np.repeat(np.arange(len(pieces)) - np.repeat(first_pieces, counts), lengths)
        extras = dict[str, torch.Tensor]()
        if self._values is not None:
            values = np.zeros(shape, dtype=np.float32)
            values[is_used] = np.repeat(np.asarray(self._values)[pieces], lengths)
            extras["values_BT"] = torch.from_numpy(values)
        # A token's label is the next token of its piece: the last token of a piece predicts nothing.
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
        """Returns the rows of groups [N], one group after another."""
        return (groups[:, None] * self.group_size + np.arange(self.group_size)).flatten()

    def values_of(self, groups: np.ndarray) -> np.ndarray:
        """Returns the values of the pieces of groups, row after row, [pieces] float32, for rows packed with values."""
        assert self._values is not None
        pieces, _ = self._pieces_of(self.rows_of(groups))
        return np.asarray(self._values)[pieces]

    def _pieces_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pieces of rows [N], row after row, and their number per row [N]."""
        first = np.asarray(self._offsets)[rows]
        counts = np.asarray(self._offsets)[rows + 1] - first
        ends = np.cumsum(counts)
        return np.repeat(first - (ends - counts), counts) + np.arange(counts.sum()), counts

    def batches(self, batch_rows: int) -> Iterator[TokenBatch]:
        """Yields all rows for evaluation, in the order on disk, in batches of at most `batch_rows` rows or groups."""
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
        self.num_batches_per_epoch = -(-rows.num_groups // batch_rows)
        """Number of batches after which every row was seen at least once."""
        self.plan_version = (0, 0)
        """The plan of the batches never changes."""
        # A batch touches two epochs at most, unless it is huge.
        self._epoch_order = lru_cache(maxsize=2)(
            lambda epoch: permutation(derive_seed(seed, "rows", epoch), rows.num_groups)
        )

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """Returns this rank's share of global batch `index`, from 0. Raises `ConfigError` for uneven shares."""
        return self.rows.gather(self.share(index, rank=rank, world_size=world_size).groups)

    def share(self, index: int, *, rank: int = 0, world_size: int = 1) -> RowShare:
        """Returns the rows of `batch`."""
        if self.batch_rows % world_size:
            text = f"batch_rows: {self.batch_rows} rows cannot be shared equally by {world_size} ranks"
            raise ConfigError(f"{text}; choose a multiple of {world_size}")
        # Consecutive rows, so that the ranks' shares in their order are the global batch, whatever their number.
        share = self.batch_rows // world_size
        first = index * self.batch_rows + rank * share
        epochs = np.arange(first, first + share) // self.rows.num_groups
        return RowShare(self.order(first, first + share), epochs)

    def fork(self) -> "PackedLoader":
        """Returns a loader with the same plan, for concurrent look-ups of other batches."""
        return self

    def order(self, first: int, last: int) -> np.ndarray:
        """Returns the rows, or groups, at places `first` to `last` of the endless global order [last - first] int64."""
        num_groups = self.rows.num_groups
        places = np.arange(first, last)
        epochs = places // num_groups
        numbers = range(first // num_groups, -(-last // num_groups))
        # A batch may span the end of an epoch.
        parts = [self._epoch_order(epoch)[places[epochs == epoch] % num_groups] for epoch in numbers]
        return np.concatenate(parts)


def read_index(folder: Path) -> dict[str, Any]:
    """Returns the index of a shard folder. Raises `ArtifactError` if it is missing, damaged or of another format."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{folder}: packed rows are missing ({INDEX} was not found); run the pack stage") from None
    except ValueError as error:
        raise ArtifactError(f"{path}: is damaged ({error}); run the pack stage again") from None
    if index.get("format") != FORMAT:
        raise ArtifactError(f"{path}: is of format {index.get('format')!r}, not {FORMAT!r}; run the pack stage again")
    return index


def row_layout(folder: Path) -> RowLayout:
    """Returns the blocks of the rows of a shard folder, at the place that its `rows_at.json` names. Raises
    `ArtifactError` if they were packed without checksums.
    """
    return RowLayout(folder, read_index(folder), ColdStore(rows_at(folder)))


def _map(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    expected = int(np.prod(shape)) * dtype.itemsize
    if not path.is_file() or path.stat().st_size != expected:
        raise ArtifactError(f"{path}: is missing or truncated; run the pack stage again")
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


@dataclass(frozen=True)
class BatchPlan:
    """Consecutive batches that are planned together."""

    rows: np.ndarray
    """Numbers of the rows [N] int64."""
    epochs: np.ndarray
    """`RowShare.epochs` of the rows, [N] int64."""
    ends: np.ndarray
    """End of each batch in `rows`, [num_batches] int64."""
    order: np.ndarray
    """Order of the batches, [num_batches] int64."""


@dataclass(frozen=True)
class Position:
    """The beginning of a block. num_drawn: rows that were drawn from each source before, [S] int64. owed: rows by which
    each source is behind its share, [S] float64.
    """

    block: int
    first_batch: int
    num_drawn: np.ndarray
    owed: np.ndarray


class PlannedLoader:
    """Batches of packed rows by the plan that the module describes. orders: one for each source of the mixture.
    block_rows: rows of a block. budget: tokens of a batch, whose rows have similar lengths; 0 makes a block one batch.
    """

    def __init__(
        self,
        rows: PackedRows,
        *,
        orders: Sequence[RowOrder],
        mixture: Mixture,
        pacing: Pacing,
        block_rows: int,
        budget: int,
        num_batches_per_epoch: int,
        seed: int,
    ) -> None:
        self.rows = rows
        self.orders = orders
        self.mixture = mixture
        self.pacing = pacing
        self.block_rows = block_rows
        self.budget = budget
        self.num_batches_per_epoch = num_batches_per_epoch
        """Approximate number of batches in which `rows.num_groups` rows are read."""
        self.seed = seed
        self.lengths = rows.group_lengths()
        self._generation = mixture.generation
        zeros = np.zeros(len(orders))
        self._start = Position(block=0, first_batch=0, num_drawn=zeros.astype(np.int64), owed=zeros)
        self._move(self._start)

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """Returns this rank's share of global batch `index` (from 0, without end). With a token budget a rank takes
        every `world_size`-th row, in the order of their lengths; a rank without any gets a row of padding.

        Raises `ConfigError` if batches without a token budget do not divide into equal shares.
        """
        share = self.share(index, rank=rank, world_size=world_size)
        return self.rows.gather(share.groups, share.num_tokens).padded(1)

    def share(self, index: int, *, rank: int = 0, world_size: int = 1) -> RowShare:
        """Returns the rows of `batch`, without the row of padding."""
        chosen, epochs = self._batch(index)
        if self.budget:
            # Every `world_size`-th row: ranks get rows of nearly the same lengths, and so equal work.
            own = slice(rank, None, world_size)
            longest = int(self.lengths[chosen[own]].max(initial=1))
            return RowShare(chosen[own], epochs[own], padded_len(longest, self.rows.seq_len))
        if len(chosen) % world_size:
            text = f"batch_rows: {len(chosen)} rows cannot be shared equally by {world_size} ranks"
            raise ConfigError(f"{text}; choose a multiple of {world_size}")
        num_rows = len(chosen) // world_size
        own = slice(rank * num_rows, (rank + 1) * num_rows)
        return RowShare(chosen[own], epochs[own])

    @property
    def plan_version(self) -> tuple[int, int]:
        """Changes whenever the plan of batches to come may have changed."""
        return self.mixture.generation, len(self.mixture.history)

    def fork(self) -> "PlannedLoader":
        """Returns a loader with the same plan and the same mixture, for concurrent look-ups of other batches."""
        return copy.copy(self)  # positions and plans of blocks are never changed in place

    def _batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Moves to the block of global batch `index`; returns its rows and their `RowShare.epochs`, [B] int64 each."""
        if self._generation != self.mixture.generation or index < self._position.first_batch:
            self._generation = self.mixture.generation
            self._move(self._start)
        # Only a token budget has to plan a block to know its number of batches.
        while index >= (end := self._position.first_batch + (len(self._planned().ends) if self.budget else 1)):
            before, shares = self._position, self.mixture.shares(self._position.first_batch)
            position = Position(
                block=before.block + 1,
                first_batch=end,
                num_drawn=before.num_drawn + self._counts,
                # The fraction of a row that a source is behind is carried over, so shares are exact in the long run.
                owed=before.owed + shares * self.block_rows - self._counts,
            )
            self._move(position)
        plan = self._planned()
        number = int(plan.order[index - self._position.first_batch])
        chosen = slice(int(plan.ends[number - 1]) if number else 0, int(plan.ends[number]))
        return plan.rows[chosen], plan.epochs[chosen]

    def _move(self, position: Position) -> None:
        shares = self.mixture.shares(position.first_batch)
        self._position = position
        self._counts = apportion(position.owed + shares * self.block_rows, self.block_rows)
        self._block: BatchPlan | None = None

    def _planned(self) -> BatchPlan:
        """Plans the batches of the current block, in which each source has `self._counts` [S] rows."""
        if self._block is not None:
            return self._block
        position, counts = self._position, self._counts
        sources = np.repeat(np.arange(len(counts)), counts)
        # Sources are mixed within a block, so that a batch has about the shares of the block.
        sources = sources[permutation(derive_seed(self.seed, "sources", position.block), len(sources))]
        competence = self.pacing.competence(position.first_batch)
        rows, epochs = np.empty(len(sources), dtype=np.int64), np.empty(len(sources), dtype=np.int64)
        for source in np.flatnonzero(counts):
            numbers = position.num_drawn[source] + np.arange(counts[source])
            rows[sources == source] = self.orders[int(source)].draw(numbers, competence)
            epochs[sources == source] = self.orders[int(source)].epochs(numbers, competence)
        if not self.budget:
            one = np.zeros(1, dtype=np.int64)
            self._block = BatchPlan(rows=rows, epochs=epochs, ends=np.array([len(rows)]), order=one)
            return self._block
        lengths = self.lengths[rows]
        by_length = np.argsort(-lengths, kind="stable")
        # Batches of similar lengths waste little padding; they come in random order, not the longest first.
        ends = cut(lengths[by_length], self.budget, self.rows.seq_len)
        order = permutation(derive_seed(self.seed, "batches", position.block), len(ends))
        self._block = BatchPlan(rows=rows[by_length], epochs=epochs[by_length], ends=ends, order=order)
        return self._block


def build_loader(
    rows: PackedRows,
    config: BatchingConfig,
    *,
    batch_rows: int,
    by_tokens: bool,
    seed: int,
    num_steps_of: Callable[[int], int],
    row_losses: Callable[[], np.ndarray],
) -> PackedLoader | PlannedLoader:
    """Builds the loader of a training. batch_rows: whole rows of a batch. by_tokens: batches of rows of similar length,
    with at most the tokens of `batch_rows` whole rows. num_steps_of: returns the steps of the run from the batches of
    an epoch. row_losses: returns the loss of each row, for a curriculum by loss.

    Raises `ConfigError` if the mixture names a source that the rows do not have.
    """
    curriculum = config.curriculum
    if not by_tokens and curriculum.by == "none" and not config.mixture.is_on:
        return PackedLoader(rows, batch_rows=batch_rows, seed=seed)
    lengths, num_groups = rows.group_lengths(), rows.num_groups
    budget, block_rows, num_batches = 0, batch_rows, -(-num_groups // batch_rows)
    if by_tokens:
        # How many batches an epoch makes is only known from its order: any order of blocks gives about as many.
        budget = batch_rows * rows.seq_len
        fewest = len(cut(np.sort(lengths)[::-1], budget, rows.seq_len))
        num_blocks = max(1, fewest // min(POOL_BATCHES, max(1, fewest // 4)))
        blocks = np.array_split(lengths[permutation(derive_seed(seed, "epoch"), num_groups)], num_blocks)
        num_batches = sum(len(cut(np.sort(block)[::-1], budget, rows.seq_len)) for block in blocks)
    num_steps = num_steps_of(num_batches)
    if by_tokens:
        # Blocks are small enough that a curriculum or a mixture changes gradually during the run.
        most = min(POOL_BATCHES, num_batches // 4)
        if curriculum.by != "none":
            most = min(most, int(curriculum.fraction * num_steps) // GRADUAL_BLOCKS)
        if config.mixture.update != "none":
            most = min(most, num_steps // GRADUAL_BLOCKS)
        num_blocks = -(-num_batches // max(1, most))
        block_rows = -(-num_groups // num_blocks)
    names = list(rows.sources) if config.mixture.is_on else [""]
    members = [rows.source_groups(name) for name in names] if config.mixture.is_on else [np.arange(rows.num_groups)]
    difficulty = None
    if curriculum.by == "length":
        difficulty = rows.group_lengths()
    elif curriculum.by != "none":
        difficulty = row_losses() if curriculum.model else rows.group_scores()
    return PlannedLoader(
        rows,
        orders=[
            RowOrder(own, None if difficulty is None else difficulty[own], seed=derive_seed(seed, "source", name))
            for name, own in zip(names, members, strict=True)
        ],
        mixture=Mixture(config.mixture, names, [int(lengths[own].sum()) for own in members], num_steps=num_steps),
        pacing=Pacing(curriculum, num_steps),
        block_rows=block_rows,
        budget=budget,
        num_batches_per_epoch=num_batches,
        seed=seed,
    )
