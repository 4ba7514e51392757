"""`build_loader`: batches of packed rows, with a token budget, a curriculum and a mixture of sources.

The global sequence of rows is planned in blocks: one batch of whole rows, or about `POOL_BATCHES` batches of a token
budget, whose rows are sorted by length before they are divided into batches. Competence and shares of sources are those
of a block's first batch. Every rank plans all blocks identically, from the lengths alone, and reads its share of a
batch's rows, so any number of ranks gives the same global batches. Batch number n is a function of n and of the updates
of the mixture; a resumed run plans the earlier blocks again. Where rows were packed in groups, "row" means such a group
here, and its length is that of its longest row.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from modelwright.core.errors import ConfigError
from modelwright.core.seeds import derive_seed
from modelwright.data.rows.batch import TokenBatch, cut, padded_len
from modelwright.data.rows.batching.order import BatchingConfig, Mixture, Pacing, RowOrder, apportion, permutation
from modelwright.data.rows.loader import PackedLoader, PackedRows, RowShare

POOL_BATCHES = 50
"""Batches of a block; at most a quarter of an epoch (like the length-grouped sampler of Hugging Face Transformers)."""
GRADUAL_BLOCKS = 20
"""Minimum number of blocks over which a curriculum grows or shares of sources change."""


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
        self._begin()

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

    def global_rows(self, index: int) -> np.ndarray:
        """Returns the rows of global batch `index`, [B] int64. Going back plans again from the beginning."""
        return self._batch(index)[0]

    def _batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Moves to the block of global batch `index`; returns its rows and their `RowShare.epochs`, [B] int64 each."""
        if self._generation != self.mixture.generation or index < self._position.first_batch:
            self._generation = self.mixture.generation
            self._begin()
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

    def _begin(self) -> None:
        zeros = np.zeros(len(self.orders))
        self._move(Position(block=0, first_batch=0, num_drawn=zeros.astype(np.int64), owed=zeros))

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
