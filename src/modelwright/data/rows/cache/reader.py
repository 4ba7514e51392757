"""Reads blocks from the nearest tier that has them: memory, the local disk, or the source that keeps their files.

Every block that is read, from any tier, is compared with its checksum at packing. A block gets a free slot, or that of
a block that was read less often: so it moves towards memory when it is read more than others, and the other one moves
away. `BlockReader` reads blocks in threads, ahead where the order is known, and cuts rows and images out of them.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np

from modelwright.core.errors import ArtifactError
from modelwright.data.rows.cache.layout import BlockLayout, BlockPart, BlockSet, Items, damaged
from modelwright.data.rows.cache.row_cache import AccessCounts, Displaced, SlotTier

MOST_WAITING = 64
"""Maximum number of blocks that wait for a slot in a tier; further ones are not cached this time."""
MEMORY, DISK, SOURCE = "memory", "disk", "source"
NUM_READERS = 16
"""Number of concurrent reads where files are on a store and no cache is configured."""

_Cuts = tuple[Future[dict[int, Any]], ...]
"""One future for each block of an item: the parts of items in that block, by item."""


@dataclass
class TierFigures:
    """Reads of this process. blocks, bytes: by tier; num_promoted, num_demoted: moves towards memory and away from it;
    num_damaged: blocks of the cache that were damaged and read again from the source.
    """

    blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys((MEMORY, DISK, SOURCE), 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys((MEMORY, DISK, SOURCE), 0))
    num_promoted: int = 0
    num_demoted: int = 0
    num_damaged: int = 0


class Tiers:
    """The tiers of a host, nearest first, before the source. note: shows a line to the user. Safe for threads."""

    def __init__(
        self,
        blocks: BlockSet,
        tiers: Sequence[tuple[str, SlotTier]] = (),
        counts: AccessCounts | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        assert counts is not None or not tiers
        self.blocks = blocks
        self.figures = TierFigures()
        self._tiers = list(tiers)
        self._counts = counts
        self._note = note
        self._lock = threading.Lock()
        self._placing = ThreadPoolExecutor(1, thread_name_prefix="tiers")
        """Thread that writes to the tiers: reads must not wait for a disk that is slow to write."""
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)
        self._full: set[str] = set()
        """Tiers whose disk is full."""

    def read(self, block: int) -> bytes:
        """Reads a block. Raises `ArtifactError` for a damaged source, `StorageError` for an unreadable one."""
        score = self._counts.count(block) if self._counts else 0.0
        content, came_from = None, 0
        for name, tier in self._tiers:
            content = self._checked(name, tier, block)
            if content is not None:
                break
            came_from += 1
        if content is None:
            content = self._from_source(block)
        name = self._tiers[came_from][0] if came_from < len(self._tiers) else SOURCE
        with self._lock:
            self.figures.blocks[name] += 1
            self.figures.bytes[name] += len(content)
        # Without waiting: where writing falls behind, blocks are not placed, and training goes on.
        if came_from and self._waiting.acquire(blocking=False):
            self._placing.submit(self._place, block, content, score, came_from)
        return content

    def flush(self) -> None:
        """Waits until the blocks that were read before have their slots."""
        self._placing.submit(lambda: None).result()  # the pool has one thread, which works in order

    def close(self) -> None:
        self._placing.shutdown()

    def _place(self, block: int, content: bytes, score: float, came_from: int) -> None:
        """Puts a block into a tier before `came_from` that accepts it, and the displaced one into a farther one."""
        assert self._counts is not None
        try:
            for place, (name, tier) in enumerate(self._tiers[:came_from]):
                taken = self._write(name, tier, block, content, score)
                if taken is False:
                    continue
                farther = self._tiers[place + 1 :]
                # A block is in one tier only, or it would take the room of another block twice.
                for _, other in farther:
                    other.drop(block)
                with self._lock:
                    self.figures.num_promoted += came_from < len(self._tiers)
                    self.figures.num_demoted += isinstance(taken, Displaced)
                # A displaced block may have been overwritten while it was read; a damaged one is forgotten.
                if isinstance(taken, Displaced) and damaged(self.blocks, *taken) is None:
                    own_score = float(self._counts.scores(np.array([taken.block]))[0])
                    any(self._write(name, tier, *taken, own_score) is not False for name, tier in farther)
                return
        finally:
            self._waiting.release()

    def places(self) -> dict[str, list[int]]:
        """Returns the blocks in each tier."""
        return {name: tier.blocks() for name, tier in self._tiers}

    def _write(self, name: str, tier: SlotTier, block: int, content: bytes, score: float) -> bool | Displaced:
        assert self._counts is not None
        if name in self._full:
            return False
        try:
            return tier.write(block, content, score, self._counts.scores)
        except OSError as error:
            self._full.add(name)
            self._note(f"cache: the {name} takes no more blocks ({error.strerror}); what it has goes on being read")
            return False

    def _checked(self, name: str, tier: SlotTier, block: int) -> bytes | None:
        """Returns a tier's copy of a block, None if it is absent or damaged."""
        content = tier.read(block)
        if content is None or damaged(self.blocks, block, content) is None:
            return content
        # Another process may have written while this one read. What differs while nobody writes is damaged.
        with tier.alone():
            content = tier.read(block)
        damage = None if content is None else damaged(self.blocks, block, content)
        if damage is None:
            return content
        tier.drop(block)
        with self._lock:
            self.figures.num_damaged += 1
        self._note(f"cache: the copy of {damage} in the {name} is damaged; it is read again from {damage.store.url}")
        return None

    def _from_source(self, block: int) -> bytes:
        damage: BlockPart | None = None
        for _ in range(2):  # a byte may have been flipped in transit, which a second read mends
            parts = self.blocks.parts(block)
            content = b"".join(part.store.read(part.file, part.offset, part.num_bytes) for part in parts)
            damage = damaged(self.blocks, block, content)
            if damage is None:
                return content
        assert damage is not None
        raise ArtifactError(
            f"{damage.store.url}: {damage} are damaged: their CRC-32 differs from that at packing; put the file back, "
            "or run the pack stage again"
        )


