"""Reads files of any supported format as raw texts and records, each with its location.

Problems with a file go to a `Complaint`, which raises or counts; the reader then continues with the rest.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import fsspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import zstandard

from modelwright.core.config import DataError, is_installed
from modelwright.data.sources.fields import is_deep, printable
from modelwright.data.sources.registry import Entry

CHUNK_BYTES = 2**20
MAX_JSON_BYTES = 2**30
"""Maximum size of a `.json` file, which is held in memory as bytes and as text."""
UTF8_BOM = b"\xef\xbb\xbf"
_MARKS: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip
"""Byte order marks, the longest first."""
_FORMATS: tuple[tuple[bytes, str, str], ...] = (
    (b"%PDF-", "a PDF document", "give it the suffix .pdf"),
    (b"PK\x03\x04", "a ZIP archive, as .docx, .xlsx and .odt are", "give it its own suffix, or unpack it"),
    (b"\x1f\x8b", "compressed by gzip", "give it the suffix .gz"),
    (b"\x28\xb5\x2f\xfd", "compressed by Zstandard", "give it the suffix .zst"),
)
"""First bytes of formats that are no text, with what they are and the remedy."""
_JUDGED_BYTES = 2**12
_HEADER_LINES = 100
_MANY_HIGH = 0.3
"""Share of bytes beyond ASCII above which a text is not in a language of Latin script."""
_MANY_ZEROS = 0.2
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_XML_CHARSET = re.compile(rb"<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([\w.:-]{1,40})")
_ARROW_FILE = b"ARROW1"
_ZSTD_BYTES = 2**12
"""Bytes of compressed data that are decompressed at a time: a few bytes may encode a block of 128 KiB."""

Record = dict[str, Any]
Skip = Callable[[str, str], None]
"""Receives `(reason, where)` for a record that is left out."""
Complaint = Callable[[str, str, str, str], None]
"""Receives `(reason, where, problem, remedy)`; raises `DataError` or counts the reason."""
ChooseColumns = Callable[[pa.Schema], list[str]]
"""Returns the columns of a table to read, from all of its columns."""


@dataclass(frozen=True)
class File:
    """A file to read: its path for `filesystem`, its name for messages, and format and compression according to its
    name. `is_named`: the user named this very file, not a directory or a pattern. `entry`: of the registry that
    describes the file.
    """

    filesystem: fsspec.AbstractFileSystem
    path: str
    name: str
    extension: str
    compression: str = ""
    is_named: bool = False
    entry: Entry | None = None


@dataclass(frozen=True)
class Limit:
    """Maximum bytes of a line, a record or a file of one text. way_out: remedy for longer ones, other than dividing."""

    max_bytes: int
    way_out: str

    def record_problem(self) -> tuple[str, str]:
        """Returns problem and remedy of a longer record, for a complaint."""
        return f"the record is longer than {self.max_bytes:,} bytes", f"divide it, or {self.way_out}"


def read_lines(
    file: File, complain: Complaint, limit: Limit, *, end: bytes = b"\n"
) -> Generator[tuple[int, bytes]]:  # fmt: skip
    """Yields `(line number from 1, line)` with the line end, without byte order marks at the start, which a file that
    was put together from others has several of.

    A line beyond the limit is a complaint, and the rest of it is read without keeping it.
    """
    number, parts, size = 1, list[bytes](), 0

    def current_line() -> int:
        return number

    with opened(file) as raw:
        for chunk in _text_chunks(raw, file, complain, current_line):
            for place, part in enumerate(chunk.split(end)):
                if place:
                    if size <= limit.max_bytes:
                        yield number, _line(parts) + end
                    number, parts, size = number + 1, [], 0
                before, size = size, size + len(part)
                if size <= limit.max_bytes:
                    parts.append(part)
                elif before <= limit.max_bytes:
                    parts, where = [], f"{file.name}:{number}"
                    problem = f"the line is longer than {limit.max_bytes:,} bytes"
                    complain("line too long", where, problem, f"break it, or {limit.way_out}")
        if last := _line(parts):
            yield number, last


def _line(parts: Sequence[bytes]) -> bytes:
    line = b"".join(parts)
    while line.startswith(UTF8_BOM):
        line = line.removeprefix(UTF8_BOM)
    return line


def read_sections(file: File, complain: Complaint, limit: Limit, section_chars: int) -> Iterator[tuple[str, str]]:
    """Yields `(where, text)` of a text file, cut at the first blank line past `section_chars`.

    A paragraph longer than `section_chars` is cut at a line end.
    """
    for first, section in cut_sections(read_lines(file, complain, limit), section_chars):
        yield from _decoded(file, first, section, complain)


def read_whole(file: File, complain: Complaint, limit: Limit) -> Iterator[tuple[str, str]]:
    """Yields `(where, text)` of a file that is one text, such as source code. One beyond the limit is a complaint."""
    for content in whole(file, complain, limit.max_bytes, f"divide it, or {limit.way_out}"):
        yield from _decoded(file, 1, content, complain)


def read_html(file: File, complain: Complaint, limit: Limit, section_chars: int) -> Iterator[tuple[str, str]]:
    """Yields `(where, text)` of the visible text of a web page, without scripts, styles, menus and page footers.

    The page is in the encoding that it declares, UTF-8 by default. The text is cut as by `read_sections`; `where`
    counts the lines of the text, not those of the page.
    """
    from resiliparse.extract.html2text import extract_plain_text  # pyright: ignore[reportMissingModuleSource]

    for markup in _markup(file, complain, limit):
        text = extract_plain_text(markup, alt_texts=False, skip_elements=["nav", "footer"])
        lines = enumerate(text.encode("utf-8", "replace").splitlines(keepends=True), start=1)
        for first, section in cut_sections(lines, section_chars):
            yield f"{file.name}: text line {first}", section.decode("utf-8")


def _markup(file: File, complain: Complaint, limit: Limit) -> Iterator[str]:
    """Yields the page of a file, decoded as it declares (HTML Living Standard, 13.2.3.2)."""
    from resiliparse.parse.encoding import bytes_to_str, map_encoding_to_html5  # pyright: ignore

    for content in whole(file, complain, limit.max_bytes, f"divide it, or {limit.way_out}"):
        head = content[:_JUDGED_BYTES]
        declared = _META_CHARSET.search(head) or _XML_CHARSET.search(head)
        name = map_encoding_to_html5(declared[1].decode("ascii"), fallback_utf8=False) if declared else None
        if name and name.lower() not in ("utf-8", "utf-16le", "utf-16be"):
            yield bytes_to_str(content, name)
        else:  # a page that was read as bytes up to here is not UTF-16, whatever it says
            yield from (text for _, text in _decoded(file, 1, content, complain))


def whole(
    file: File, complain: Complaint, max_bytes: int, way_out: str, *, is_text: bool = True
) -> Iterator[bytes]:  # fmt: skip
    """Yields the content of a file without a byte order mark, or complains if it has more than `max_bytes`, or is not
    text that it should be.
    """
    read = _text_chunks if is_text else _chunks
    chunks, size = list[bytes](), 0
    with opened(file) as raw:
        for chunk in read(raw, file, complain, lambda: 1 + sum(one.count(b"\n") for one in chunks)):
            size += len(chunk)
            if size > max_bytes:
                problem = f"the file is read as a whole and has more than {max_bytes:,} bytes"
                return complain("file too long", file.name, problem, way_out)
            chunks.append(chunk)
    if not chunks:  # the file is no text, of which it was complained
        return None
    yield b"".join(chunks).removeprefix(UTF8_BOM)
    return None


def cut_sections(lines: Iterable[tuple[int, bytes]], section_chars: int) -> Iterator[tuple[int, bytes]]:
    """Yields `(number of the first line, lines)` of each section, whose lines are consecutive."""
    first, held, size = 1, list[bytes](), 0
    for number, line in lines:
        if held and number != first + len(held):  # a line between them was too long and is left out
            yield first, b"".join(held)
            held, size = [], 0
        first = first if held else number
        held.append(line)
        size += len(line)
        # A paragraph without an end is cut at a line end, twice as late.
        if size >= section_chars and (not line.strip() or size >= 2 * section_chars):
            yield first, b"".join(held)
            held, size = [], 0
    if held:
        yield first, b"".join(held)


def read_jsonl(file: File, complain: Complaint, limit: Limit) -> Iterator[tuple[str, Record]]:
    """Yields `(where, record)` of a JSON Lines file; blank lines are skipped."""
    decoder = _TextDecoder()
    for number, line in read_lines(file, complain, limit):
        for where, text in _decoded(file, number, line, complain):
            if not text.strip():
                continue
            try:
                record = decoder.decode(text)
            except (ValueError, RecursionError) as error:
                problem = f"is not valid JSON ({getattr(error, 'msg', error)}, column {getattr(error, 'colno', 1)})"
                complain("not JSON", where, problem, "correct the line")
                continue
            yield from decoder.objects(where, record, complain)


def read_json(file: File, complain: Complaint, limit: Limit) -> Iterator[tuple[str, Record]]:
    """Yields `(where, record)` of a JSON file: JSON Lines, or a list or one record, for which it is read as a whole."""
    # Closed at once: only the first line with text is read here.
    with closing(read_lines(file, lambda *problem: None, limit)) as lines:
        first = next((line for _, line in lines if line.strip()), b"")
    if first.lstrip().startswith(b"{"):
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            pass  # an object over several lines
        else:
            yield from read_jsonl(file, complain, limit)
            return
    way_out = "write one record a line (jq -c '.[]' FILE.json > FILE.jsonl)"
    for content in whole(file, complain, MAX_JSON_BYTES, way_out):
        for _, text in _decoded(file, 1, content, complain):
            if text.strip():
                yield from _json_items(file, text, complain, limit)


def _json_items(file: File, text: str, complain: Complaint, limit: Limit) -> Iterator[tuple[str, Record]]:
    """Yields the items of a list, or the only value. Items before damage are yielded first."""
    decoder = _TextDecoder()
    at, line, counted = _next(text, 0), 1, 0
    is_list = text[at] == "["
    at = _next(text, at + is_list)
    while at < len(text) and not (is_list and text[at] == "]"):
        # Counted from the item before: counting from the start for each item would be quadratic.
        line, counted = line + text.count("\n", counted, at), at
        where = f"{file.name}:{line}"
        try:
            record, end = decoder.raw_decode(text, at)
            # A file that is one list of turns is one conversation.
            if is_list and counted == at and counted == _next(text, text.index("[") + 1) and _is_turn(record):
                at, is_list = text.index("["), False
                record, end = decoder.raw_decode(text, at)
            end = _next(text, end)
            if is_list and text[end : end + 1] not in (",", "]"):
                raise json.JSONDecodeError("a comma or the end of the list is missing", text, end)
            if not is_list and end < len(text):
                raise json.JSONDecodeError("Extra data", text, end)
            at = _next(text, end + (text[end : end + 1] == ","))
        except (ValueError, RecursionError) as error:
            where = f"{file.name}:{getattr(error, 'lineno', line)}"
            problem = f"is not valid JSON ({getattr(error, 'msg', error)}, column {getattr(error, 'colno', 1)})"
            return complain("rest of a file that is not JSON", where, f"{problem} from here on", "correct the file")
        if at - counted > limit.max_bytes:
            complain("record too long", where, *limit.record_problem())
        else:
            yield from decoder.objects(where, record, complain)
    return None


def _next(text: str, at: int) -> int:
    """Returns the position of the next character that is not white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


