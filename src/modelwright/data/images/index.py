"""`ImageIndex`: where each image of a store is, and the checksums from when it was written.

images.bin             the encoded files, one after another
offsets.npy            int64 [images + 1], where each begins
checksums.npy          uint32 [images], the CRC-32 of each
block_checksums.npy    uint32 [blocks], the CRC-32 of each block of the file, which the cache reads
index.json             the size of a block; written last
"""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ArtifactError
from modelwright.data.cache.layout import BLOCK_BYTES

FORMAT = "modelwright-images/1"
FILE, INDEX = "images.bin", "index.json"
OFFSETS, CHECKSUMS, BLOCK_CHECKSUMS = "offsets.npy", "checksums.npy", "block_checksums.npy"


@dataclass
class StoreWriter:
    """Appends encoded images to a file."""

    file: BinaryIO
    offsets: list[int] = field(default_factory=lambda: [0])
    checksums: list[int] = field(default_factory=list[int])
    block_checksums: list[int] = field(default_factory=list[int])
    _checksum: int = field(init=False, default=0)
    """Of the block that is not full yet."""

    def add(self, data: bytes) -> int:
        """The number of the image, from 0."""
        self.file.write(data)
        self._add_to_blocks(memoryview(data))
        self.checksums.append(zlib.crc32(data))
        self.offsets.append(self.offsets[-1] + len(data))
        return len(self.offsets) - 2

    def finish(self, folder: Path) -> None:
        """Write the index of the images."""
        if self.offsets[-1] % BLOCK_BYTES:
            self.block_checksums.append(self._checksum)
        np.save(folder / OFFSETS, np.array(self.offsets, dtype=np.int64), allow_pickle=False)
        np.save(folder / CHECKSUMS, np.array(self.checksums, dtype=np.uint32), allow_pickle=False)
        np.save(folder / BLOCK_CHECKSUMS, np.array(self.block_checksums, dtype=np.uint32), allow_pickle=False)
        write_atomic(folder / INDEX, json.dumps({"format": FORMAT, "block_bytes": BLOCK_BYTES}))

    def _add_to_blocks(self, data: memoryview) -> None:
        filled = self.offsets[-1] % BLOCK_BYTES
        while data:
            part, data = data[: BLOCK_BYTES - filled], data[BLOCK_BYTES - filled :]
            self._checksum = zlib.crc32(part, self._checksum)
            filled += len(part)
            if filled == BLOCK_BYTES:
                self.block_checksums.append(self._checksum)
                self._checksum = filled = 0


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """The files of a store beside `images.bin`; see the module."""

    offsets: NDArray[np.int64]
    checksums: NDArray[np.uint32]
    block_checksums: NDArray[np.uint32]
    block_bytes: int

    @classmethod
    def read(cls, folder: Path) -> "ImageIndex":
        """Raises `ArtifactError` when the index is missing or damaged, or was written without checksums."""
        try:
            settings: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            arrays = [np.load(folder / name, allow_pickle=False) for name in (OFFSETS, CHECKSUMS, BLOCK_CHECKSUMS)]
            index = cls(*arrays, block_bytes=settings["block_bytes"])
            is_whole = settings["format"] == FORMAT and index._fits()
        except FileNotFoundError:
            if (folder / OFFSETS).is_file() and not (folder / INDEX).is_file():
                raise ArtifactError(
                    f"{folder}: the images have no checksums; remove the stage pack from the run that packed them and "
                    "run it again"
                ) from None
            raise ArtifactError(f"{folder}: has no images; run the pack stage again") from None
        except (OSError, EOFError, ValueError, TypeError, LookupError):  # numpy raises EOFError for an empty file
            is_whole = False
        if not is_whole:
            raise ArtifactError(f"{folder}: the index of the images is damaged; run the pack stage again")
        return index

    def __len__(self) -> int:
        return len(self.checksums)

    @property
    def num_bytes(self) -> int:
        """Bytes of all images."""
        return int(self.offsets[-1])

    def span(self, number: int) -> tuple[int, int]:
        """Where an image begins and ends in the file."""
        return int(self.offsets[number]), int(self.offsets[number + 1])

    def _fits(self) -> bool:
        """Whether the arrays fit each other."""
        return (
            len(self.offsets) == len(self.checksums) + 1
            and self.offsets[0] == 0
            and bool((np.diff(self.offsets) >= 0).all())
            and len(self.block_checksums) == -(-self.num_bytes // self.block_bytes)
        )
