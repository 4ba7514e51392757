"""`ImageStore`: the images of a set of rows in one file, read as pixels of the size that a model needs.

    images.bin             the encoded files, one after another
    offsets.npy            int64 [images + 1], the beginning of each image
    checksums.npy          uint32 [images], the CRC-32 of each image
    block_checksums.npy    uint32 [blocks], the CRC-32 of each block of the file, for the cache
    index.json             the size of a block; written last

Blocks have equal sizes, so an image may span several. Every image that is read is compared with its checksum.
`LabeledImages` adds a class for each image:

    labels.npy             int32 [images]
    classes.json           the names of the classes, sorted
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from modelwright.core.artifacts import ArtifactError, write_atomic
from modelwright.data.document import Document
from modelwright.data.images.decode import LABEL_FIELD, Fit, ImageFault, square_pixels
from modelwright.data.rows.cache.layout import BLOCK_BYTES, BlockPart, ColdStore, is_remote, rows_at
from modelwright.data.rows.cache.reader import NUM_READERS, BlockReader, Tiers

FORMAT = "modelwright-images/1"
FILE, INDEX = "images.bin", "index.json"
OFFSETS, CHECKSUMS, BLOCK_CHECKSUMS = "offsets.npy", "checksums.npy", "block_checksums.npy"
IMAGES_AT_ONCE = 256
"""Number of images whose files are in memory at a time while many are read."""
LABELS, CLASSES = "labels.npy", "classes.json"
DECODED_BYTES = 256 * 2**20
"""Memory for decoded images of a file that is mapped into memory; images of the cache only use its budgets."""


@dataclass
class StoreWriter:
    """Appends encoded images to a file."""

    file: BinaryIO
    offsets: list[int] = field(default_factory=lambda: [0])
    checksums: list[int] = field(default_factory=list[int])
    block_checksums: list[int] = field(default_factory=list[int])
    _checksum: int = field(init=False, default=0)
    """Running checksum of the last block, which is not full yet."""

    def add(self, data: bytes) -> int:
        """Appends an image; returns its number, from 0."""
        self.file.write(data)
        rest, filled = memoryview(data), self.offsets[-1] % BLOCK_BYTES
        while rest:
            part, rest = rest[: BLOCK_BYTES - filled], rest[BLOCK_BYTES - filled :]
            self._checksum = zlib.crc32(part, self._checksum)
            filled += len(part)
            if filled == BLOCK_BYTES:
                self.block_checksums.append(self._checksum)
                self._checksum = filled = 0
        self.checksums.append(zlib.crc32(data))
        self.offsets.append(self.offsets[-1] + len(data))
        return len(self.offsets) - 2

    def finish(self, folder: Path) -> None:
        """Writes the index of the images."""
        if self.offsets[-1] % BLOCK_BYTES:  # the last block is shorter than the others
            self.block_checksums.append(self._checksum)
        np.save(folder / OFFSETS, np.array(self.offsets, dtype=np.int64), allow_pickle=False)
        np.save(folder / CHECKSUMS, np.array(self.checksums, dtype=np.uint32), allow_pickle=False)
        np.save(folder / BLOCK_CHECKSUMS, np.array(self.block_checksums, dtype=np.uint32), allow_pickle=False)
        write_atomic(folder / INDEX, json.dumps({"format": FORMAT, "block_bytes": BLOCK_BYTES}))


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """The files of a store other than `images.bin`; see the module."""

    offsets: NDArray[np.int64]
    checksums: NDArray[np.uint32]
    block_checksums: NDArray[np.uint32]
    block_bytes: int

    @classmethod
    def read(cls, folder: Path) -> "ImageIndex":
        """Reads a folder's index. Raises `ArtifactError` if it is missing, damaged or without checksums."""
        try:
            settings: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            arrays = [np.load(folder / name, allow_pickle=False) for name in (OFFSETS, CHECKSUMS, BLOCK_CHECKSUMS)]
            index = cls(*arrays, block_bytes=settings["block_bytes"])
            is_whole = (
                settings["format"] == FORMAT
                and len(index.offsets) == len(index.checksums) + 1
                and index.offsets[0] == 0
                and bool((np.diff(index.offsets) >= 0).all())
                and len(index.block_checksums) == -(-index.num_bytes // index.block_bytes)
            )
        except FileNotFoundError:
            if (folder / OFFSETS).is_file() and not (folder / INDEX).is_file():
                raise ArtifactError(
                    f"{folder}: the images lack checksums; remove the stage pack from the run that packed them and "
                    "run it again"
                ) from None
            raise ArtifactError(f"{folder}: images are missing; run the pack stage again") from None
        except (OSError, EOFError, ValueError, TypeError, LookupError):  # numpy raises EOFError for an empty file
            is_whole = False
        if not is_whole:
            raise ArtifactError(f"{folder}: the index of the images is damaged; run the pack stage again")
        return index

    def __len__(self) -> int:
        return len(self.checksums)

    @property
    def num_bytes(self) -> int:
        """Size of all images."""
        return int(self.offsets[-1])

    def span(self, number: int) -> tuple[int, int]:
        """Returns the beginning and end of an image in the file."""
        return int(self.offsets[number]), int(self.offsets[number + 1])


class ImageLayout:
    """`BlockLayout` of the images of an index, whose file is in `store`."""

    title = "images"

    def __init__(self, index: ImageIndex, store: ColdStore) -> None:
        self._index = index
        self._store = store
        self.num_items = len(index)
        self.num_blocks = len(index.block_checksums)
        self.block_bytes = index.block_bytes
        self.total_bytes = index.num_bytes

    @property
    def identity(self) -> bytes:
        return self._index.block_checksums.tobytes() + self._store.url.encode()

    def blocks_of(self, item: int) -> Sequence[int]:
        first, last = self._index.span(item)
        return range(first // self.block_bytes, -(-last // self.block_bytes))

    def num_bytes_of(self, block: int) -> int:
        return min(self.block_bytes, self.total_bytes - block * self.block_bytes)

    def parts(self, block: int) -> list[BlockPart]:
        checksum = int(self._index.block_checksums[block])
        return [BlockPart(self._store, FILE, block * self.block_bytes, self.num_bytes_of(block), checksum)]

    def cut(self, item: int, block: int, content: bytes) -> bytes:
        first, last = self._index.span(item)
        # An image may begin before this block and end after it.
        start = block * self.block_bytes
        return content[max(0, first - start) : last - start]

    def join(self, cuts: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Returns the file of each image."""
        return [b"".join(of_image) for of_image in cuts]


class MappedImages:
    """Reads the images of a file that is mapped into memory. Raises `ArtifactError` when it is missing or short."""

    def __init__(self, path: Path, index: ImageIndex) -> None:
        self._index = index
        if not path.is_file() or path.stat().st_size != index.num_bytes:
            raise ArtifactError(f"{path}: is missing or truncated; run the pack stage again")
        # An empty file cannot be mapped.
        self._data = np.memmap(path, np.uint8, mode="r") if index.num_bytes else np.empty(0, np.uint8)

    def read(self, numbers: NDArray[np.int64]) -> list[bytes]:
        return [self._data[slice(*self._index.span(number))].tobytes() for number in numbers.tolist()]


class ImageStore:
    """The images of a folder, read with `reader`, by default from the folder or from the place that its file
    `rows_at.json` names. Raises `ArtifactError` when the folder is missing or damaged.

    num_ahead: number of batches whose images are read before they are needed, unless they are mapped into memory.
    """

    def __init__(
        self, folder: Path, reader: MappedImages | BlockReader[list[bytes]] | None = None, *, num_ahead: int = 0
    ) -> None:
        self.folder = folder
        self.num_ahead = num_ahead
        self.index = ImageIndex.read(folder)
        self.place = rows_at(folder)
        if reader is not None:
            self.reader = reader
        elif not is_remote(self.place):
            self.reader = MappedImages(Path(self.place) / FILE, self.index)
        else:  # read from a store without a cache
            layout = ImageLayout(self.index, ColdStore(self.place))
            self.reader = BlockReader(Tiers(layout), layout, num_readers=NUM_READERS)

    def __len__(self) -> int:
        return len(self.index)

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """Returns the encoded files of images. Raises `ArtifactError` with the damaged bytes, and the errors of
        `Tiers.read` where images are on a store or read through the cache.
        """
        files = self.reader.read(np.array(numbers, dtype=np.int64))
        for number, data in zip(numbers, files, strict=True):
            if zlib.crc32(data) != self.index.checksums[number]:
                first, last = self.index.span(number)
                raise ArtifactError(
                    f"{self.place}/{FILE}: bytes {first:,} to {last:,} (image {number}) are damaged: their CRC-32 "
                    "differs from that at packing; put the file back, or run the pack stage again"
                )
        return files

    def data(self, number: int) -> bytes:
        """Returns the encoded file of an image."""
        return self.read([number])[0]

    def pixels(self, number: int, *, size: int, fit: Fit) -> NDArray[np.uint8]:
        """Returns an image as pixels; see `square_pixels`."""
        return next(self.squares([number], size=size, fit=fit))

    def squares(self, numbers: Sequence[int], *, size: int, fit: Fit) -> Iterator[NDArray[np.uint8]]:
        """Yields the `pixels` of each of these images, of which many are read together."""
        for first in range(0, len(numbers), IMAGES_AT_ONCE):
            chosen = numbers[first : first + IMAGES_AT_ONCE]
            for number, data in zip(chosen, self.read(chosen), strict=True):
                try:
                    pixels = square_pixels(data, size=size, fit=fit)
                except ImageFault as error:
                    problem = f"{self.place}/{FILE}: image {number} {error}"
                    raise ArtifactError(f"{problem}; run the pack stage again") from None
                yield pixels


@contextmanager
def write_images(folder: Path) -> Iterator[StoreWriter]:
    """Opens a new store in a folder, which is complete when the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / FILE, "wb") as file:
        writer = StoreWriter(file)
        yield writer
    writer.finish(folder)  # after the file is closed: its index says that it is whole


def images_folder(rows: Path, split: str) -> Path:
    """Returns the folder of the images of a split. rows: folder of this set of rows."""
    return rows / f"images-{split}"


def has_images(folder: Path) -> bool:
    """Returns True for a store with at least one image."""
    return folder.is_dir() and len(ImageIndex.read(folder)) > 0


def image_layout(folder: Path) -> ImageLayout:
    """Returns the blocks of the images of a folder, at the place that its `rows_at.json` names."""
    return ImageLayout(ImageIndex.read(folder), ColdStore(rows_at(folder)))


def open_images(rows: Path, split: str, *, num_ahead: int = 0) -> ImageStore | None:
    """Opens the images of a split; None without images. rows, num_ahead: see `images_folder` and `ImageStore`."""
    folder = images_folder(rows, split)
    return ImageStore(folder, num_ahead=num_ahead) if has_images(folder) else None


def class_of(document: Document) -> str:
    """Returns the name of an image's class: its label, or without one its caption."""
    return str(document.meta.get(LABEL_FIELD, document.text)).strip()


def write_labels(folder: Path, labels: list[int], classes: list[str]) -> None:
    """Writes the classes of the images of a store into its folder."""
    np.save(folder / LABELS, np.array(labels, dtype=np.int32), allow_pickle=False)
    write_atomic(folder / CLASSES, json.dumps(classes, ensure_ascii=False, indent=0) + "\n")


class LabeledImages:
    """The images of a store with their classes. Raises `ArtifactError` when something is missing or damaged."""

    def __init__(self, store: ImageStore) -> None:
        self.store, folder = store, store.folder
        try:
            self.labels: NDArray[np.int32] = np.load(folder / LABELS, allow_pickle=False)
            self.classes: list[str] = json.loads((folder / CLASSES).read_text(encoding="utf-8"))
        except (OSError, EOFError, ValueError):
            raise ArtifactError(f"{folder}: has images without classes; run the pack stage again") from None
        if len(self.labels) != len(self.store) or not all(
            0 <= one < len(self.classes) for one in set(self.labels.tolist())
        ):
            raise ArtifactError(f"{folder / LABELS}: does not fit the images; run the pack stage again")
        self._decoded_bytes = 0 if isinstance(store.reader, BlockReader) else DECODED_BYTES
        # The first request tells the size of the images, and so how many of them fit.
        self._decoded = lru_cache(maxsize=0)(store.pixels)
        self._decoded_size = 0

    def __len__(self) -> int:
        return len(self.store)

    def pixels(self, number: int, *, size: int, fit: Fit) -> NDArray[np.uint8]:
        """Returns an image as a square [3, size, size]; do not change it."""
        if size != self._decoded_size:
            room = self._decoded_bytes // (3 * size * size)
            self._decoded, self._decoded_size = lru_cache(room)(self.store.pixels), size
        return self._decoded(number, size=size, fit=fit)
