"""`open_cache`: the cache of a folder of packed rows and of their images, in use by this process until the block ends.

Processes of a host that open the same rows with the same settings share the tiers. The last one to leave removes them;
where work ends with an error the disk's tier stays, and whoever opens the same rows next goes on with it. What killed
processes left in memory or in the folder is removed at the next start.
"""

import errno
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from modelwright.core.artifacts import make_folder
from modelwright.core.config import constant
from modelwright.core.errors import ConfigError, StorageError
from modelwright.data.rows.cache.layout import BlockLayout, BlockSet, JoinedBlocks
from modelwright.data.rows.cache.reader import DISK, MEMORY, BlockReader, Tiers
from modelwright.data.rows.cache.shared import AccessCounts, SharedFolder, SlotTier, sweep

PREFIX = "modelwright-rows"
MEMORY_SHARE, DISK_SHARE = 0.1, 0.3
"""Shares of the rows and images in memory and on the disk, where no bytes are set."""


@dataclass(frozen=True, kw_only=True)
class RowCacheConfig:
    """Keeps packed rows, and the images that belong to them, near while a stage trains, where they lie on a slow disk
    or on a store (docs/data.md)."""

    enabled: bool = False
    """Read training rows and images through the cache, and before they are needed. Batches are the same without it."""
    memory_bytes: int = 0
    """Bytes of memory on each host for the rows and images that are read most, shared by its processes; 0 is a tenth of
    all."""
    disk_bytes: int = 0
    """Bytes in `folder` for the rows and images that are read next most; 0 is three tenths of all."""
    folder: str = ""
    """Folder on a fast disk of each host; "" keeps rows and images in memory only."""
    num_batches_ahead: int = constant(8)
    """Batches whose rows and images are read before they are needed."""
    num_readers: int = constant(16)
    """Reads of rows at a time, and of images, of each process."""

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

    @classmethod
    def of(cls, config: RowCacheConfig, blocks: BlockSet) -> "TierBudget":
        """The settings, or shares of the bytes of all blocks that have room for a block at least."""
        shares = [max(int(share * blocks.total_bytes), _least_bytes(blocks)) for share in (MEMORY_SHARE, DISK_SHARE)]
        return cls(
            memory=config.memory_bytes or shares[0],
            disk=(config.disk_bytes or shares[1]) if config.folder else 0,
        )


def memory_folder() -> Path:
    """A folder of this host whose files are in memory; on a system that has none, that of temporary files."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def open_cache(
    config: RowCacheConfig, *layouts: BlockLayout[Any], note: Callable[[str], None] = lambda line: None
) -> Iterator[list[BlockReader[Any]]]:
    """A reader of the rows or images of each layout. All of them share the tiers and their budgets.

    note: shows a line to the user. Raises `ConfigError` for a tier that has no room.
    """
    blocks = JoinedBlocks(layouts)
    budget = TierBudget.of(config, blocks)
    disk_room = f" and {budget.disk:,} in {config.folder}" if budget.disk else ""
    note(
        f"cache: {blocks.total_bytes:,} bytes of {blocks.title}, of which {budget.memory:,} fit into memory{disk_room}"
    )
    name = _name(blocks, config, budget)
    with ExitStack() as stack:
        prepare = partial(_prepare_memory, blocks=blocks, budget=budget.memory)
        memory = _shared(stack, memory_folder(), name, MEMORY, prepare)
        counts = AccessCounts(memory, blocks.num_blocks, half_life=blocks.num_items)
        places = [(MEMORY, _tier(memory, blocks, budget.memory - AccessCounts.num_bytes(blocks.num_blocks)))]
        if budget.disk:
            make_folder(Path(config.folder))
            prepare = partial(_prepare_disk, blocks=blocks, budget=budget.disk)
            disk = _shared(stack, Path(config.folder), name, DISK, prepare, keep_after_error=True)
            places.append((DISK, _tier(disk, blocks, budget.disk)))
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
    """Remove what processes that were killed have left of any cache in memory and in the folder."""
    for parent in (memory_folder(), Path(config.folder)):
        if parent.is_absolute() and parent.is_dir():
            sweep(parent, _prefix())


def _name(blocks: BlockSet, config: RowCacheConfig, budget: TierBudget) -> str:
    """The same for the same blocks and tiers only."""
    digest = hashlib.sha256(b"\0".join([blocks.identity, config.folder.encode(), str(budget).encode()]))
    return f"{_prefix()}{digest.hexdigest()[:16]}"


def _prefix() -> str:
    """The beginning of the names of this user's folders of this host: hosts may share a disk."""
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
    """The folder of a tier, in use until the stack is left. All tiers may have the same parent."""
    sweep(parent, _prefix(), keep=name)
    shared = SharedFolder.attach(parent / f"{name}-{tier}", prepare)

    def leave(kind: type[BaseException] | None, *_: object) -> None:
        shared.detach(remove=not (keep_after_error and kind))

    stack.push(leave)
    return shared.path


