"""`open_cache`: the cache of a folder of packed rows and of their images, which this process uses until the block ends.

Processes of a host that open the same rows with the same settings share the tiers. The last one to leave removes them;
after an error the disk's tier stays, and the next process with the same rows reuses it. The next start also removes the
files that killed processes left in memory or in the folder.

State that the processes of a host share in files: folders, slots for blocks, and counts of reads.

`SharedFolder` is removed by its last user, or by the next start if all were killed. Every user holds a shared lock on
an empty file next to the folder. The kernel releases the locks of a process that dies, however it dies, so a folder
whose file can be locked exclusively is unused.

`SlotTier` keeps blocks in the slots of one file: `slots.bin` has a fixed number of slots, so it cannot grow;
`table.bin` maps slots to blocks and blocks to slots. A process may die during a write, or write while another reads; so
the caller must compare all that is read with the block's checksum.
"""

import errno
import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modelwright.core.artifacts import make_folder
from modelwright.core.config import constant
from modelwright.core.errors import ConfigError, StorageError
from modelwright.data.rows.cache.layout import BlockLayout, BlockSet, JoinedBlocks
from modelwright.data.rows.cache.reader import DISK, MEMORY, BlockReader, Tiers

_FILE = "access.bin"
_HEADER_BYTES = 8
NONE = -1
NUM_CANDIDATES = 8
"""Randomly drawn slots of which the least read one is displaced (Redis compares 5 for its approximated LFU)."""
_NEXT_UNUSED, _LAST_FREED, _NUM_HEADERS = 0, 1, 4
"""Entries of the table's header: the first slot that was never used, one that was freed, and two spare ones."""
_ENTRY_BYTES = 4
_SUFFIX = ".lease"
_READY = "ready"
_POLL_S = 0.01


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
class SharedFolder:
    """A folder that this process uses, and perhaps others do."""

    path: Path
    _handle: int

    @classmethod
    def attach(cls, path: Path, prepare: Callable[[Path], None]) -> "SharedFolder":
        """Begins the use of a folder. The first user calls `prepare`, which may find files of killed users."""
        while True:
            # Programs that this process starts must not inherit the handle, or they would keep the lock.
            handle = os.open(path.with_name(path.name + _SUFFIX), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _try_alone(handle) and _is_current(handle, path):
                    _prepare(path, prepare)
                # The exclusive lock is given up before the shared one is there: another process may come in between.
                fcntl.flock(handle, fcntl.LOCK_SH)
                if _is_current(handle, path) and (path / _READY).exists():
                    return cls(path, handle)
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
            time.sleep(_POLL_S)

    def detach(self, *, remove: bool) -> None:
        """Ends the use. remove: also removes the folder, if this is its last user."""
        # The exclusive lock is granted to the last user only.
        if remove and _try_alone(self._handle):
            _remove(self.path)
        os.close(self._handle)


def sweep(parent: Path, prefix: str, *, keep: str = "") -> None:
    """Removes the unused shared folders with this prefix, except those whose names begin with `keep`."""
    names = {path.name.removesuffix(_SUFFIX) for path in parent.glob(f"{prefix}*")}
    for name in sorted(name for name in names if not keep or not name.startswith(keep)):
        handle = os.open(parent / (name + _SUFFIX), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if _try_alone(handle) and _is_current(handle, parent / name):
                _remove(parent / name)
        finally:
            os.close(handle)


def _prepare(path: Path, prepare: Callable[[Path], None]) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    # A process that is killed below leaves a folder that is not ready.
    (path / _READY).unlink(missing_ok=True)
    try:
        prepare(path)
    except BaseException:
        _remove(path)
        raise
    (path / _READY).touch()


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.with_name(path.name + _SUFFIX).unlink(missing_ok=True)


def _try_alone(handle: int) -> bool:
    """Takes the exclusive lock if nobody else has one. A shared lock is lost when that fails."""
    with suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_current(handle: int, path: Path) -> bool:
    """Returns True if the locked file is still the one of the folder: its last user may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path.with_name(path.name + _SUFFIX)))
    except FileNotFoundError:
        return False


PREFIX = "modelwright-rows"
MEMORY_SHARE, DISK_SHARE = 0.1, 0.3
"""Shares of the rows and images in memory and on the disk, by default."""


@dataclass(frozen=True, kw_only=True)
class RowCacheConfig:
    """Cache of packed rows and images during training, for a slow disk or a store (docs/data.md)."""

    enabled: bool = False
    """True reads training rows and images through the cache, and before they are needed. Batches stay the same."""
    memory_bytes: int = 0
    """Bytes of memory per host, for all of its processes and the rows and images read most; 0 is a tenth of all."""
    disk_bytes: int = 0
    """Bytes in `folder` for the rows and images that are read less often; 0 is three tenths of all."""
    folder: str = ""
    """Folder on a fast disk of each host; "" keeps rows and images in memory only."""
    num_batches_ahead: int = constant(8)
    """Number of batches whose rows and images are read before they are needed."""
    num_readers: int = constant(16)
    """Number of concurrent reads of rows, and of images, in each process."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must be 0 or more, got {getattr(self, name)}")
        if self.disk_bytes and not self.folder:
            raise ConfigError("folder: is empty, but disk_bytes is set; name a folder on a fast local disk")
        if self.num_batches_ahead < 0 or self.num_readers < 1:
            raise ConfigError("num_batches_ahead, num_readers: must be 0 or more, and 1 or more")


@dataclass(frozen=True, kw_only=True)
class TierBudget:
    """Bytes of the tiers of a host."""

    memory: int
    disk: int


def memory_folder() -> Path:
    """Returns a folder of this host whose files are in memory, or else the folder of temporary files."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def open_cache(
    config: RowCacheConfig, *layouts: BlockLayout[Any], note: Callable[[str], None] = lambda line: None
) -> Iterator[list[BlockReader[Any]]]:
    """Opens a reader of the rows or images of each layout. All of them share the tiers and their budgets.

    note: shows a line to the user. Raises `ConfigError` for a tier that is too small for a block.
    """
    blocks = JoinedBlocks(layouts)
    shares = [max(int(share * blocks.total_bytes), _least_bytes(blocks)) for share in (MEMORY_SHARE, DISK_SHARE)]
    budget = TierBudget(
        memory=config.memory_bytes or shares[0], disk=(config.disk_bytes or shares[1]) if config.folder else 0
    )
    disk_room = f" and {budget.disk:,} in {config.folder}" if budget.disk else ""
    note(
        f"cache: {blocks.total_bytes:,} bytes of {blocks.title}, of which {budget.memory:,} fit into memory{disk_room}"
    )
    # Only the same blocks with the same tiers have this name, so what is found under it can be used.
    digest = hashlib.sha256(b"\0".join([blocks.identity, config.folder.encode(), str(budget).encode()]))
    name = f"{_prefix()}{digest.hexdigest()[:16]}"
    with ExitStack() as stack:
        prepare = partial(_prepare_tier, blocks=blocks, tier=MEMORY, budget=budget.memory)
        memory = _shared(stack, memory_folder(), name, MEMORY, prepare)
        counts = AccessCounts(memory, blocks.num_blocks, half_life=blocks.num_items)
        places = [(MEMORY, _tier(memory, blocks, budget.memory - AccessCounts.num_bytes(blocks.num_blocks)))]
        if budget.disk:
            make_folder(Path(config.folder))
            prepare = partial(_prepare_tier, blocks=blocks, tier=DISK, budget=budget.disk)
            disk = _shared(stack, Path(config.folder), name, DISK, prepare, keep_after_error=True)
            places.append((DISK, _tier(disk, blocks, budget.disk)))
        # Callbacks run in reverse: readers end before the tiers that they write to, these before their files close.
        for _, tier in places:
            stack.callback(tier.close)
        tiers = Tiers(blocks, places, counts, note)
        stack.callback(tiers.close)
        readers = [
            BlockReader(tiers, layout, num_readers=config.num_readers, first_block=first)
            for layout, first in zip(layouts, blocks.starts, strict=False)
        ]
        for reader in readers:
            stack.callback(reader.close)
        yield readers


def remove_leftovers(config: RowCacheConfig) -> None:
    """Removes the files of any cache that killed processes left in memory and in the folder."""
    for parent in (memory_folder(), Path(config.folder)):
        if parent.is_absolute() and parent.is_dir():
            sweep(parent, _prefix())


def _prefix() -> str:
    """Returns the prefix of the names of this user's folders of this host: hosts may share a disk."""
    host = "".join(c if c.isalnum() else "_" for c in platform.node())
    return f"{PREFIX}-{host}-{os.getuid()}-"


def _shared(
    stack: ExitStack,
    parent: Path,
    name: str,
    tier: str,
    prepare: Callable[[Path], None],
    *,
    keep_after_error: bool = False,
) -> Path:
    """Returns the folder of a tier, in use until the stack is left. All tiers may have the same parent."""
    sweep(parent, _prefix(), keep=name)
    shared = SharedFolder.attach(parent / f"{name}-{tier}", prepare)

    def leave(kind: type[BaseException] | None, *_: object) -> None:
        shared.detach(remove=not (keep_after_error and kind))

    stack.push(leave)
    return shared.path


def _prepare_tier(folder: Path, *, blocks: BlockSet, tier: str, budget: int) -> None:
    """Makes the files of a tier; those of a disk that a run left behind are kept. The memory also has the counts."""
    in_memory, setting = tier == MEMORY, f"cache.{tier}_bytes"
    sizes = {"num_blocks": blocks.num_blocks, "slot_bytes": blocks.block_bytes}
    room = budget - (AccessCounts.num_bytes(blocks.num_blocks) if in_memory else 0)
    num_slots = SlotTier.slots_within(room, **sizes)
    if not num_slots:
        least = _least_bytes(blocks)
        raise ConfigError(f"{setting}: {budget:,} is too small for {blocks.title}; set at least {least:,}")
    if not in_memory and (folder / "whole").exists():
        return
    _empty(folder)
    try:
        if in_memory:
            AccessCounts.prepare(folder, blocks.num_blocks)
        else:  # memory is reserved below, which fails at once; a disk is only checked
            free = shutil.disk_usage(folder).free
            if free < SlotTier.num_bytes(num_slots, **sizes):
                raise OSError(errno.ENOSPC, f"{free:,} bytes are free")
        SlotTier.prepare(folder, num_slots=num_slots, **sizes, reserve=in_memory)
        if not in_memory:
            (folder / "whole").touch()
    except OSError as error:
        _empty(folder)
        parent, reason = folder.parent, error.strerror
        if error.errno == errno.ENOSPC:
            raise ConfigError(f"{setting}: {parent} lacks room for {budget:,} bytes ({reason}); lower it") from None
        text = f"{parent}: cannot be written ({reason}); make it writable, or choose another folder"
        raise StorageError(text) from None


def _least_bytes(blocks: BlockSet) -> int:
    """Returns the size of a tier of one block, with its tables."""
    return SlotTier.num_bytes(1, num_blocks=blocks.num_blocks, slot_bytes=blocks.block_bytes) + AccessCounts.num_bytes(
        blocks.num_blocks
    )


def _tier(folder: Path, blocks: BlockSet, room: int) -> SlotTier:
    num_slots = SlotTier.slots_within(room, num_blocks=blocks.num_blocks, slot_bytes=blocks.block_bytes)
    return SlotTier(folder, num_slots=num_slots, num_blocks=blocks.num_blocks, num_bytes_of=blocks.num_bytes_of)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
