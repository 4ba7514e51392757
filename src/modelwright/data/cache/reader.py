"""Rows and images by their blocks, read by threads, before they are needed where the order is known."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from modelwright.data.cache.layout import BlockLayout, Items
from modelwright.data.cache.tiers import TierFigures, Tiers

NUM_READERS = 16
"""Reads at a time where files are on a store and no cache is set."""

_Cuts = tuple[Future[dict[int, Any]], ...]
"""Of each block that an item is in: what it has of this item, and of others."""


@dataclass
class ReadFigures:
    """What this process asked for: rows or images, those of them that were there already, and seconds that it waited
    for them.
    """

    num_rows: int = 0
    num_ready: int = 0
    wait_s: float = 0.0


class BlockReader(Generic[Items]):
    """Reads the items of `layout`, rows or images, from tiers in which its blocks begin with number `first_block`.
    num_readers: reads at a time.
    """

    def __init__(self, tiers: Tiers, layout: BlockLayout[Items], *, num_readers: int, first_block: int = 0) -> None:
        self.figures = ReadFigures()
        self.tiers = tiers
        self.layout = layout
        self._first_block = first_block
        self._threads = ThreadPoolExecutor(num_readers, thread_name_prefix=layout.title)
        self.background = ThreadPoolExecutor(1, thread_name_prefix="batches")
        """Where what is needed later is prepared, until the reader is closed."""
        self._expected: dict[int, _Cuts] = {}
        """Items that are expected. Replaced, never changed in place, so that another thread may look into it."""

    @property
    def tier_figures(self) -> TierFigures:
        return self.tiers.figures

    def expect(self, items: Iterable[int]) -> None:
        """Read these items, the first ones first, and forget what was expected before and is not among them."""
        wanted = dict.fromkeys(items)
        kept = {item: cuts for item, cuts in self._expected.items() if item in wanted}
        useful = {id(future) for cuts in kept.values() for future in cuts}  # items of a block share a future
        for cuts in self._expected.values():
            for future in cuts:
                if id(future) not in useful:
                    future.cancel()
        self._expected = kept | self._start([item for item in wanted if item not in kept])

    def read(self, items: np.ndarray) -> Items:
        """Items [N] in this order. Raises what `Tiers.read` does."""
        with self.waiting_for(items):
            return self.fetch(items)

    @contextmanager
    def waiting_for(self, items: np.ndarray) -> Iterator[None]:
        """Count items [N] that training asks for, and how long it waits for them."""
        numbers, expected = items.tolist(), self._expected
        self.figures.num_rows += len(numbers)
        self.figures.num_ready += sum(
            item in expected and all(cut.done() for cut in expected[item]) for item in numbers
        )
        started = time.perf_counter()
        yield
        self.figures.wait_s += time.perf_counter() - started

    def fetch(self, items: np.ndarray) -> Items:
        """What `read` returns, in no figure. May be called while another thread calls `expect`; if that forgets one of
        these items before its read has begun, raises what the result of a canceled future does.
        """
        numbers, expected = items.tolist(), self._expected
        started = {item: expected[item] for item in numbers if item in expected}
        started |= self._start([item for item in dict.fromkeys(numbers) if item not in started])
        return self.layout.join([[cut.result()[item] for cut in started[item]] for item in numbers])

    def close(self) -> None:
        """Wait for the reads that have begun and forget the others, and what needs them."""
        self._threads.shutdown(cancel_futures=True)
        self.background.shutdown(cancel_futures=True)

    def _start(self, items: Iterable[int]) -> dict[int, _Cuts]:
        blocks_of = {item: self.layout.blocks_of(item) for item in items}
        members: dict[int, list[int]] = defaultdict(list)
        for item, blocks in blocks_of.items():
            for block in blocks:
                members[block].append(item)
        futures = {block: self._threads.submit(self._take, block, own) for block, own in members.items()}
        return {item: tuple(futures[block] for block in blocks) for item, blocks in blocks_of.items()}

    def _take(self, block: int, items: list[int]) -> dict[int, Any]:
        """Copies of what a block has of some items, so that its content is not kept."""
        content = self.tiers.read(self._first_block + block)
        return {item: self.layout.cut(item, block, content) for item in items}