class SpelledNumber(float):
    """A number of JSON with a fraction or an exponent, which as an answer is learned in its own spelling."""

    def __new__(cls, spelling: str) -> "SpelledNumber":
        return super().__new__(cls, spelling)

    def __init__(self, spelling: str) -> None:
        self.spelling = spelling

    def __getnewargs__(self) -> tuple[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self.spelling,)


class _TextDecoder(json.JSONDecoder):
    """Decodes JSON whose objects have each field once."""

    def __init__(self) -> None:
        self._twice: list[str] = []
        super().__init__(object_pairs_hook=self._object, parse_float=SpelledNumber)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            self._twice.append(next(name for name in names if names.count(name) > 1))
        return result

    def objects(self, where: str, record: Any, complain: Complaint) -> Iterator[tuple[str, Record]]:
        """Yields a decoded value if it is a record, or a list of turns; complains about any other."""
        twice, self._twice[:] = self._twice[:], []
        named = record.items() if isinstance(record, dict) else [("messages", record)]
        if twice:
            complain("two fields of one name", where, f"has two fields called {twice[0]!r}", "remove one of them")
        elif deep := next((name for name, value in named if is_deep(value)), ""):
            problem = f"has too many levels of lists and objects in the field {printable(deep)!r}"
            complain("nested too deeply", where, problem, "leave it out")
        elif isinstance(record, list) and record and all(map(_is_turn, cast(list[Any], record))):
            yield where, {"messages": record}
        else:
            yield from _objects(where, record, complain)


