"""`ImageStore`: the images of a set of rows in one file (`index.py`), read as pixels of the size that a model wants.

Every image that is read is compared with its checksum from when it was written, wherever it comes from.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from modelwright.core.errors import ArtifactError
from modelwright.data.cache.cold import ColdStore, is_remote, rows_at
from modelwright.data.cache.reader import NUM_READERS, BlockReader
from modelwright.data.cache.tiers import Tiers
from modelwright.data.images.blocks import ImageLayout
from modelwright.data.images.decode import ImageFault
from modelwright.data.images.index import FILE, ImageIndex, StoreWriter
from modelwright.data.images.squares import Fit, square_pixels

IMAGES_AT_ONCE = 256
"""Images whose files are in memory at a time where many are read."""


class ImageReader(Protocol):
    """Reads the encoded files of images."""

    def read(self, numbers: NDArray[np.int64], /) -> list[bytes]:
        """The files of the images of these numbers [N]."""
        ...


class MappedImages:
    """`ImageReader` of a file that is mapped into memory. Raises `ArtifactError` when it is missing or short."""

    def __init__(self, path: Path, index: ImageIndex) -> None:
        self._index = index
        if not path.is_file() or path.stat().st_size != index.num_bytes:
            raise ArtifactError(f"{path}: is missing or truncated; run the pack stage again")
        self._data = np.memmap(path, np.uint8, mode="r") if index.num_bytes else np.empty(0, np.uint8)

    def read(self, numbers: NDArray[np.int64]) -> list[bytes]:
        return [self._data[slice(*self._index.span(number))].tobytes() for number in numbers.tolist()]


class ImageStore:
    """The images of a folder, read with `reader`, by default from the folder, or from where its file `rows_at.json`
    says that they are. Raises `ArtifactError` when the folder is missing or damaged.

    num_ahead: batches whose images are read before they are needed, where they are not mapped into memory.
    """

    def __init__(self, folder: Path, reader: ImageReader | None = None, *, num_ahead: int = 0) -> None:
        self.folder = folder
        self.num_ahead = num_ahead
        self.index = ImageIndex.read(folder)
        self.place = rows_at(folder)
        self.reader = reader or _reader(self.place, self.index)

    def __len__(self) -> int:
        return len(self.index)

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """The encoded files of images. Raises `ArtifactError` that names the bytes that are damaged, and what
        `Tiers.read` does where images are on a store or read through the cache.
        """
        files = self.reader.read(np.array(numbers, dtype=np.int64))
        for number, data in zip(numbers, files, strict=True):
            if zlib.crc32(data) != self.index.checksums[number]:
                first, last = self.index.span(number)
                raise ArtifactError(
                    f"{self.place}/{FILE}: bytes {first:,} to {last:,} (image {number}) are damaged: they are not what "
                    "was packed (CRC-32); put the file back, or run the pack stage again"
                )
        return files

    def data(self, number: int) -> bytes:
        """The encoded file of an image."""
        return self.read([number])[0]

    def pixels(self, number: int, *, size: int, fit: Fit) -> NDArray[np.uint8]:
        """See `square_pixels`."""
        return self._decoded(number, self.data(number), size=size, fit=fit)

    def squares(self, numbers: Sequence[int], *, size: int, fit: Fit) -> Iterator[NDArray[np.uint8]]:
        """`pixels` of each of these images; many are read together."""
        for first in range(0, len(numbers), IMAGES_AT_ONCE):
            chosen = numbers[first : first + IMAGES_AT_ONCE]
            for number, data in zip(chosen, self.read(chosen), strict=True):
                yield self._decoded(number, data, size=size, fit=fit)

    def _decoded(self, number: int, data: bytes, *, size: int, fit: Fit) -> NDArray[np.uint8]:
        try:
            return square_pixels(data, size=size, fit=fit)
        except ImageFault as error:
            raise ArtifactError(f"{self.place}/{FILE}: image {number} {error}; run the pack stage again") from None


@contextmanager
def write_images(folder: Path) -> Iterator[StoreWriter]:
    """A new store in a folder, complete when the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / FILE, "wb") as file:
        writer = StoreWriter(file)
        yield writer
    writer.finish(folder)


def images_folder(rows: Path, split: str) -> Path:
    """Where the images of a split are. rows: the folder of this set of rows."""
    return rows / f"images-{split}"


def has_images(folder: Path) -> bool:
    """Whether a folder is a store with at least one image."""
    return folder.is_dir() and len(ImageIndex.read(folder)) > 0


def image_layout(folder: Path) -> ImageLayout:
    """The blocks of the images of a folder, wherever its `rows_at.json` says that they are."""
    return ImageLayout(ImageIndex.read(folder), ColdStore(rows_at(folder)))


def open_images(rows: Path, split: str, *, num_ahead: int = 0) -> ImageStore | None:
    """The images of a split, None if it has none. rows, num_ahead: see `images_folder` and `ImageStore`."""
    folder = images_folder(rows, split)
    return ImageStore(folder, num_ahead=num_ahead) if has_images(folder) else None


def _reader(place: str, index: ImageIndex) -> ImageReader:
    """Maps a file that is on this machine, and reads another with nothing kept."""
    if not is_remote(place):
        return MappedImages(Path(place) / FILE, index)
    layout = ImageLayout(index, ColdStore(place))
    return BlockReader(Tiers(layout), layout, num_readers=NUM_READERS)