def _prepare_memory(folder: Path, *, blocks: BlockSet, budget: int) -> None:
    _empty(folder)
    room = budget - AccessCounts.num_bytes(blocks.num_blocks)
    num_slots = _num_slots(blocks, room)
    if not num_slots:
        raise ConfigError(
            f"cache.memory_bytes: {budget:,} has no room for {blocks.title}; set at least {_least_bytes(blocks):,}"
        )
    try:
        AccessCounts.prepare(folder, blocks.num_blocks)
        SlotTier.prepare(
            folder, num_slots=num_slots, num_blocks=blocks.num_blocks, slot_bytes=blocks.block_bytes, reserve=True
        )
    except OSError as error:
        _empty(folder)
        raise _no_room(error, "memory_bytes", budget, folder.parent) from None


def _prepare_disk(folder: Path, *, blocks: BlockSet, budget: int) -> None:
    """What is there already is used: its name says that it has the same rows and the same room."""
    num_slots = _num_slots(blocks, budget)
    if not num_slots:
        raise ConfigError(
            f"cache.disk_bytes: {budget:,} has no room for {blocks.title}; set at least {_least_bytes(blocks):,}"
        )
    if (folder / "whole").exists():
        return
    _empty(folder)
    try:
        free = shutil.disk_usage(folder).free
        if free < SlotTier.num_bytes(num_slots, num_blocks=blocks.num_blocks, slot_bytes=blocks.block_bytes):
            raise OSError(errno.ENOSPC, f"{free:,} bytes are free")
        SlotTier.prepare(
            folder, num_slots=num_slots, num_blocks=blocks.num_blocks, slot_bytes=blocks.block_bytes, reserve=False
        )
        (folder / "whole").touch()
    except OSError as error:
        _empty(folder)
        raise _no_room(error, "disk_bytes", budget, folder.parent) from None


def _no_room(error: OSError, setting: str, budget: int, parent: Path) -> Exception:
    if error.errno == errno.ENOSPC:
        return ConfigError(f"cache.{setting}: {parent} has no room for {budget:,} bytes ({error.strerror}); lower it")
    return StorageError(f"{parent}: cannot be written ({error.strerror}); make it writable, or choose another folder")


def _least_bytes(blocks: BlockSet) -> int:
    """Bytes of a tier of one block with its tables."""
    return SlotTier.num_bytes(1, num_blocks=blocks.num_blocks, slot_bytes=blocks.block_bytes) + AccessCounts.num_bytes(
        blocks.num_blocks
    )


def _num_slots(blocks: BlockSet, room: int) -> int:
    return SlotTier.slots_within(room, num_blocks=blocks.num_blocks, slot_bytes=blocks.block_bytes)


def _tier(folder: Path, blocks: BlockSet, room: int) -> SlotTier:
    num_slots = _num_slots(blocks, room)
    return SlotTier(folder, num_slots=num_slots, num_blocks=blocks.num_blocks, num_bytes_of=blocks.num_bytes_of)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