def _is_turn(value: Any) -> bool:
    if not isinstance(value, dict) or not {"messages", "conversations", "prompt", "text"}.isdisjoint(value):
        return False
    return ("role" in value and ("content" in value or "tool_calls" in value)) or {"from", "value"} <= value.keys()


def _objects(where: str, record: Any, complain: Complaint) -> Iterator[tuple[str, Record]]:
    if isinstance(record, dict):
        yield where, record
        return
    problem = f"holds a JSON {type(record).__name__} where an object is expected"
    complain("not a JSON object", where, problem, 'write {"text": ...} for each record')


def read_csv(file: File, complain: Complaint, limit: Limit) -> Iterator[tuple[str, Record]]:
    """Yields `(where, record)` of a text table: the first row names the columns; an empty cell is None. The limit also
    applies to a cell.

    The separator of `.tsv` is the tab, that of `.csv` the one that divides the first row into most cells: commas,
    semicolons or tabs, or the one of a line `sep=;` before it. Cells with separators, quotes or line ends are quoted as
    in RFC 4180. Lines end with LF, CR LF or, in a file without LF, with CR.
    """
    last, has_complained = 0, False

    def complain_of_line(reason: str, where: str, problem: str, way_out: str) -> None:
        nonlocal has_complained
        has_complained = True
        complain(reason, where, problem, way_out)

    def lines() -> Iterator[str]:
        nonlocal last
        for number, line in read_lines(file, complain_of_line, limit, end=_line_end(file)):
            for _, text in _decoded(file, number, line, complain_of_line):
                last = number
                yield text

    rows, separator = lines(), "\t" if file.extension == ".tsv" else ""
    head = [next((line for line in rows if line.strip()), "")]
    if found := re.fullmatch(r"sep=([,;\t|])\s*", head[0], re.IGNORECASE):
        separator, head = found[1], [next(rows, "")]
    while "".join(head).count('"') % 2 and len(head) < _HEADER_LINES and (line := next(rows, "")):
        head.append(line)  # a quoted name may have line ends
    if has_complained:
        return None  # the header was unreadable, so the next row is not one
    if "".join(head).count('"') % 2:
        problem = "the first row, the names of the columns, has a quote that is not closed"
        return complain("not CSV", f"{file.name}:1", problem, "correct the quotes in the file")
    separator = separator or max(",;\t", key=lambda one: len(_header(head, one, limit)))
    names = [" ".join(name.split()) for name in _header(head, separator, limit)]
    if twice := [name for name in names if name and names.count(name) > 1]:
        problem = f"has {names.count(twice[0])} columns called {twice[0]!r}"
        return complain("two columns of one name", f"{file.name}:1", problem, "rename or remove the others")
    table, first = csv.reader(rows, delimiter=separator, strict=True), last + 1
    while True:
        try:
            row = _next_row(table, limit)
        except csv.Error as error:
            way_out = f"correct the quotes in the file, or {limit.way_out} if a cell is that long"
            problem = f"is not a row of a table ({error}), so the rest of the file cannot be read"
            return complain("rest of a file that is not CSV", f"{file.name}:{last}", problem, way_out)
        if row is None:
            return None
        where, first = f"{file.name}:{first}", last + 1
        if row and len(row) != len(names):
            problem = f"has {len(row)} cells under {len(names)} columns"
            complain("not CSV", where, problem, 'quote cells that hold the separator: "like, this"')
        elif len(row) > 1 and row[0].strip() == names[0] and [" ".join(cell.split()) for cell in row] == names:
            complain("header again", where, "repeats the first row, the names of the columns", "remove it")
        elif any(row):
            yield where, {name: cell or None for name, cell in zip(names, row, strict=True)}


