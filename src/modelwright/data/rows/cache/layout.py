"""Blocks: consecutive bytes of large files, with their checksums at packing. They are read and cached as a whole.

`BlockLayout` is the interface of tiers and readers to the blocks of a folder. `RowLayout` is that of packed rows; that
of images is in `data/images/store.py`. `pack` writes `checksums.bin` next to the rows: uint32 [blocks, 1 or 2], the
CRC-32 of the tokens of each block and of any loss mask. Blocks are numbered through all files, of which none is split.

The source of the files of rows and images: a folder, or any store that fsspec has a package for.
"""

import errno
import json
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import fsspec
import fsspec.core
import numpy as np

from modelwright.core.artifacts import ArtifactError, StorageError, writing
from modelwright.core.config import ConfigError

ROWS_AT = "rows_at.json"
"""File next to rows and images that another run has packed: `{"url": ...}` names the folder of their large files."""
NUM_TRIES = 5
FIRST_PAUSE_S = 0.2
"""Pause before the second try; it doubles for every further one."""
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that another try cannot mend."""


def rows_at(folder: Path) -> str:
    """Returns the folder or URL with the large files of a folder of rows or images."""
    try:
        return json.loads((folder / ROWS_AT).read_text(encoding="utf-8"))["url"]
    except FileNotFoundError:
        return str(folder)


def is_remote(place: str) -> bool:
    """Returns True for a URL of a store, where files cannot be mapped into memory."""
    return "://" in place


def open_store(url: str, setting: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the file system of a path or URL, and the path on it. Raises `ConfigError`, which names the setting, if
    fsspec does not know the store or the store's package is missing.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = "pip install 'modelwright[remote]'" if url.startswith("s3") else str(error)
        raise ConfigError(f"{setting}: {url} needs a package: {package}") from None
    except ValueError as error:
        raise ConfigError(f"{setting}: {url} is not a usable URL ({error})") from None
    return filesystem, str(path).rstrip("/")


@dataclass
class ColdStore:
    """Reads parts of the files at `url`, from any thread, with retries after transient errors."""

    url: str
    pause_s: float = FIRST_PAUSE_S
    _opened: tuple[fsspec.AbstractFileSystem, str] | None = None
    _opening: threading.Lock = field(default_factory=threading.Lock)

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Reads bytes of a file. Raises `ArtifactError` if it is missing or short, `StorageError` for other errors."""
        place, pause_s = f"{self.url.rstrip('/')}/{name}", self.pause_s
        for attempt in range(1, NUM_TRIES + 1):
            try:
                filesystem, path = self._open()
                content: Any = filesystem.cat_file(f"{path}/{name}", start=offset, end=offset + num_bytes)
            except FileNotFoundError:
                raise ArtifactError(f"{place}: is missing; put the file back, or run the pack stage again") from None
            except ConfigError:
                raise
            # Each store has its own types of errors.
            except Exception as error:
                if attempt == NUM_TRIES or isinstance(error, _FINAL):
                    raise self._unreadable(name, error) from None
                time.sleep(pause_s)
                pause_s *= 2
                continue
            if len(content) != num_bytes:
                raise ArtifactError(f"{place}: is truncated; put the file back, or run the pack stage again")
            return bytes(content)
        raise AssertionError("unreachable")

    def read_whole(self, name: str) -> bytes | None:
        """Returns the content of a small file, None if it is missing. Raises `StorageError` if it cannot be read."""
        filesystem, path = self._open()
        with self._reporting(name):
            try:
                content: Any = filesystem.cat_file(f"{path}/{name}")
            except FileNotFoundError:
                return None
        return bytes(content)

    def copy(self, name: str, target: Path) -> None:
        """Copies a file. Raises `StorageError` if it cannot be read, or the disk is full."""
        filesystem, path = self._open()
        with writing(target), self._reporting(name):
            filesystem.get_file(f"{path}/{name}", str(target))

    @contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, ConfigError):
            raise
        except Exception as error:  # each store has errors of its own
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # the target's fault, which `writing` reports
            raise self._unreadable(name, error) from None

    def _unreadable(self, name: str, error: Exception) -> StorageError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return StorageError(
            f"{self.url.rstrip('/')}/{name}: cannot be read ({reason}); check the address, the credentials and the "
            "network"
        )

    def _open(self) -> tuple[fsspec.AbstractFileSystem, str]:
        with self._opening:
            if self._opened is None:
                self._opened = open_store(self.url, "rows_from")
            return self._opened


BLOCK_BYTES = 64 * 2**10
"""Maximum bytes of a block, unless a single row has more. A shuffled order needs rows and images one by one, so most of
a block is read in vain; but a store takes about as long for 64 KiB as for one row."""

Items = TypeVar("Items", covariant=True)
CHECKSUMS = "checksums.bin"

Row = tuple[np.ndarray, np.ndarray | None]
"""Tokens [seq_len], and the loss mask [seq_len] where the rows have one."""


class BlockPart(NamedTuple):
    """Bytes of a block in one file of `store`, with their CRC-32."""

    store: ColdStore
    file: str
    offset: int
    num_bytes: int
    checksum: int

    def __str__(self) -> str:
        return f"bytes {self.offset:,} to {self.offset + self.num_bytes:,} of {self.file}"


class BlockSet(Protocol):
    """Numbered blocks. The content of a block is its parts one after another."""

    title: str
    """Name of the items in messages: `rows`."""
    num_blocks: int
    num_items: int
    """Number of rows or images in all blocks."""
    block_bytes: int
    """Bytes of a whole block."""
    total_bytes: int
    """Bytes of all blocks."""

    @property
    def identity(self) -> bytes:
        """Bytes that are equal only for equal blocks at the same place."""
        ...

    def num_bytes_of(self, block: int) -> int:
        """Returns the size of a block's content."""
        ...

    def parts(self, block: int) -> list[BlockPart]:
        """Returns the parts of a block, in the order of its content."""
        ...


