"""`open_cache`: the cache of one folder of packed rows, in use by this process until the block ends.

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

from modelwright.core.artifacts import make_folder
from modelwright.core.errors import ConfigError, StorageError
from modelwright.data.cache.access import AccessCounts
from modelwright.data.cache.blocks import CHECKSUMS, BlockLayout
from modelwright.data.cache.cold import ColdStore
from modelwright.data.cache.config import RowCacheConfig
from modelwright.data.cache.lease import SharedFolder, sweep
from modelwright.data.cache.reader import BlockReader
from modelwright.data.cache.slots import SlotTier
from modelwright.data.cache.tiers import DISK, MEMORY, Tiers
from modelwright.data.loader import read_index, rows_at

PREFIX = "modelwright-rows"
MEMORY_SHARE, DISK_SHARE = 0.1, 0.3
"""Shares of the rows in memory and on the disk, where no bytes are set."""


@dataclass(frozen=True, kw_only=True)
class TierBudget:
    """Bytes of the tiers of a host."""

    memory: int
    disk: int

    @classmethod
    def of(cls, config: RowCacheConfig, layout: BlockLayout) -> "TierBudget":
        """The settings, or shares of the bytes of the rows that have room for a block at least."""
        shares = [max(int(share * layout.total_bytes), _least_bytes(layout)) for share in (MEMORY_SHARE, DISK_SHARE)]
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
    folder: Path, config: RowCacheConfig, *, note: Callable[[str], None] = lambda line: None
) -> Iterator[BlockReader]:
    """A reader of the rows in a shard folder, or of those that its `rows_at.json` names.

    note: shows a line to the user. Raises `ConfigError` for a tier that has no room, and `ArtifactError` for rows
    without checksums.
    """
    layout = BlockLayout(folder, read_index(folder))
    budget = TierBudget.of(config, layout)
    disk_room = f" and {budget.disk:,} in {config.folder}" if budget.disk else ""
    note(f"cache: {layout.total_bytes:,} bytes of rows, of which {budget.memory:,} fit into memory{disk_room}")
    name = _name(folder, config, budget)
    with ExitStack() as stack:
        prepare = partial(_prepare_memory, layout=layout, budget=budget.memory)
        memory = _shared(stack, memory_folder(), name, MEMORY, prepare)
        counts = AccessCounts(memory, layout.num_blocks, half_life=layout.num_rows)
        tiers = [(MEMORY, _tier(memory, layout, budget.memory - AccessCounts.num_bytes(layout.num_blocks)))]
        if budget.disk:
            make_folder(Path(config.folder))
            prepare = partial(_prepare_disk, layout=layout, budget=budget.disk)
            disk = _shared(stack, Path(config.folder), name, DISK, prepare, keep_after_error=True)
            tiers.append((DISK, _tier(disk, layout, budget.disk)))
        for _, tier in tiers:
            stack.callback(tier.close)
        reader = BlockReader(
            Tiers(layout, ColdStore(rows_at(folder)), tiers, counts, note), num_readers=config.num_readers
        )
        stack.callback(reader.close)
        yield reader


def remove_leftovers(config: RowCacheConfig) -> None:
    """Remove what processes that were killed have left of any cache in memory and in the folder."""
    for parent in (memory_folder(), Path(config.folder)):
        if parent.is_absolute() and parent.is_dir():
            sweep(parent, _prefix())


def _name(folder: Path, config: RowCacheConfig, budget: TierBudget) -> str:
    """The same for the same rows and tiers only."""
    parts = [(folder / CHECKSUMS).read_bytes(), rows_at(folder), config.folder, str(budget)]
    digest = hashlib.sha256(b"\0".join(part if isinstance(part, bytes) else part.encode() for part in parts))
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


def _prepare_memory(folder: Path, *, layout: BlockLayout, budget: int) -> None:
    _empty(folder)
    room = budget - AccessCounts.num_bytes(layout.num_blocks)
    num_slots = _num_slots(layout, room)
    if not num_slots:
        raise ConfigError(f"cache.memory_bytes: {budget:,} has no room for rows; set at least {_least_bytes(layout):,}")
    try:
        AccessCounts.prepare(folder, layout.num_blocks)
        SlotTier.prepare(
            folder, num_slots=num_slots, num_blocks=layout.num_blocks, slot_bytes=layout.block_bytes, reserve=True
        )
    except OSError as error:
        _empty(folder)
        raise _no_room(error, "memory_bytes", budget, folder.parent) from None


def _prepare_disk(folder: Path, *, layout: BlockLayout, budget: int) -> None:
    """What is there already is used: its name says that it has the same rows and the same room."""
    num_slots = _num_slots(layout, budget)
    if not num_slots:
        raise ConfigError(f"cache.disk_bytes: {budget:,} has no room for rows; set at least {_least_bytes(layout):,}")
    if (folder / "whole").exists():
        return
    _empty(folder)
    try:
        free = shutil.disk_usage(folder).free
        if free < SlotTier.num_bytes(num_slots, num_blocks=layout.num_blocks, slot_bytes=layout.block_bytes):
            raise OSError(errno.ENOSPC, f"{free:,} bytes are free")
        SlotTier.prepare(
            folder, num_slots=num_slots, num_blocks=layout.num_blocks, slot_bytes=layout.block_bytes, reserve=False
        )
        (folder / "whole").touch()
    except OSError as error:
        _empty(folder)
        raise _no_room(error, "disk_bytes", budget, folder.parent) from None


def _no_room(error: OSError, setting: str, budget: int, parent: Path) -> Exception:
    if error.errno == errno.ENOSPC:
        return ConfigError(f"cache.{setting}: {parent} has no room for {budget:,} bytes ({error.strerror}); lower it")
    return StorageError(f"{parent}: cannot be written ({error.strerror}); make it writable, or choose another folder")


def _least_bytes(layout: BlockLayout) -> int:
    """Bytes of a tier of one block with its tables."""
    return SlotTier.num_bytes(1, num_blocks=layout.num_blocks, slot_bytes=layout.block_bytes) + AccessCounts.num_bytes(
        layout.num_blocks
    )


def _num_slots(layout: BlockLayout, room: int) -> int:
    return SlotTier.slots_within(room, num_blocks=layout.num_blocks, slot_bytes=layout.block_bytes)


def _tier(folder: Path, layout: BlockLayout, room: int) -> SlotTier:
    num_slots = _num_slots(layout, room)
    return SlotTier(folder, num_slots=num_slots, num_blocks=layout.num_blocks, num_bytes_of=layout.num_bytes_of)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
