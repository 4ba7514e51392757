"""Blocks: consecutive rows of a row file, with checksums from when they were packed. The unit that is read and cached.

`pack` writes `checksums.bin` beside the rows: uint32 [blocks, 1 or 2], the CRC-32 of the tokens of each block and,
where the rows have a loss mask, of its mask. Blocks are numbered through all files and never span two of them.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modelwright.core.errors import ArtifactError

CHECKSUMS = "checksums.bin"
BLOCK_BYTES = 64 * 2**10
"""Most bytes of the tokens of a block, unless a single row has more. A shuffled order asks for rows one by one, so most
of a block is read in vain; a store takes about as long for 64 KiB as for one row."""


def rows_of_block(row_bytes: int) -> int:
    """Rows of a block, from the bytes of the tokens of a row."""
    return max(1, BLOCK_BYTES // row_bytes)


def block_checksums(rows: np.ndarray, block_rows: int) -> list[int]:
    """The CRC-32 of each block of rows [N, seq_len] that begin with a block."""
    return [zlib.crc32(rows[first : first + block_rows].tobytes()) for first in range(0, len(rows), block_rows)]


class BlockPart(NamedTuple):
    """The bytes of a block in one file, and what their checksum must be."""

    file: str
    offset: int
    num_bytes: int
    checksum: int

    def __str__(self) -> str:
        return f"bytes {self.offset:,} to {self.offset + self.num_bytes:,} of {self.file}"


class BlockLayout:
    """Which rows are in which block, and where its parts lie. The content of a block is its parts one after another.

    Raises `ArtifactError` if the rows in `folder` were packed without checksums.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.seq_len: int = index["seq_len"]
        self.dtype = np.dtype(index["dtype"])
        self.files = list(index["files"])
        self.names = [name for name in ("tokens", "mask") if name in self.files[0]]
        self._row_bytes = [self.seq_len * dtype.itemsize for dtype in (self.dtype, np.dtype(np.uint8))]
        self.block_rows: int = index.get("block_rows", 0)
        path = folder / CHECKSUMS
        if not self.block_rows or not path.is_file():
            raise ArtifactError(
                f"{folder}: the rows have no checksums, which the cache needs; remove the stage pack from the run that "
                "packed them and run it again, or set cache.enabled to false"
            )
        num_rows = [file["rows"] for file in self.files]
        self._file_starts = np.cumsum([0, *num_rows])
        self._first_blocks = np.cumsum([0, *(-(-count // self.block_rows) for count in num_rows)])
        self.num_blocks = int(self._first_blocks[-1])
        self.num_rows = int(self._file_starts[-1])
        if path.stat().st_size != 4 * self.num_blocks * len(self.names):
            raise ArtifactError(f"{path}: is truncated; run the pack stage again")
        self._checksums = np.memmap(path, np.uint32, mode="r", shape=(self.num_blocks, len(self.names)))

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.block_rows * sum(self._row_bytes[: len(self.names)])

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_rows * sum(self._row_bytes[: len(self.names)])

    def block_of(self, row: int) -> tuple[int, int]:
        """The block that a row is in, and the row's place in it."""
        file = int(np.searchsorted(self._file_starts, row, side="right")) - 1
        block, place = divmod(row - int(self._file_starts[file]), self.block_rows)
        return int(self._first_blocks[file]) + block, place

    def num_rows_of(self, block: int) -> int:
        """Rows of a block; the last one of a file may have fewer."""
        file, first = self._place(block)
        return min(self.block_rows, self.files[file]["rows"] - first)

    def num_bytes_of(self, block: int) -> int:
        """Bytes of the content of a block."""
        return self.num_rows_of(block) * sum(self._row_bytes[: len(self.names)])

    def parts(self, block: int) -> list[BlockPart]:
        """The parts of a block, in the order in which its content has them."""
        (file, first), num_rows = self._place(block), self.num_rows_of(block)
        sizes = zip(self.names, self._row_bytes, self._checksums[block].tolist(), strict=False)
        return [
            BlockPart(self.files[file][name], first * row_bytes, num_rows * row_bytes, checksum)
            for name, row_bytes, checksum in sizes
        ]

    def damaged(self, block: int, content: bytes) -> BlockPart | None:
        """The part of a block's content that differs from what was packed; None if all is as it was."""
        at = 0
        for part in self.parts(block):
            if zlib.crc32(memoryview(content)[at : at + part.num_bytes]) != part.checksum:
                return part
            at += part.num_bytes
        return None

    def rows(self, block: int, content: bytes) -> tuple[np.ndarray, np.ndarray | None]:
        """The tokens [rows, seq_len] of a block and their loss mask [rows, seq_len] uint8, None if it has none."""
        count = self.num_rows_of(block) * self.seq_len
        tokens = np.frombuffer(content, self.dtype, count=count).reshape(-1, self.seq_len)
        if len(self.names) == 1:
            return tokens, None
        return tokens, np.frombuffer(content, np.uint8, offset=tokens.nbytes).reshape(-1, self.seq_len)

    def _place(self, block: int) -> tuple[int, int]:
        """The number of a block's file, and the block's first row in it."""
        file = int(np.searchsorted(self._first_blocks, block, side="right")) - 1
        return file, (block - int(self._first_blocks[file])) * self.block_rows
