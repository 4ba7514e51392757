"""A tier: blocks in the slots of one file, which the processes of a host share.

Files of a tier: `slots.bin` has room for a fixed number of blocks, so it cannot grow; `table.bin` says which block each
slot has and which slot each block is in. A process may die in the midst of a write, or write while another reads; so
nothing that is read counts before the caller has compared it with the block's checksum.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

NONE = -1
NUM_CANDIDATES = 8
"""Slots among which the one is looked for that is read least (Redis compares 5 for its approximated LFU)."""
_NEXT_UNUSED, _LAST_FREED, _NUM_HEADERS = 0, 1, 4
_ENTRY_BYTES = 4


class Displaced(NamedTuple):
    """A block that had to give up its slot, with its content."""

    block: int
    content: bytes


class SlotTier:
    """A tier in a folder that `prepare` has made. num_bytes_of: the size of a block."""

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
        self._dice = np.random.default_rng(os.getpid())

    @staticmethod
    def prepare(folder: Path, *, num_slots: int, num_blocks: int, slot_bytes: int, reserve: bool) -> None:
        """Make an empty tier. reserve: take all of its room at once, so that it cannot be missing later. Raises
        `OSError` if there is not so much.
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
        """Bytes of the files of a tier."""
        return num_slots * slot_bytes + _ENTRY_BYTES * _table_len(num_slots, num_blocks)

    @classmethod
    def slots_within(cls, num_bytes: int, *, num_blocks: int, slot_bytes: int) -> int:
        """How many slots a tier may have whose files take at most `num_bytes`, 0 if not one."""
        room = num_bytes - cls.num_bytes(0, num_blocks=num_blocks, slot_bytes=slot_bytes)
        return max(0, min(num_blocks, room // (slot_bytes + _ENTRY_BYTES)))

    def read(self, block: int) -> bytes | None:
        """What the slot of a block has, None if it is in no slot. To be compared with the checksum."""
        slot = int(self._slot_of[block])
        if not 0 <= slot < self.num_slots or self._owners[slot] != block:
            return None
        content = self._content(slot, block)
        return content if self._owners[slot] == block else None

    def read_alone(self, block: int) -> bytes | None:
        """As `read`, while nobody writes: what differs from the checksum then is damaged."""
        with self._alone():
            return self.read(block)

    def write(
        self, block: int, content: bytes, score: float, scores: Callable[[np.ndarray], np.ndarray]
    ) -> bool | Displaced:
        """Give a block a slot if one is free or a block with a lower score has one; returns whether it has one now, or
        the block that was displaced. scores: of blocks. Raises `OSError` if the disk is full.
        """
        with self._alone():
            if self._has(block):
                return True
            displaced, slot = None, self._free_slot()
            if slot == NONE:
                slots = self._dice.integers(self.num_slots, size=NUM_CANDIDATES)
                owners = np.asarray(self._owners[slots])
                of_slots = np.where(owners >= 0, scores(np.maximum(owners, 0)), -1.0)
                least = int(of_slots.argmin())
                if of_slots[least] >= score:
                    return False
                slot, owner = int(slots[least]), int(owners[least])
                displaced = Displaced(owner, self._content(slot, owner)) if owner >= 0 else None
            self._owners[slot] = NONE  # until the content is whole
            os.pwrite(self._data, content, slot * self._slot_bytes)
            self._slot_of[block] = slot
            self._owners[slot] = block
            return displaced or True

    def drop(self, block: int) -> None:
        """Free the slot of a block."""
        with self._alone():
            if self._has(block):
                slot = int(self._slot_of[block])
                self._owners[slot] = NONE
                self._header[_LAST_FREED] = slot

    def blocks(self) -> list[int]:
        """The blocks that have a slot."""
        return [owner for owner in self._owners.tolist() if owner != NONE]

    def close(self) -> None:
        os.close(self._data)
        os.close(self._lock)

    def _has(self, block: int) -> bool:
        slot = int(self._slot_of[block])
        return 0 <= slot < self.num_slots and int(self._owners[slot]) == block

    def _content(self, slot: int, block: int) -> bytes:
        return os.pread(self._data, self._num_bytes_of(block), slot * self._slot_bytes)

    def _free_slot(self) -> int:
        freed, unused = int(self._header[_LAST_FREED]), int(self._header[_NEXT_UNUSED])
        if 0 <= freed < self.num_slots and self._owners[freed] == NONE:
            self._header[_LAST_FREED] = NONE
            return freed
        if 0 <= unused < self.num_slots:
            self._header[_NEXT_UNUSED] = unused + 1
            return unused
        return NONE

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the other threads and processes from writing."""
        with self._thread_lock:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)


def _table_len(num_slots: int, num_blocks: int) -> int:
    return _NUM_HEADERS + num_slots + num_blocks
