"""`LookaheadLoader`: has the rows of the batches to come read, in the order that the plan of batches knows, and the
next batch assembled.

Both happen in other threads while a step computes, because a thread that trains beside reading threads waits for the
interpreter's lock at every array operation. What was assembled is used only if its rows are those that the loader's
plan has when the batch is asked for; so batches, and resuming, are the same as without.
"""

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from modelwright.data.batch import TokenBatch
from modelwright.data.batching.augmented import PlannedRows
from modelwright.data.batching.plan_ahead import PlanAhead, share_of
from modelwright.data.cache.reader import BlockReader
from modelwright.data.loader import RowShare

Tokens = tuple[np.ndarray, np.ndarray | None]
"""Tokens [N, seq_len] and loss mask [N, seq_len] of rows, None if they have none."""


@dataclass(frozen=True)
class _Assembly:
    """A batch that the reader's background thread assembles. expected: done when its rows, and those of the batches
    after it, are being read.
    """

    share: RowShare
    expected: Future[None]
    batch: Future[TokenBatch]

    def is_of(self, share: RowShare) -> bool:
        return self.share.num_tokens == share.num_tokens and np.array_equal(self.share.groups, share.groups)

    def drop(self) -> None:
        """Make sure that it changes no more what the reader expects."""
        self.batch.cancel()
        if not self.expected.cancel():
            self.expected.result()


class LookaheadLoader:
    """The batches of `loader`, whose rows `reader` reads. num_ahead: batches that are read before they are needed; 0
    assembles none before it is needed either.
    """

    def __init__(self, loader: PlannedRows, reader: BlockReader[Tokens], *, num_ahead: int) -> None:
        self.loader = loader
        self.rows = loader.rows
        self.reader = reader
        self.num_ahead = num_ahead
        self._plan = PlanAhead(loader, share_of, num_ahead=num_ahead)
        self._coming: dict[int, RowShare] = {}
        """Rows of the batch that was asked for and of those to come, by the number of the batch."""
        self._assembly: _Assembly | None = None

    @property
    def num_batches_per_epoch(self) -> int:
        return self.loader.num_batches_per_epoch

    @property
    def plan_version(self) -> tuple[int, int]:
        return self.loader.plan_version

    def fork(self) -> PlannedRows:
        """A loader with the same plan. It is asked for plans of other batches and has nothing read."""
        return self.loader.fork()

    def share(self, index: int, *, rank: int = 0, world_size: int = 1) -> RowShare:
        """The rows of `batch`, which the caller reads next."""
        share = self._planned(index, rank, world_size)
        self._expect_now()
        return share

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """This rank's share of global batch `index`, as the loader's."""
        share = self._planned(index, rank, world_size)
        with self.reader.waiting_for(self.rows.rows_of(share.groups)):
            assembly = self._assembly
            if assembly is not None and assembly.is_of(share):
                self._assembly = None
                batch = assembly.batch.result()
            else:
                self._expect_now()
                batch = self._assemble(share)
        if self.num_ahead:
            self._begin(self._coming[index + 1])
        return batch

    def _planned(self, index: int, rank: int, world_size: int) -> RowShare:
        """The rows of a batch; plans those to come as well."""
        share = self.loader.share(index, rank=rank, world_size=world_size)
        self._coming = self._plan.of(index, rank, world_size)
        return share

    def _expect_now(self) -> None:
        if self._assembly is not None:
            self._assembly.drop()
            self._assembly = None
        self._expect(self._coming)

    def _expect(self, coming: dict[int, RowShare]) -> None:
        self.reader.expect(row for share in coming.values() for row in self.rows.rows_of(share.groups).tolist())

    def _begin(self, share: RowShare) -> None:
        """Have the next batch assembled. Starting reads wakes many threads, which the one that trains does not wait
        for either.
        """
        background = self.reader.background
        expected = background.submit(self._expect, self._coming)
        self._assembly = _Assembly(share, expected, background.submit(self._assemble, share))

    def _assemble(self, share: RowShare) -> TokenBatch:
        return self.rows.assemble(share.groups, share.num_tokens, self.reader.fetch).padded(1)
