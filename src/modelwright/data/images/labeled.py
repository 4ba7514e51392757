"""`LabeledImages`: an image store with a class for each image.

labels.npy      int32 [images]
classes.json    the names of the classes, sorted
"""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelwright.core.artifacts import write_atomic
from modelwright.core.errors import ArtifactError
from modelwright.data.document import Document
from modelwright.data.images.decode import Fit
from modelwright.data.images.read import LABEL_FIELD
from modelwright.data.images.store import ImageStore
from modelwright.data.rows.cache.reader import BlockReader

LABELS, CLASSES = "labels.npy", "classes.json"
DECODED_BYTES = 256 * 2**20
"""Memory for decoded images of a file that is mapped into memory; images of the cache only use its budgets."""


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
