"""`ImageStore`: the images of a set of rows in one file, read one at a time as pixels of the size that a model wants.

images.bin      the encoded files, one after another
offsets.npy     int64 [images + 1], where each begins
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from modelwright.core.errors import ArtifactError
from modelwright.data.images.decode import decode, pillow

FILE, OFFSETS = "images.bin", "offsets.npy"


@dataclass
class StoreWriter:
    """Appends encoded images to a file."""

    file: BinaryIO
    offsets: list[int] = field(default_factory=lambda: [0])

    def add(self, data: bytes) -> int:
        """The number of the image, from 0."""
        self.file.write(data)
        self.offsets.append(self.offsets[-1] + len(data))
        return len(self.offsets) - 2


@contextmanager
def write_images(folder: Path) -> Iterator[StoreWriter]:
    """A new store in a folder, complete when the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / FILE, "wb") as file:
        writer = StoreWriter(file)
        yield writer
    np.save(folder / OFFSETS, np.array(writer.offsets, dtype=np.int64), allow_pickle=False)


class ImageStore:
    """The images of a folder, mapped into memory. Raises `ArtifactError` when it is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.offsets: NDArray[np.int64] = np.load(folder / OFFSETS, allow_pickle=False)
            path, size = folder / FILE, int(self.offsets[-1])
        except (OSError, EOFError, ValueError, IndexError):  # numpy raises EOFError for an empty file
            raise ArtifactError(f"{folder}: has no images; run the pack stage again") from None
        if not path.is_file() or path.stat().st_size != size:
            raise ArtifactError(f"{path}: is missing or truncated; run the pack stage again")
        self._data = np.memmap(path, np.uint8, mode="r") if size else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def data(self, number: int) -> bytes:
        """The encoded file of an image."""
        return self._data[self.offsets[number] : self.offsets[number + 1]].tobytes()

    def pixels(self, number: int, *, size: int, fit: Literal["crop", "stretch"]) -> NDArray[np.uint8]:
        """See `square_pixels`."""
        return square_pixels(self.data(number), size=size, fit=fit)


def square_pixels(data: bytes, *, size: int, fit: Literal["crop", "stretch"]) -> NDArray[np.uint8]:
    """An image file as a square [3, size, size]. fit: take its center, or stretch it. Raises `ImageFault`."""
    return squared(decode(data), size=size, fit=fit)


def squared(pixels: NDArray[np.uint8], *, size: int, fit: Literal["crop", "stretch"]) -> NDArray[np.uint8]:
    """Pixels [H, W, 3] as a square [3, size, size]."""
    image = pillow().fromarray(pixels)
    box = None
    if fit == "crop":
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
    square = image.resize((size, size), pillow().Resampling.BICUBIC, box=box)
    return np.ascontiguousarray(np.asarray(square, dtype=np.uint8).transpose(2, 0, 1))
