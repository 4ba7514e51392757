"""Reads the rows and images of coming batches before they are needed, in the order of the loader's plan.

`LookaheadLoader` also assembles the next batch. Both happen in other threads while a step computes, because a thread
that trains while others read waits for the interpreter's lock at every array operation. An assembled batch is used only
if its rows are still those of the loader's plan when the batch is requested; so batches are the same with and without,
also after a resume. `ImagesAhead` does the same for images.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np

from modelwright.data.rows.batch import TokenBatch
from modelwright.data.rows.batching.augmented import PlannedRows
from modelwright.data.rows.cache.reader import BlockReader
from modelwright.data.rows.loader import PackedRows, RowShare

Planned = TypeVar("Planned")
Look = Callable[[PlannedRows, int, int, int], Planned]
"""Returns a part of a loader's plan, from the loader, the number of the batch, the rank and the number of ranks."""
Tokens = tuple[np.ndarray, np.ndarray | None]
"""Tokens [N, seq_len] and loss mask [N, seq_len] of rows, None if they have none."""


def share_of(loader: PlannedRows, index: int, rank: int, world_size: int) -> RowShare:
    """Returns a rank's rows; a `Look`."""
    return loader.share(index, rank=rank, world_size=world_size)


class PlanAhead(Generic[Planned]):
    """Results of `look` in the plan of `loader`, for a batch and the `num_ahead` batches after it.

    The plan is read from a fork of the loader, which is renewed whenever the plan may have changed.
    """

    def __init__(self, loader: PlannedRows, look: Look[Planned], *, num_ahead: int) -> None:
        self._loader = loader
        self._look = look
        self._num_ahead = num_ahead
        self._fork = loader.fork()
        self._plan = (loader.plan_version, 0, 1)
        self._known: dict[int, Planned] = {}

    def of(self, index: int, rank: int, world_size: int) -> dict[int, Planned]:
        """Returns the results by number of the batch, in order, with the same objects while the plan stays."""
        plan = (self._loader.plan_version, rank, world_size)
        if plan != self._plan:
            self._fork, self._plan, self._known = self._loader.fork(), plan, {}
        planned = dict[int, Planned]()
        for number in range(index, index + 1 + self._num_ahead):
            known = self._known.get(number)
            planned[number] = self._look(self._fork, number, rank, world_size) if known is None else known
        self._known = planned
        return planned


def images_of(rows: PackedRows, groups: np.ndarray) -> list[int]:
    """Returns the distinct numbers of the images of groups of rows."""
    # The value of a piece is the number of its image plus 1, or 0 without an image.
    numbers = np.rint(rows.values_of(groups)).astype(np.int64) - 1
    return [number for number in dict.fromkeys(numbers.tolist()) if number >= 0]


def own_images(loader: PlannedRows, index: int, rank: int, world_size: int) -> list[int]:
    """Returns the images of a rank's rows; a `Look`."""
    return images_of(loader.rows, loader.share(index, rank=rank, world_size=world_size).groups)


class ImagesAhead:
    """Reads images ahead with `reader`. look: returns the numbers of the images that a rank needs for a batch."""

    def __init__(
        self, reader: BlockReader[Any], loader: PlannedRows, look: Look[Sequence[int]], *, num_ahead: int
    ) -> None:
        self._reader = reader
        self._plan = PlanAhead(loader, look, num_ahead=num_ahead)
        self._coming: dict[int, Sequence[int]] = {}
        self._expecting: Future[None] | None = None

    def expect(self, index: int, rank: int, world_size: int) -> None:
        """Expects the images of batch `index`, which are needed now, and those of the batches after it."""
        coming = self._plan.of(index, rank, world_size)
        numbers = list(chain.from_iterable(coming.values()))
        if self._expecting is not None:
            self._expecting.result()
            self._expecting = None
        # The images of a batch that was expected before are already being read. Further reads then begin in the
        # background, because starting them wakes many threads.
        if self._coming.get(index) is coming[index]:
            self._expecting = self._reader.background.submit(self._reader.expect, numbers)
        else:
            self._reader.expect(numbers)
        self._coming = coming


@dataclass(frozen=True)
class _Assembly:
    """A batch that the background thread assembles. expected: done when the reads of this and later ones have begun."""

    share: RowShare
    expected: Future[None]
    batch: Future[TokenBatch]

    def is_of(self, share: RowShare) -> bool:
        return self.share.num_tokens == share.num_tokens and np.array_equal(self.share.groups, share.groups)


class LookaheadLoader:
    """The batches of `loader`, whose rows `reader` reads, `num_ahead` batches ahead; 0 also assembles none ahead."""

    def __init__(self, loader: PlannedRows, reader: BlockReader[Tokens], *, num_ahead: int) -> None:
        self.loader = loader
        self.rows = loader.rows
        self.reader = reader
        self.num_ahead = num_ahead
        self.num_batches_per_epoch = loader.num_batches_per_epoch
        self._plan = PlanAhead(loader, share_of, num_ahead=num_ahead)
        self._coming: dict[int, RowShare] = {}
        """Rows of the requested batch and of the next ones, by the number of the batch."""
        self._assembly: _Assembly | None = None

    @property
    def plan_version(self) -> tuple[int, int]:
        return self.loader.plan_version

    def fork(self) -> PlannedRows:
        """Returns a loader with the same plan, for looking up other batches; it reads nothing ahead."""
        return self.loader.fork()

    def share(self, index: int, *, rank: int = 0, world_size: int = 1) -> RowShare:
        """Returns the rows of `batch`, which the caller reads next."""
        share = self._planned(index, rank, world_size)
        self._expect_now()
        return share

    def batch(self, index: int, *, rank: int = 0, world_size: int = 1) -> TokenBatch:
        """Returns this rank's share of global batch `index`, as `loader` does."""
        share = self._planned(index, rank, world_size)
        with self.reader.waiting_for(self.rows.rows_of(share.groups)):
            assembly = self._assembly
            # The plan may have changed since the assembly began.
            if assembly is not None and assembly.is_of(share):
                self._assembly = None
                batch = assembly.batch.result()
            else:
                self._expect_now()
                batch = self._assemble(share)
        if self.num_ahead:
            following, background = self._coming[index + 1], self.reader.background
            # Starting reads wakes many threads, which the training thread does not wait for either. One background
            # thread runs both in this order, so the rows of the batch are expected before it is assembled.
            expected = background.submit(self._expect, self._coming)
            self._assembly = _Assembly(following, expected, background.submit(self._assemble, following))
        return batch

    def _planned(self, index: int, rank: int, world_size: int) -> RowShare:
        """Returns the rows of a batch, and plans the next batches."""
        share = self.loader.share(index, rank=rank, world_size=world_size)
        self._coming = self._plan.of(index, rank, world_size)
        return share

    def _expect_now(self) -> None:
        if self._assembly is not None:
            # It must not change the reader's expectations after the call below.
            self._assembly.batch.cancel()
            if not self._assembly.expected.cancel():
                self._assembly.expected.result()
            self._assembly = None
        self._expect(self._coming)

    def _expect(self, coming: dict[int, RowShare]) -> None:
        self.reader.expect(row for share in coming.values() for row in self.rows.rows_of(share.groups).tolist())

    def _assemble(self, share: RowShare) -> TokenBatch:
        return self.rows.assemble(share.groups, share.num_tokens, self.reader.fetch).padded(1)
