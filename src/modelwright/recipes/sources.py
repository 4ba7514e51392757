"""Sources that are in memory: records, texts and frames become JSON lines in a folder, named by digest."""

import filecmp
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from modelwright.core.artifacts import make_folder, writing
from modelwright.core.config import DataError

FOLDER = "sources"


@dataclass
class Sources:
    """Sources of a request: paths as they were given, or records that wait in a temporary file for their folder."""

    paths: list[str]
    waiting: Path | None = None

    def place(self, folder: Path) -> list[str]:
        """Copies waiting records into a folder, and returns all sources as paths. A file with the same content is
        not written again, because its modification time is part of what identifies interrupted work.
        """
        if self.waiting is None:
            return self.paths
        target = folder / self.paths[0]
        make_folder(folder)
        with writing(target):
            if not target.is_file() or not filecmp.cmp(self.waiting, target, shallow=False):
                shutil.copyfile(self.waiting, temporary := target.with_suffix(".tmp"))
                temporary.replace(target)
        return [str(target)]

    def close(self) -> None:
        if self.waiting is not None:
            self.waiting.unlink(missing_ok=True)


def read_sources(given: Any) -> Sources:
    """Reads what a caller gave as sources: a path or a list of paths (files, folders, globs, names of data sets);
    or records: a list or generator of mappings, a generator of texts, a `datasets.Dataset`, a pandas or polars frame.

    A list of strings is a list of paths; `iter(texts)` makes texts of it. Raises `DataError` for anything else.
    """
    if isinstance(given, (str, os.PathLike)):
        return Sources([os.fspath(cast(Any, given))])
    if isinstance(given, (list, tuple)) and all(isinstance(one, (str, os.PathLike)) for one in cast(Any, given)):
        return Sources([os.fspath(one) for one in cast(Any, given)])
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile("wb", prefix="modelwright-", suffix=".jsonl", delete=False) as file:
        path = Path(file.name)
        try:
            number = 0
            for number, record in enumerate(_records(given), start=1):
                line = _line(record, number)
                digest.update(line)
                file.write(line)
            if not number:
                raise DataError("sources: hold no record; give at least one")
        except BaseException:
            path.unlink()
            raise
    return Sources([f"records-{digest.hexdigest()[:12]}.jsonl"], path)


def _records(given: Any) -> Iterator[Any]:
    """Yields the rows of a frame or the entries of an iterable."""
    if hasattr(given, "iter_rows"):  # polars
        yield from given.iter_rows(named=True)
    elif hasattr(given, "itertuples"):  # pandas, whose missing values are NaN in every column
        for record in given.to_dict("records"):
            yield {k: value for k, value in record.items() if not (isinstance(value, float) and math.isnan(value))}
    elif isinstance(given, Iterable) and not isinstance(given, (bytes, Mapping)):
        yield from cast(Iterable[Any], given)
    else:
        raise DataError(
            f"sources: {type(given).__name__} is not a source; give a path, a list of paths, records, texts or a frame"
        )


def _line(record: Any, number: int) -> bytes:
    if isinstance(record, str):
        record = {"text": record}
    if not isinstance(record, Mapping):
        raise DataError(f"sources: record {number} is of type {type(record).__name__}; give mappings or texts")
    try:
        text = json.dumps(dict(cast(Any, record)), ensure_ascii=False, allow_nan=False, default=_plain)
        return f"{text}\n".encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"sources: record {number} cannot be written as JSON ({error})") from None


def _plain(value: Any) -> Any:
    """Converts values of arrays and frames, which have `tolist`, and dates."""
    for name in ("tolist", "isoformat"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")
