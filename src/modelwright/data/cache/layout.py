"""Blocks: consecutive bytes of large files, with checksums from when they were written. They are read and cached whole.

`BlockLayout` is what tiers and readers know of the blocks of a folder. That of packed rows is in `blocks.py`, that of
images in `data/images/blocks.py`.
"""

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

from modelwright.data.cache.cold import ColdStore

BLOCK_BYTES = 64 * 2**10
"""Most bytes of a block, unless a single row has more. A shuffled order asks for rows and images one by one, so most of
a block is read in vain; a store takes about as long for 64 KiB as for one row."""

Items = TypeVar("Items", covariant=True)


class BlockPart(NamedTuple):
    """The bytes of a block in one file, and what their checksum must be. store: has the file."""

    store: ColdStore
    file: str
    offset: int
    num_bytes: int
    checksum: int

    def __str__(self) -> str:
        return f"bytes {self.offset:,} to {self.offset + self.num_bytes:,} of {self.file}"


class BlockSet(Protocol):
    """Numbered blocks. The content of a block is its parts one after another."""

    @property
    def title(self) -> str:
        """What they hold, for messages: `rows`."""
        ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_items(self) -> int:
        """Rows or images in all blocks."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        ...

    @property
    def identity(self) -> bytes:
        """The same for the same blocks at the same place only."""
        ...

    def num_bytes_of(self, block: int) -> int:
        """Bytes of the content of a block."""
        ...

    def parts(self, block: int) -> list[BlockPart]:
        """The parts of a block, in the order in which its content has them."""
        ...


class BlockLayout(BlockSet, Protocol[Items]):
    """Blocks, and which rows or images are in them."""

    def blocks_of(self, item: int) -> Sequence[int]:
        """The blocks that an item is in, in the order of its parts."""
        ...

    def cut(self, item: int, block: int, content: bytes) -> Any:
        """A copy of what a block has of an item."""
        ...

    def join(self, cuts: Sequence[Sequence[Any]]) -> Items:
        """Items from what their blocks have of each."""
        ...


class JoinedBlocks:
    """The blocks of several layouts, numbered through: they share tiers, and the budgets of these."""

    def __init__(self, layouts: Sequence[BlockSet]) -> None:
        self._layouts = layouts
        self.starts = list(accumulate((one.num_blocks for one in layouts), initial=0))
        """The number of the first block of each layout, and that of all blocks."""
        self.title = " and ".join(one.title for one in layouts)
        self.num_blocks = self.starts[-1]
        self.num_items = sum(one.num_items for one in layouts)
        self.block_bytes = max(one.block_bytes for one in layouts)
        self.total_bytes = sum(one.total_bytes for one in layouts)
        self.identity = b"\0".join(one.identity for one in layouts)

    def num_bytes_of(self, block: int) -> int:
        layout, own = self._find(block)
        return layout.num_bytes_of(own)

    def parts(self, block: int) -> list[BlockPart]:
        layout, own = self._find(block)
        return layout.parts(own)

    def _find(self, block: int) -> tuple[BlockSet, int]:
        number = bisect_right(self.starts, block) - 1
        return self._layouts[number], block - self.starts[number]


def damaged(blocks: BlockSet, block: int, content: bytes) -> BlockPart | None:
    """The part of a block's content that differs from what was written; None if all is as it was."""
    at = 0
    for part in blocks.parts(block):
        if zlib.crc32(memoryview(content)[at : at + part.num_bytes]) != part.checksum:
            return part
        at += part.num_bytes
    return None
