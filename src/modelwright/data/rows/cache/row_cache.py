"""`open_cache`: the cache of a folder of packed rows and of their images, which this process uses until the block ends.

Processes of a host that open the same rows with the same settings share the tiers. The last one to leave removes them;
after an error the disk's tier stays, and the next process with the same rows reuses it. The next start also removes the
files that killed processes left in memory or in the folder.

`SharedFolder` is removed by its last user, or by the next start if all were killed. Every user holds a shared lock on
an empty file next to the folder. The kernel releases the locks of a process that dies, however it dies, so a folder
whose file can be locked exclusively is unused.
"""

import errno
import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import StorageError, make_folder
from modelwright.core.config import ConfigError, constant
from modelwright.data.rows.cache.layout import BlockLayout, BlockSet, JoinedBlocks
from modelwright.data.rows.cache.reader import DISK, MEMORY, AccessCounts, BlockReader, SlotTier, Tiers

PREFIX = "modelwright-rows"
_SUFFIX = ".lease"
_READY = "ready"
_POLL_S = 0.01
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
                    path.mkdir(mode=0o700, exist_ok=True)
                    # A process that is killed below leaves a folder that is not ready.
                    (path / _READY).unlink(missing_ok=True)
                    try:
                        prepare(path)
                    except BaseException:
                        _remove(path)
                        raise
                    (path / _READY).touch()
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