def _next_row(table: Iterator[list[str]], limit: Limit) -> list[str] | None:
    """Returns the next row, None at the end. The limit on a cell belongs to the whole process, in which others read
    tables, too (importlib.metadata does): it holds while this row is read. It must fit a C long, perhaps of 32 bits.
    """
    before = csv.field_size_limit(min(limit.max_bytes, 2**31 - 1))
    try:
        return next(table, None)
    finally:
        csv.field_size_limit(before)


def _header(lines: Sequence[str], separator: str, limit: Limit) -> list[str]:
    try:
        return _next_row(csv.reader(lines, delimiter=separator), limit) or []
    except csv.Error:
        return []


def _line_end(file: File) -> bytes:
    """Returns the line end of a table: CR where its beginning has no LF, as Excel for Mac wrote them."""
    with opened(file) as raw, closing(_chunks(raw, file, lambda *problem: None, lambda: 1)) as chunks:
        head = next(chunks, b"")
    return b"\r" if b"\r" in head and b"\n" not in head else b"\n"


def read_parquet(file: File, complain: Complaint, choose: ChooseColumns) -> Iterator[tuple[str, Record]]:
    """Yields `(where, record)` of a Parquet file, with the columns that `choose` selects."""
    row = 0
    with opened(file) as raw, _damaged_table(file, complain, lambda: row):
        table = pyarrow.parquet.ParquetFile(raw)
        if not _has_unique_names(file, table.schema_arrow.names, complain):
            return
        columns = choose(table.schema_arrow)
        # Small batches bound the memory: a row may have megabytes of text.
        for batch in table.iter_batches(batch_size=256, columns=columns, use_threads=False):
            for record in batch.to_pylist():
                row += 1
                yield f"{file.name}: row {row}", record


