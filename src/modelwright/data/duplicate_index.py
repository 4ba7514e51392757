"""Fingerprints of the documents that earlier runs kept, so that a later run drops what it has seen already.

A folder with one `.npz` file for each run, whose name is the digest of that run's input and settings: repeating a run
replaces its own file.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelwright.core.errors import ArtifactError, writing
from modelwright.data.shard_files import pack_arrays, unpack_arrays, write_file
from modelwright.data.steps.shingles import NUM_BANDS


@dataclass(frozen=True)
class IndexedDocuments:
    """kind, own, bands: see `Corpus`; shingles: the 5-grams of all documents; num_shingles: of each."""

    kind: NDArray[np.int8]
    own: NDArray[np.uint64]
    bands: NDArray[np.uint64]
    shingles: NDArray[np.uint32]
    num_shingles: NDArray[np.int64]


def load_index(folder: Path, *, without: str) -> IndexedDocuments:
    """All documents in the index but those of the run called `without`. Raises `ArtifactError` for a damaged file."""
    parts = [_load(path) for path in sorted(folder.glob("*.npz")) if path.stem != without]
    if not parts:
        return IndexedDocuments(
            np.empty(0, np.int8), np.empty(0, np.uint64), np.empty((0, NUM_BANDS), np.uint64),
            np.empty(0, np.uint32), np.empty(0, np.int64),
        )  # fmt: skip
    names = ("kind", "own", "bands", "shingles", "num_shingles")
    return IndexedDocuments(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def save_index(folder: Path, name: str, documents: IndexedDocuments) -> None:
    """Write the documents of the run called `name`, whole or not at all."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{name}.partial"
        write_file(partial, pack_arrays(vars(documents)))
        partial.replace(folder / f"{name}.npz")


def _load(path: Path) -> IndexedDocuments:
    try:
        return IndexedDocuments(**unpack_arrays(path.read_bytes()))
    except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, OSError) as error:
        raise ArtifactError(f"{path}: is damaged ({error}); remove it, or restore a copy") from None