class BlockLayout(BlockSet, Protocol[Items]):
    """Blocks, with the mapping of rows or images to them."""

    def blocks_of(self, item: int) -> Sequence[int]:
        """Returns the blocks of an item, in the order of its parts."""
        ...

    def cut(self, item: int, block: int, content: bytes) -> Any:
        """Returns a copy of the part of an item in a block."""
        ...

    def join(self, cuts: Sequence[Sequence[Any]]) -> Items:
        """Joins the parts of each item."""
        ...


class JoinedBlocks:
    """The blocks of several layouts with consecutive numbers: they share tiers and their budgets."""

    def __init__(self, layouts: Sequence[BlockSet]) -> None:
        self._layouts = layouts
        self.starts = list(accumulate((one.num_blocks for one in layouts), initial=0))
        """Number of the first block of each layout, and the number of all blocks."""
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
    """Returns the first part of a block's content with a wrong checksum; None if all are right."""
    at = 0
    for part in blocks.parts(block):
        if zlib.crc32(memoryview(content)[at : at + part.num_bytes]) != part.checksum:
            return part
        at += part.num_bytes
    return None


def rows_of_block(row_bytes: int) -> int:
    """Returns the number of rows in a block. row_bytes: bytes of a row's tokens."""
    return max(1, BLOCK_BYTES // row_bytes)


class RowLayout:
    """`BlockLayout` of the rows of a shard folder, whose files are in `store`.

    Raises `ArtifactError` if the rows in `folder` were packed without checksums.
    """

    title = "rows"

    def __init__(self, folder: Path, index: Mapping[str, Any], store: ColdStore) -> None:
        self.store = store
        self.seq_len: int = index["seq_len"]
        self.dtype = np.dtype(index["dtype"])
        self.files = list(index["files"])
        self.names = [name for name in ("tokens", "mask") if name in self.files[0]]
        self._row_bytes = [self.seq_len * dtype.itemsize for dtype in (self.dtype, np.dtype(np.uint8))]
        self.block_rows: int = index.get("block_rows", 0)
        path = folder / CHECKSUMS
        if not self.block_rows or not path.is_file():
            raise ArtifactError(
                f"{folder}: the rows lack checksums, which the cache needs; remove the stage pack from the run that "
                "packed them and run it again, or set cache.enabled to false"
            )
        num_rows = [file["rows"] for file in self.files]
        # Rounded up per file: a block never spans two files.
        self._file_starts = np.cumsum([0, *num_rows])
        self._first_blocks = np.cumsum([0, *(-(-count // self.block_rows) for count in num_rows)])
        self.num_blocks = int(self._first_blocks[-1])
        self.num_items = int(self._file_starts[-1])
        self.block_bytes = self.block_rows * sum(self._row_bytes[: len(self.names)])
        self.total_bytes = self.num_items * sum(self._row_bytes[: len(self.names)])
        if path.stat().st_size != 4 * self.num_blocks * len(self.names):
            raise ArtifactError(f"{path}: is truncated; run the pack stage again")
        self._checksums = np.memmap(path, np.uint32, mode="r", shape=(self.num_blocks, len(self.names)))

    @property
    def identity(self) -> bytes:
        return self._checksums.tobytes() + self.store.url.encode()

    def block_of(self, row: int) -> tuple[int, int]:
        """Returns the block of a row, and the row's place in it."""
        file = int(np.searchsorted(self._file_starts, row, side="right")) - 1
        block, place = divmod(row - int(self._file_starts[file]), self.block_rows)
        return int(self._first_blocks[file]) + block, place

    def blocks_of(self, item: int) -> Sequence[int]:
        return (self.block_of(item)[0],)

    def num_rows_of(self, block: int) -> int:
        """Returns the number of rows in a block; the last one of a file may have fewer."""
        file, first = self._place(block)
        return min(self.block_rows, self.files[file]["rows"] - first)

    def num_bytes_of(self, block: int) -> int:
        return self.num_rows_of(block) * sum(self._row_bytes[: len(self.names)])

    def parts(self, block: int) -> list[BlockPart]:
        (file, first), num_rows = self._place(block), self.num_rows_of(block)
        sizes = zip(self.names, self._row_bytes, self._checksums[block].tolist(), strict=False)
        return [
            BlockPart(self.store, self.files[file][name], first * row_bytes, num_rows * row_bytes, checksum)
            for name, row_bytes, checksum in sizes
        ]

    def cut(self, item: int, block: int, content: bytes) -> Row:
        # Copies, because a view would keep the content of the whole block in memory.
        place, token_bytes = self.block_of(item)[1], self._row_bytes[0]
        tokens = np.frombuffer(content, self.dtype, count=self.seq_len, offset=place * token_bytes).copy()
        if len(self.names) == 1:
            return tokens, None
        start = self.num_rows_of(block) * token_bytes + place * self.seq_len  # masks follow all tokens of the block
        return tokens, np.frombuffer(content, np.uint8, count=self.seq_len, offset=start).copy()

    def join(self, cuts: Sequence[Sequence[Row]]) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the tokens [rows, seq_len] and the loss mask [rows, seq_len] uint8, None for rows without one."""
        rows = [row for (row,) in cuts]
        masks = [mask for _, mask in rows if mask is not None]
        return np.stack([tokens for tokens, _ in rows]), np.stack(masks) if masks else None

    def _place(self, block: int) -> tuple[int, int]:
        """Returns the number of a block's file, and the block's first row in it."""
        file = int(np.searchsorted(self._first_blocks, block, side="right")) - 1
        return file, (block - int(self._first_blocks[file])) * self.block_rows