def read_arrow(file: File, complain: Complaint, choose: ChooseColumns) -> Iterator[tuple[str, Record]]:
    """Does `read_parquet` for Arrow files, and for the Arrow streams of a Hugging Face `datasets` folder."""
    row = 0
    with opened(file) as raw, _damaged_table(file, complain, lambda: row):
        is_file = raw.read(len(_ARROW_FILE)) == _ARROW_FILE
        raw.seek(0)
        table: Any = pyarrow.ipc.open_file(raw) if is_file else pyarrow.ipc.open_stream(raw)
        if not _has_unique_names(file, table.schema.names, complain):
            return
        columns = choose(table.schema)
        for batch in map(table.get_batch, range(table.num_record_batches)) if is_file else table:
            for record in batch.select(columns).to_pylist():
                row += 1
                yield f"{file.name}: row {row}", record


def _has_unique_names(file: File, names: Sequence[str], complain: Complaint) -> bool:
    """Returns True if all columns have different names, after a complaint otherwise."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        problem = f"has {list(names).count(twice)} columns called {twice!r}"
        complain("two columns of one name", file.name, problem, "rename or remove the others")
    return twice is None


@contextmanager
def opened(file: File) -> Iterator[Any]:
    """Opens a file without decompressing it. Raises `DataError` if it cannot be opened."""
    try:
        handle = file.filesystem.open(file.path, "rb")
    except FileNotFoundError:
        raise DataError(f"{file.name}: no such file; check --data.sources") from None
    except PermissionError:
        raise DataError(f"{file.name}: permission denied; check its permissions") from None
    except OSError as error:
        raise DataError(f"{file.name}: cannot be opened ({error}); check --data.sources") from None
    with handle:
        yield handle


def _chunks(raw: Any, file: File, complain: Complaint, line: Callable[[], int]) -> Generator[bytes]:
    """Yields decompressed data; intact data before damage is yielded first, then `complain` is called."""
    try:
        match file.compression:
            case "gz":
                # Raises `EOFError` if the file ends within a member. Small steps yield everything that is intact.
                with gzip.open(raw) as unpacked:
                    while chunk := unpacked.read1(io.DEFAULT_BUFFER_SIZE):
                        yield chunk
            case "zst":
                # zstandard's own stream reader does not notice a file that ends within a frame. 2 GiB is the
                # window of `zstd --long=31`.
                frames = zstandard.ZstdDecompressor(max_window_size=2**31)
                frame, inside = frames.decompressobj(), False
                while data := raw.read(_ZSTD_BYTES):
                    while data:
                        inside = True
                        yield frame.decompress(data)
                        data = b""
                        if frame.eof:
                            data, inside = frame.unused_data, False
                            frame = frames.decompressobj()
                if inside:
                    raise EOFError
            case _:
                while chunk := raw.read(CHUNK_BYTES):
                    yield chunk
    except EOFError:
        problem = f"the {file.compression} data is cut off here; the file is incomplete"
        complain("truncated", f"{file.name}:{line()}", problem, "fetch the file again")
    except (zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        problem = f"the {file.compression} data is damaged here ({error})"
        complain("damaged file", f"{file.name}:{line()}", problem, "fetch the file again")
    except OSError as error:
        complain("unreadable", f"{file.name}:{line()}", f"reading failed ({error})", "check the disk or the network")


def _text_chunks(raw: Any, file: File, complain: Complaint, line: Callable[[], int]) -> Iterator[bytes]:
    """Does `_chunks` for a text; complains once about a file whose beginning shows that it is none, or not UTF-8."""
    chunks = _chunks(raw, file, complain, line)
    first = next(chunks, b"")
    for mark, what, remedy in _FORMATS:
        if first.startswith(mark):
            return complain("no text", file.name, f"is {what}, not text", remedy)
    if encoding := _wide_encoding(first):
        problem = f"is not UTF-8 (it looks like {encoding})"
        return complain("not UTF-8", f"{file.name}:1", problem, f"convert the file (iconv -f {encoding} -t UTF-8)")
    yield first
    yield from chunks
    return None


def _wide_encoding(head: bytes) -> str:
    """Returns the encoding of a text of two or four bytes a character, by its mark or its zero bytes, else ""."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    judged = head[:_JUDGED_BYTES]
    for start, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        zeros, others = judged[start::2].count(0), judged[1 - start :: 2].count(0)
        if len(judged) >= 4 and zeros > _MANY_ZEROS * len(judged) > others:
            return name
    return ""


