"""Reads blocks from the nearest tier that has them: memory, the local disk, or the source that keeps their files.

Every block that is read, from any tier, is compared with its checksum at packing. A block gets a free slot, or that of
a block that was read less often: so it moves towards memory when it is read more than others, and the other one moves
away.

`SlotTier` keeps blocks in the slots of one file: `slots.bin` has a fixed number of slots, so it cannot grow;
`table.bin` maps slots to blocks and blocks to slots. A process may die during a write, or write while another reads; so
the caller must compare all that is read with the block's checksum.

`BlockReader` reads blocks in threads, ahead where the order is known, and cuts rows and images out of them.
"""

import fcntl
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple

import numpy as np

from modelwright.core.artifacts import ArtifactError
from modelwright.data.rows.cache.layout import BlockLayout, BlockPart, BlockSet, Items, damaged

_FILE = "access.bin"
_HEADER_BYTES = 8
NONE = -1
NUM_CANDIDATES = 8
"""Randomly drawn slots of which the least read one is displaced (Redis compares 5 for its approximated LFU)."""
_NEXT_UNUSED, _LAST_FREED, _NUM_HEADERS = 0, 1, 4
"""Entries of the table's header: the first slot that was never used, one that was freed, and two spare ones."""
_ENTRY_BYTES = 4
MOST_WAITING = 64
"""Maximum number of blocks that wait for a slot in a tier; further ones are not cached this time."""
MEMORY, DISK, SOURCE = "memory", "disk", "source"
NUM_READERS = 16
"""Number of concurrent reads where files are on a store and no cache is configured."""

_Cuts = tuple[Future[dict[int, Any]], ...]
"""One future for each block of an item: the parts of items in that block, by item."""


