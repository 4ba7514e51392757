"""Reads blocks from the nearest tier that has them: memory, the local disk, or the place that their files are kept at.

Every block that is read, from any tier, is compared with the checksum from when it was written. A block gets a slot
that is free, or that of a block which was read less often before: so it moves towards memory when it is read more than
others, and the other one moves away. `BlockReader` reads them by threads, before they are needed where the order is
known, and cuts rows and images out of them.
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
from modelwright.data.rows.cache.shared import AccessCounts, Displaced, SlotTier

MOST_WAITING = 64
"""Blocks that wait for a place in a tier; further ones get none this time."""
MEMORY, DISK, SOURCE = "memory", "disk", "source"
NUM_READERS = 16
"""Reads at a time where files are on a store and no cache is set."""

_Cuts = tuple[Future[dict[int, Any]], ...]
"""For each block that an item is in, the parts of items that the block holds, by item."""


@dataclass
class TierFigures:
    """What this process read. blocks, bytes: by tier; promoted, demoted: moves towards memory and away from it;
    num_damaged: blocks of the cache that were damaged and read again from the source.
    """

    blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys((MEMORY, DISK, SOURCE), 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys((MEMORY, DISK, SOURCE), 0))
    num_promoted: int = 0
    num_demoted: int = 0
    num_damaged: int = 0


class Tiers:
    """The tiers of a host, nearest first, before the source. note: shows a line to the user. Used by many threads."""

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
        """Writes to the tiers: what is read does not wait for a disk that is slow to write."""
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)
        self._full: set[str] = set()
        """Tiers that a disk had no more room for."""

    def read(self, block: int) -> bytes:
        """The content of a block. Raises `ArtifactError` that names the bytes that are damaged at the source, and
        `StorageError` if the source cannot be read.
        """
        score = self._counts.count(block) if self._counts else 0.0
        place, name, content = self._nearest(block)
        with self._lock:
            self.figures.blocks[name] += 1
            self.figures.bytes[name] += len(content)
        # Without waiting: where writing falls behind, blocks are not placed, and training goes on.
        if place and self._waiting.acquire(blocking=False):
            self._placing.submit(self._place, block, content, score, place)
        return content

    def _nearest(self, block: int) -> tuple[int, str, bytes]:
        """The number and the name of the nearest tier that has a block, or of the source, and the content."""
        for place, (name, tier) in enumerate(self._tiers):
            content = self._checked(name, tier, block)
            if content is not None:
                return place, name, content
        return len(self._tiers), SOURCE, self._from_source(block)

    def flush(self) -> None:
        """Wait until the blocks that were read before have their places."""
        self._placing.submit(lambda: None).result()

    def close(self) -> None:
        self._placing.shutdown()

    def _place(self, block: int, content: bytes, score: float, came_from: int) -> None:
        """Put a block into a tier that is nearer than the one it came from, if one takes it."""
        try:
            promoted = self._settle(block, content, score, self._tiers[:came_from])
            with self._lock:
                self.figures.num_promoted += promoted and came_from < len(self._tiers)
        finally:
            self._waiting.release()

    def places(self) -> dict[str, list[int]]:
        """The blocks that each tier has."""
        return {name: tier.blocks() for name, tier in self._tiers}

    def _settle(self, block: int, content: bytes, score: float, tiers: Sequence[tuple[str, SlotTier]]) -> bool:
        """Put a block into the first of the tiers that takes it, and what it displaces into the ones behind."""
        for place, (name, tier) in enumerate(tiers):
            taken = self._write(name, tier, block, content, score)
            if taken is False:
                continue
            behind = self._tiers[place + 1 :]
            # A block is in one tier only, or it would take the room of another block twice.
            for _, other in behind:
                other.drop(block)
            if isinstance(taken, Displaced):
                self._demote(taken, behind)
            return True
        return False

    def _demote(self, displaced: Displaced, tiers: Sequence[tuple[str, SlotTier]]) -> None:
        assert self._counts is not None
        with self._lock:
            self.figures.num_demoted += 1
        # A displaced block may have been overwritten while it was read; a damaged one is forgotten.
        if damaged(self.blocks, *displaced) is None:
            score = float(self._counts.scores(np.array([displaced.block]))[0])
            any(self._write(name, tier, *displaced, score) is not False for name, tier in tiers)

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
        """What a tier has of a block, None if it has not got it whole."""
        content = tier.read(block)
        if content is None or damaged(self.blocks, block, content) is None:
            return content
        content = tier.read_alone(block)  # another process may have written while this one read
        damage = None if content is None else damaged(self.blocks, block, content)
        if damage is None:
            return content
        tier.drop(block)
        with self._lock:
            self.figures.num_damaged += 1
        self._note(f"cache: the copy of {damage} in the {name} is damaged; it is read again from {damage.store.url}")
        return None

    def _from_source(self, block: int) -> bytes:
        """Read twice before it counts as damaged: a byte may have been flipped on the way."""
        damage: BlockPart | None = None
        for _ in range(2):
            parts = self.blocks.parts(block)
            content = b"".join(part.store.read(part.file, part.offset, part.num_bytes) for part in parts)
            damage = damaged(self.blocks, block, content)
            if damage is None:
                return content
        assert damage is not None
        raise ArtifactError(
            f"{damage.store.url}: {damage} are damaged: they are not what was packed (CRC-32); put the file back, or "
            "run the pack stage again"
        )


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
