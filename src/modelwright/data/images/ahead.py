"""`ImagesAhead`: has the images of the batches to come read, in the order that the plan of batches knows."""

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any

import numpy as np

from modelwright.data.batching.augmented import PlannedRows
from modelwright.data.batching.plan_ahead import Look, PlanAhead
from modelwright.data.cache.reader import BlockReader
from modelwright.data.loader import PackedRows


def images_of(rows: PackedRows, groups: np.ndarray) -> list[int]:
    """The numbers of the images of groups of rows, each once: the value of a piece is that of its image plus 1, and 0
    where it has none.
    """
    numbers = np.rint(rows.values_of(groups)).astype(np.int64) - 1
    return [number for number in dict.fromkeys(numbers.tolist()) if number >= 0]


def own_images(loader: PlannedRows, index: int, rank: int, world_size: int) -> list[int]:
    """A `Look`: the images of a rank's rows."""
    return images_of(loader.rows, loader.share(index, rank=rank, world_size=world_size).groups)


class ImagesAhead:
    """Images that `reader` reads. look: the numbers of those that a rank needs for a batch of `loader`."""

    def __init__(
        self, reader: BlockReader[Any], loader: PlannedRows, look: Look[Sequence[int]], *, num_ahead: int
    ) -> None:
        self._reader = reader
        self._plan = PlanAhead(loader, look, num_ahead=num_ahead)
        self._coming: dict[int, Sequence[int]] = {}
        self._expecting: Future[None] | None = None

    def expect(self, index: int, rank: int, world_size: int) -> None:
        """The images of batch `index`, which are needed now, and those of the batches after it. What is known from the
        batch before is being read already; further reads begin in the background, because starting them wakes many
        threads.
        """
        coming = self._plan.of(index, rank, world_size)
        numbers = list(chain.from_iterable(coming.values()))
        if self._expecting is not None:
            self._expecting.result()
            self._expecting = None
        if self._coming.get(index) is coming[index]:
            self._expecting = self._reader.background.submit(self._reader.expect, numbers)
        else:
            self._reader.expect(numbers)
        self._coming = coming