def _encoding_of(data: bytes) -> str:
    """Guesses the encoding of text that is not UTF-8, for the remedy."""
    high = [byte for byte in data if byte > 0x7F]
    if len(high) > _MANY_HIGH * len(data.strip()):  # not a language of Latin script
        if not is_installed("clean"):
            return "ENCODING"
        from resiliparse.parse.encoding import detect_encoding  # pyright: ignore[reportMissingModuleSource]

        guess = detect_encoding(data)
        if guess and guess.lower() not in ("utf-8", "windows-1252", "iso-8859-1"):
            return guess.upper()
    return "WINDOWS-1252" if any(byte < 0xA0 for byte in high) else "LATIN1"


def _decoded(file: File, line: int, data: bytes, complain: Complaint) -> Iterator[tuple[str, str]]:
    try:
        yield f"{file.name}:{line}", data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = line + data.count(b"\n", 0, error.start)
        problem = f"is not UTF-8 (byte 0x{data[error.start]:02x})"
        complain(
            "not UTF-8", f"{file.name}:{at}", problem, f"convert the file (iconv -f {_encoding_of(data)} -t UTF-8)"
        )


@contextmanager
def _damaged_table(file: File, complain: Complaint, row: Callable[[], int]) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        where = f"{file.name}: after row {row()}" if row() else file.name
        reason = str(error).splitlines()[0].rstrip(".")
        problem = f"the {file.extension.lstrip('.')} file is damaged or cut off ({reason})"
        complain("damaged file", where, problem, "fetch the file again")
