"""Kept documents as Parquet files, for `datasets.load_dataset`.

    data/train-00000-of-00002.parquet          documents that may be trained on
    data/validation-00000-of-00001.parquet     held-out documents

The columns are the fields of `Document`; `meta` is the text of a JSON object, because its fields differ from document
to document.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from modelwright.core.artifacts import writing
from modelwright.core.config import ConfigError
from modelwright.core.progress import Progress
from modelwright.data.clean.folder import read_kept
from modelwright.data.document import Document

FOLDER = "data"
FILE_NAME = re.compile(r"(?:train|validation)-\d{5}-of-\d{5}\.parquet")
_SCHEMA = pyarrow.schema([(name, pyarrow.string()) for name in ("id", "text", "kind", "split", "source", "meta")])
_GROUP_DOCUMENTS, _GROUP_CHARS = 1000, 8_000_000
_FILE_CHARS = 1_000_000_000


def write_parquet(folder: Path, work: Path, num_documents: int, progress: Progress) -> list[str]:
    """Writes the `num_documents` kept documents of a folder without such files; returns their paths in it.

    work: folder for unfinished files, which is removed
    """
    partial = work / FOLDER
    with writing(folder):
        shutil.rmtree(work, ignore_errors=True)
        partial.mkdir(parents=True)
        files = {"train": _SplitFiles(partial, "train"), "validation": _SplitFiles(partial, "validation")}
        progress.begin("write Parquet", num_documents, "documents")
        for number, document in enumerate(read_kept(folder), 1):
            files["validation" if document.split == "heldout" else "train"].add(document)
            if number % _GROUP_DOCUMENTS == 0:
                progress.advance(number)
        progress.end()
        names = [name for split in files.values() for name in split.finish()]
        partial.rename(folder / FOLDER)
        work.rmdir()
    return [f"{FOLDER}/{name}" for name in names]


def names_of_splits(paths: Sequence[str]) -> list[str]:
    """The names that `datasets` gives to the splits of files: the first part of each file's name."""
    return list(dict.fromkeys(path.rpartition("/")[2].partition("-")[0] for path in paths))


def remove_parquet(folder: Path) -> None:
    """Removes the files of an earlier result, and nothing else."""
    place = folder / FOLDER
    files = [path for path in place.glob("*") if FILE_NAME.fullmatch(path.name)]
    for path in files:
        path.unlink()
    if files and not any(place.iterdir()):
        place.rmdir()


def check_parquet(folder: Path) -> None:
    """Raises `ConfigError` if the folder of the files has others, among which they would be lost."""
    place = folder / FOLDER
    others = [path.name for path in sorted(place.glob("*")) if not FILE_NAME.fullmatch(path.name)]
    if place.is_file():
        raise ConfigError(f"--parquet: {place} is a file; choose another folder with --out")
    if others:
        raise ConfigError(f"--parquet: {place} holds {others[0]}; choose another folder with --out")


class _SplitFiles:
    """Writes the files of one split. They are renamed at the end, when their number is known."""

    def __init__(self, folder: Path, split: str) -> None:
        self._folder, self._split = folder, split
        self._rows: list[dict[str, Any]] = []
        self._num_chars = self._file_chars = self._num_files = 0
        self._writer: pyarrow.parquet.ParquetWriter | None = None

    def add(self, document: Document) -> None:
        meta = json.dumps(dict(document.meta), ensure_ascii=False)
        self._rows.append({**document.plain(), "split": document.split, "meta": meta})
        self._num_chars += len(document.text) + len(meta)
        if len(self._rows) == _GROUP_DOCUMENTS or self._num_chars >= _GROUP_CHARS:
            self._write()

    def finish(self) -> Sequence[str]:
        """Closes the last file, and returns the names of all."""
        if self._rows:
            self._write()
        self._close()
        names = [f"{self._split}-{number:05d}-of-{self._num_files:05d}.parquet" for number in range(self._num_files)]
        for number, name in enumerate(names):
            self._path(number).rename(self._folder / name)
        return names

    def _write(self) -> None:
        if self._writer is None:
            self._writer = pyarrow.parquet.ParquetWriter(self._path(self._num_files), _SCHEMA, compression="zstd")
            self._num_files += 1
        # Lone surrogates have no UTF-8 form, and Arrow would refuse them.
        rows = [
            {name: value.encode("utf-8", "replace").decode("utf-8") for name, value in row.items()}
            for row in self._rows
        ]
        self._writer.write_table(pyarrow.Table.from_pylist(rows, _SCHEMA))
        self._file_chars += self._num_chars
        self._rows, self._num_chars = [], 0
        if self._file_chars >= _FILE_CHARS:
            self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._file_chars = None, 0

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._split}-{number:05d}.partial"