class AccessCounts:
    """Read counts of blocks, in a folder that `prepare` has made; a read counts half after `half_life` further ones.

    Processes write without a lock: a lost count changes only which block is kept.
    """

    def __init__(self, folder: Path, num_blocks: int, *, half_life: int) -> None:
        self._half_life = half_life
        path = folder / _FILE
        self._clock = np.memmap(path, np.int64, mode="r+", shape=(1,))
        self._scores = np.memmap(path, np.float32, mode="r+", offset=_HEADER_BYTES, shape=(num_blocks,))
        times_at = self.num_bytes(num_blocks) - 8 * num_blocks
        self._read_at = np.memmap(path, np.int64, mode="r+", offset=times_at, shape=(num_blocks,))

    @classmethod
    def num_bytes(cls, num_blocks: int) -> int:
        """Size of the counts of `num_blocks` blocks."""
        # Float32 scores, padded to a multiple of 8 bytes so that the int64 times after them are aligned.
        return _HEADER_BYTES + -(-4 * num_blocks // 8) * 8 + 8 * num_blocks

    @classmethod
    def prepare(cls, folder: Path, num_blocks: int) -> None:
        (folder / _FILE).write_bytes(bytes(cls.num_bytes(num_blocks)))

    def count(self, block: int) -> float:
        """Counts a read of a block; returns its score before."""
        now = int(self._clock[0]) + 1
        before = float(self._aged(np.array([block]), now)[0])
        self._scores[block], self._read_at[block], self._clock[0] = before + 1.0, now, now
        return before

    def scores(self, blocks: np.ndarray) -> np.ndarray:
        """Returns the scores of blocks [N], float64 [N]."""
        return self._aged(blocks, int(self._clock[0]))

    def _aged(self, blocks: np.ndarray, now: int) -> np.ndarray:
        ages = np.maximum(now - self._read_at[blocks], 0)  # another process may have counted after `now` was read
        return self._scores[blocks] * np.exp2(-ages / self._half_life)


class Displaced(NamedTuple):
    """A block that lost its slot, with its content."""

    block: int
    content: bytes


class SlotTier:
    """A tier in a folder that `prepare` has made. num_bytes_of: returns the size of a block."""

    def __init__(self, folder: Path, *, num_slots: int, num_blocks: int, num_bytes_of: Callable[[int], int]) -> None:
        self.num_slots = num_slots
        self._num_bytes_of = num_bytes_of
        self._slot_bytes = (folder / "slots.bin").stat().st_size // num_slots
        self._data = os.open(folder / "slots.bin", os.O_RDWR | os.O_CLOEXEC)
        self._lock = os.open(folder / "table.bin", os.O_RDWR | os.O_CLOEXEC)
        self._thread_lock = threading.Lock()
        table = np.memmap(folder / "table.bin", np.int32, mode="r+", shape=(_table_len(num_slots, num_blocks),))
        self._header = table[:_NUM_HEADERS]
        self._owners = table[_NUM_HEADERS : _NUM_HEADERS + num_slots]
        self._slot_of = table[_NUM_HEADERS + num_slots :]
        self._dice = np.random.default_rng(os.getpid())  # processes should not compete for the same slots

    @staticmethod
    def prepare(folder: Path, *, num_slots: int, num_blocks: int, slot_bytes: int, reserve: bool) -> None:
        """Makes an empty tier. reserve: allocates the whole file at once, so that no later write can fail for lack of
        space. Raises `OSError` if the space is missing now.
        """
        table = np.full(_table_len(num_slots, num_blocks), NONE, dtype=np.int32)
        table[:_NUM_HEADERS] = (0, NONE, 0, 0)
        table.tofile(folder / "table.bin")
        with open(folder / "slots.bin", "wb") as file:
            if reserve and hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(file.fileno(), 0, num_slots * slot_bytes)
            file.truncate(num_slots * slot_bytes)

    @staticmethod
    def num_bytes(num_slots: int, *, num_blocks: int, slot_bytes: int) -> int:
        """Size of the files of a tier."""
        return num_slots * slot_bytes + _ENTRY_BYTES * _table_len(num_slots, num_blocks)

    @classmethod
    def slots_within(cls, num_bytes: int, *, num_blocks: int, slot_bytes: int) -> int:
        """Number of slots of a tier whose files take at most `num_bytes`; 0 if that is too little for one."""
        room = num_bytes - cls.num_bytes(0, num_blocks=num_blocks, slot_bytes=slot_bytes)
        return max(0, min(num_blocks, room // (slot_bytes + _ENTRY_BYTES)))

    def read(self, block: int) -> bytes | None:
        """Returns the content of a block's slot, None without a slot. The caller must compare it with the checksum."""
        slot = int(self._slot_of[block])
        if not 0 <= slot < self.num_slots or self._owners[slot] != block:
            return None
        content = self._content(slot, block)
        return content if self._owners[slot] == block else None  # it may have been displaced meanwhile

    def write(
        self, block: int, content: bytes, score: float, scores: Callable[[np.ndarray], np.ndarray]
    ) -> bool | Displaced:
        """Gives a block a slot if one is free or holds a block with a lower score. Returns True if it has one, False if
        not, or the block that it displaced. scores: returns the scores of blocks. Raises `OSError` if the disk is full.
        """
        with self.alone():
            if self._has(block):
                return True
            displaced = None
            freed, unused = int(self._header[_LAST_FREED]), int(self._header[_NEXT_UNUSED])
            # A process may have died between two writes to the table, so no entry is trusted.
            if 0 <= freed < self.num_slots and self._owners[freed] == NONE:
                self._header[_LAST_FREED] = NONE
                slot = freed
            elif 0 <= unused < self.num_slots:
                self._header[_NEXT_UNUSED] = unused + 1
                slot = unused
            else:
                slots = self._dice.integers(self.num_slots, size=NUM_CANDIDATES)
                owners = np.asarray(self._owners[slots])
                of_slots = np.where(owners >= 0, scores(np.maximum(owners, 0)), -1.0)
                least = int(of_slots.argmin())
                if of_slots[least] >= score:
                    return False
                slot, owner = int(slots[least]), int(owners[least])
                displaced = Displaced(owner, self._content(slot, owner)) if owner >= 0 else None
            # The slot has no owner until its content is whole.
            self._owners[slot] = NONE
            os.pwrite(self._data, content, slot * self._slot_bytes)
            self._slot_of[block] = slot
            self._owners[slot] = block
            return displaced or True

    def drop(self, block: int) -> None:
        """Frees the slot of a block."""
        with self.alone():
            if self._has(block):
                slot = int(self._slot_of[block])
                self._owners[slot] = NONE
                self._header[_LAST_FREED] = slot

    def blocks(self) -> list[int]:
        """Returns the blocks that have a slot."""
        return [owner for owner in self._owners.tolist() if owner != NONE]

    def close(self) -> None:
        os.close(self._data)
        os.close(self._lock)

    def _has(self, block: int) -> bool:
        slot = int(self._slot_of[block])
        return 0 <= slot < self.num_slots and int(self._owners[slot]) == block

    def _content(self, slot: int, block: int) -> bytes:
        return os.pread(self._data, self._num_bytes_of(block), slot * self._slot_bytes)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps the other threads and processes from writing."""
        with self._thread_lock:  # `flock` belongs to the open file, which the threads of a process share
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)


def _table_len(num_slots: int, num_blocks: int) -> int:
    return _NUM_HEADERS + num_slots + num_blocks


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
            damage: BlockPart | None = None
            for _ in range(2):  # a byte may have been flipped in transit, which a second read mends
                parts = self.blocks.parts(block)
                content = b"".join(part.store.read(part.file, part.offset, part.num_bytes) for part in parts)
                damage = damaged(self.blocks, block, content)
                if damage is None:
                    break
            else:
                assert damage is not None
                raise ArtifactError(
                    f"{damage.store.url}: {damage} are damaged: their CRC-32 differs from that at packing; put the "
                    "file back, or run the pack stage again"
                )
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
