"""Divides source files into parts that workers read: several small files, one file, or lines of a JSON Lines file.

Parts follow one another in the order of the files. A part of a file begins with a known line, so that documents get the
same ids and errors the same places as when the file is read at once; for that, its line ends are counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from modelwright.data.readers import CHUNK_BYTES, File

PART_BYTES = 8 * 2**20
"""A worker's documents wait in memory for those before them."""


def divide_files(files: Iterable[File]) -> Iterator[tuple[File, ...]]:
    """The files in parts of about `PART_BYTES`; what cannot be divided is a part of its own, however large."""
    group: list[File] = []
    size = 0
    for file in files:
        num_bytes = _num_bytes(file)
        if group and size + num_bytes > PART_BYTES:
            yield tuple(group)
            group, size = [], 0
        if num_bytes > PART_BYTES and _is_divisible(file):
            yield from ((part,) for part in _lines_of(file))
            continue
        group.append(file)
        size += num_bytes
    if group:
        yield tuple(group)


def is_large(part: Sequence[File]) -> bool:
    """Whether a part must be read as a stream, because its documents may not fit into memory."""
    return not part[0].end and sum(map(_num_bytes, part)) > PART_BYTES


def _num_bytes(file: File) -> int:
    """The size of a file; 0 if it cannot be found out, which reading will report."""
    try:
        return int(file.filesystem.size(file.path) or 0)
    except OSError:
        return 0


def _is_divisible(file: File) -> bool:
    """Counting lines reads the file once more, which is cheap on this machine alone."""
    is_local = isinstance(file.filesystem, LocalFileSystem)
    return is_local and file.extension == ".jsonl" and not file.compression


def _lines_of(file: File) -> Iterator[File]:
    """Parts of whole lines, each at least `PART_BYTES` long but the last."""
    start = end = 0
    first = line = 1
    try:
        handle: Any = file.filesystem.open(file.path, "rb")
        with handle as raw:
            while chunk := raw.read(min(CHUNK_BYTES, PART_BYTES)):
                last = chunk.rfind(b"\n") + 1
                line += chunk.count(b"\n")
                if last and end + last - start >= PART_BYTES:
                    yield replace(file, start=start, end=end + last, first_line=first)
                    start, first = end + last, line
                end += len(chunk)
    except OSError:
        pass  # reading the rest meets the same error, and reports it
    if end > start or not start:
        yield replace(file, start=start, end=max(end, 1), first_line=first)