@dataclass
class ReadFigures:
    """Rows or images that this process requested, those already read by then, and the wait for the others."""

    num_rows: int = 0
    num_ready: int = 0
    wait_s: float = 0.0


class BlockReader(Generic[Items]):
    """Reads the rows or images of `layout` with `num_readers` threads. first_block: number of its first block."""

    def __init__(self, tiers: Tiers, layout: BlockLayout[Items], *, num_readers: int, first_block: int = 0) -> None:
        self.figures = ReadFigures()
        self.tiers = tiers
        self.layout = layout
        self._first_block = first_block
        self._threads = ThreadPoolExecutor(num_readers, thread_name_prefix=layout.title)
        self.background = ThreadPoolExecutor(1, thread_name_prefix="batches")
        """Thread for work that is needed later, until the reader is closed."""
        self._expected: dict[int, _Cuts] = {}
        """Expected items. Replaced, never changed in place, so that another thread may read it."""

    @property
    def tier_figures(self) -> TierFigures:
        return self.tiers.figures

    def expect(self, items: Iterable[int]) -> None:
        """Begins to read these items, in order, and cancels reads of other items that were expected before."""
        wanted = dict.fromkeys(items)
        kept = {item: cuts for item, cuts in self._expected.items() if item in wanted}
        # Items of a block share a future, so it may only be canceled if none of them is wanted.
        useful = {id(future) for cuts in kept.values() for future in cuts}
        for cuts in self._expected.values():
            for future in cuts:
                if id(future) not in useful:
                    future.cancel()
        self._expected = kept | self._start([item for item in wanted if item not in kept])

    def read(self, items: np.ndarray) -> Items:
        """Returns items [N] in this order. Raises the errors of `Tiers.read`."""
        with self.waiting_for(items):
            return self.fetch(items)

    @contextmanager
    def waiting_for(self, items: np.ndarray) -> Iterator[None]:
        """Counts items [N] that training requests, and the time that it waits for them."""
        numbers, expected = items.tolist(), self._expected
        self.figures.num_rows += len(numbers)
        self.figures.num_ready += sum(
            item in expected and all(cut.done() for cut in expected[item]) for item in numbers
        )
        started = time.perf_counter()
        yield
        self.figures.wait_s += time.perf_counter() - started

    def fetch(self, items: np.ndarray) -> Items:
        """Reads like `read`, without counting. May be called while another thread calls `expect`; if that cancels the
        read of one of these items, raises like the result of a canceled future.
        """
        # Read once: `expect` may replace the dictionary meanwhile.
        numbers, expected = items.tolist(), self._expected
        started = {item: expected[item] for item in numbers if item in expected}
        started |= self._start([item for item in dict.fromkeys(numbers) if item not in started])
        return self.layout.join([[cut.result()[item] for cut in started[item]] for item in numbers])

    def close(self) -> None:
        """Waits for the reads that have begun and cancels the others, and the background work that needs them."""
        self._threads.shutdown(cancel_futures=True)
        self.background.shutdown(cancel_futures=True)

    def _start(self, items: Iterable[int]) -> dict[int, _Cuts]:
        # One read for each block, however many of the items are in it.
        blocks_of = {item: self.layout.blocks_of(item) for item in items}
        members: dict[int, list[int]] = defaultdict(list)
        for item, blocks in blocks_of.items():
            for block in blocks:
                members[block].append(item)
        futures = {block: self._threads.submit(self._take, block, own) for block, own in members.items()}
        return {item: tuple(futures[block] for block in blocks) for item, blocks in blocks_of.items()}

    def _take(self, block: int, items: list[int]) -> dict[int, Any]:
        """Returns copies of the parts of some items in a block, so that its whole content is not kept in memory."""
        content = self.tiers.read(self._first_block + block)
        return {item: self.layout.cut(item, block, content) for item in items}
