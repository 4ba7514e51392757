"""Files of any supported format to raw texts and records, with where each stands.

What is wrong with a file goes to a `Complaint`, which raises or counts; the reader then goes on with what is left.
Local paths and fsspec URLs are the same here. Knows nothing about splits, kinds or cleaning.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import zstandard

from modelwright.core.errors import DataError

CHUNK_BYTES = 2**20
UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")

Record = dict[str, Any]
Complaint = Callable[[str, str, str, str], None]
"""Told `(reason, where, what is wrong, the way out)`; raises `DataError` or counts the reason."""


@dataclass(frozen=True)
class File:
    """A file to read: its path for `filesystem`, the name to show, and the format and compression its name says."""

    filesystem: fsspec.AbstractFileSystem
    path: str
    name: str
    extension: str
    compression: str = ""


@dataclass(frozen=True)
class Fields:
    """The columns to read of a table: those of `main` and `other` that it has; all when it has none of `main`, so
    that the complaint about the missing text can name what is there."""

    main: tuple[str, ...]
    other: tuple[str, ...]

    def choose(self, names: list[str]) -> list[str]:
        if not any(name in self.main for name in names):
            return names
        return [name for name in names if name in self.main + self.other]


def read_lines(file: File, complain: Complaint) -> Iterator[tuple[int, bytes]]:
    """`(line number from 1, line)` with its line end; a byte order mark at the start is taken off."""
    number, pending = 1, b""

    def current_line() -> int:
        return number

    with _opened(file) as raw:
        for chunk in _chunks(raw, file, complain, current_line):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                yield number, (line.removeprefix(UTF8_BOM) if number == 1 else line) + b"\n"
                number += 1
        if pending:
            yield number, pending.removeprefix(UTF8_BOM) if number == 1 else pending


def read_sections(file: File, complain: Complaint, section_chars: int) -> Iterator[tuple[str, str]]:
    """`(where, text)` of a text file, cut at the first blank line past `section_chars`; 0 leaves it whole.

    A paragraph longer than `section_chars` is cut at a line end.
    """
    first, held, size = 1, [], 0
    for number, line in read_lines(file, complain):
        held.append(line)
        size += len(line)
        if section_chars and size >= section_chars and (not line.strip() or size >= 2 * section_chars):
            yield from _decoded(file, first, b"".join(held), complain)
            first, held, size = number + 1, [], 0
    if held:
        yield from _decoded(file, first, b"".join(held), complain)


def read_jsonl(file: File, complain: Complaint) -> Iterator[tuple[str, Record]]:
    """`(where, record)` of a JSON Lines file; blank lines are passed over."""
    for number, line in read_lines(file, complain):
        for where, text in _decoded(file, number, line, complain):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                problem = f"is not valid JSON ({getattr(error, 'msg', error)}, column {getattr(error, 'colno', 1)})"
                complain("not JSON", where, problem, "mend the line")
                continue
            if isinstance(record, dict):
                yield where, record
            else:
                problem = f"holds a JSON {type(record).__name__} where an object is expected"
                complain("not a JSON object", where, problem, 'write {"text": ...} on each line')


def read_parquet(file: File, complain: Complaint, fields: Fields) -> Iterator[tuple[str, Record]]:
    """`(where, record)` of a Parquet file, with the columns that `fields` asks for."""
    row = 0
    with _opened(file) as raw, _damaged_table(file, complain, lambda: row):
        table = pyarrow.parquet.ParquetFile(raw)
        columns = fields.choose(table.schema_arrow.names)
        for batch in table.iter_batches(batch_size=256, columns=columns, use_threads=False):
            for record in batch.to_pylist():
                row += 1
                yield f"{file.name}: row {row}", record


def read_arrow(file: File, complain: Complaint, fields: Fields) -> Iterator[tuple[str, Record]]:
    """As `read_parquet`, for the Arrow stream files of a Hugging Face `datasets` folder."""
    row = 0
    with _opened(file) as raw, _damaged_table(file, complain, lambda: row):
        for batch in pyarrow.ipc.open_stream(raw):
            for record in batch.select(fields.choose(batch.schema.names)).to_pylist():
                row += 1
                yield f"{file.name}: row {row}", record


@contextmanager
def _opened(file: File) -> Iterator[Any]:
    try:
        handle = file.filesystem.open(file.path, "rb")
    except FileNotFoundError:
        raise DataError(f"{file.name}: no such file; check --data.sources") from None
    except PermissionError:
        raise DataError(f"{file.name}: reading it is not permitted; check its permissions") from None
    except OSError as error:
        raise DataError(f"{file.name}: cannot be opened ({error}); check --data.sources") from None
    with handle:
        yield handle


def _chunks(raw: Any, file: File, complain: Complaint, line: Callable[[], int]) -> Iterator[bytes]:
    """Decompressed data. What can be read before the damage comes first, then the complaint."""
    read = {"": _plain_chunks, "gz": _gzip_chunks, "zst": _zstd_chunks}[file.compression]
    try:
        yield from read(raw)
    except EOFError:
        problem = f"the {file.compression} data is cut off here; the file is incomplete"
        complain("cut off", f"{file.name}:{line()}", problem, "fetch the file again")
    except (zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        problem = f"the {file.compression} data is damaged here ({error})"
        complain("damaged file", f"{file.name}:{line()}", problem, "fetch the file again")
    except OSError as error:
        complain("unreadable", f"{file.name}:{line()}", f"reading failed ({error})", "check the disk or the network")


def _plain_chunks(raw: Any) -> Iterator[bytes]:
    while chunk := raw.read(CHUNK_BYTES):
        yield chunk


def _gzip_chunks(raw: Any) -> Iterator[bytes]:
    """Raises `EOFError` when the file ends within a member. Reads in small steps, to give all that is whole."""
    with gzip.open(raw) as file:
        while chunk := file.read1(io.DEFAULT_BUFFER_SIZE):
            yield chunk


def _zstd_chunks(raw: Any) -> Iterator[bytes]:
    """Raises `EOFError` when the file ends within a frame, which zstandard's own stream reader does not notice."""
    frames = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame, inside = frames.decompressobj(), False
    while data := raw.read(CHUNK_BYTES):
        while data:
            inside = True
            yield frame.decompress(data)
            data = b""
            if frame.eof:
                data, inside = frame.unused_data, False
                frame = frames.decompressobj()
    if inside:
        raise EOFError


def _decoded(file: File, line: int, data: bytes, complain: Complaint) -> Iterator[tuple[str, str]]:
    try:
        yield f"{file.name}:{line}", data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = line + data.count(b"\n", 0, error.start)
        encoding = "UTF-16" if line == 1 and data.startswith(_UTF16_BOMS) else "LATIN1"
        problem = f"is not UTF-8 (byte 0x{data[error.start]:02x})"
        complain("not UTF-8", f"{file.name}:{at}", problem, f"convert the file (iconv -f {encoding} -t UTF-8)")


@contextmanager
def _damaged_table(file: File, complain: Complaint, row: Callable[[], int]) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        where = f"{file.name}: after row {row()}" if row() else file.name
        reason = str(error).splitlines()[0].rstrip(".")
        problem = f"the {file.extension.lstrip('.')} file is damaged or cut off ({reason})"
        complain("damaged file", where, problem, "fetch the file again")
