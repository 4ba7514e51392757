"""Reads the text of PDF and DOCX documents, with the extra `documents` (pypdf, python-docx).

A PDF is read page by page; pages without text, such as scans, are counted. Of a DOCX the paragraphs and tables are read
in their order, a row of a table as one line. Both are cut like text files.
"""

import importlib.util
import io
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from modelwright.core.config import DataError, install_line
from modelwright.data.sources.readers import Complaint, File, Skip, cut_sections, whole

NAMES = {".pdf": "PDF document", ".docx": "Word document"}
_PAGE, _ARCHIVE = ("resiliparse", "clean"), ("fastwarc", "clean")
OPTIONAL = {
    ".pdf": ("pypdf", "documents"), ".docx": ("docx", "documents"),
    ".html": _PAGE, ".htm": _PAGE, ".warc": _ARCHIVE, ".wet": _ARCHIVE,
}  # fmt: skip
"""Formats of sources that an extra reads: its package, and the name of the extra."""
_MOST_BYTES = 2**28
"""Maximum size of a document, and of what is compressed in it."""


def is_readable(file: File, pass_over: Callable[[str, str], None]) -> bool:
    """Returns True if the package that reads a file of this format is installed. Otherwise raises `DataError` for one
    that the user named, and passes over others."""
    package, extra = OPTIONAL.get(file.extension, ("", ""))
    if not package or importlib.util.find_spec(package) is not None:
        return True
    name, remedy = NAMES.get(file.extension, f"{file.extension} file"), f"{install_line(extra)} to read it"
    if file.is_named:
        raise DataError(f"{file.name}: is a {name}; {remedy}")
    pass_over(f"{name} ({remedy})", file.name)
    return False


def read_document(file: File, complain: Complaint, skip: Skip, section_chars: int) -> Iterator[tuple[str, str]]:
    """Yields `(where, text)` of the sections of a document. skip: receives pages without text."""
    for content in whole(file, complain, _MOST_BYTES, "divide it", is_text=False):
        read = _pdf_pages if file.extension == ".pdf" else _docx_parts
        try:
            # The libraries raise errors of any kind for a damaged file.
            parts = list(read(file, content, skip))
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            problem = f"the {NAMES[file.extension]} cannot be read ({reason})"
            complain("damaged file", file.name, problem, "save it again without a password, or as text")
            return
        for where, text in parts:
            lines = enumerate(text.encode("utf-8", "replace").splitlines(keepends=True), start=1)
            for first, section in cut_sections(lines, section_chars):
                yield f"{where}: line {first}" if first > 1 else where, section.decode("utf-8")


def _pdf_pages(file: File, content: bytes, skip: Skip) -> Iterator[tuple[str, str]]:
    import pypdf  # pyright: ignore[reportMissingImports]

    reader: Any = pypdf.PdfReader(io.BytesIO(content))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it needs a password")
    for number, page in enumerate(reader.pages, start=1):
        where, text = f"{file.name}: page {number}", page.extract_text()
        if text.strip():
            yield where, text
        else:
            skip("PDF page without text (a scan?)", where)


def _docx_parts(file: File, content: bytes, skip: Skip) -> Iterator[tuple[str, str]]:
    import docx  # pyright: ignore[reportMissingImports]

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if (size := sum(one.file_size for one in archive.infolist())) > _MOST_BYTES:
            raise ValueError(f"it unpacks to {size:,} bytes, limit {_MOST_BYTES:,}")
    document: Any = docx.Document(io.BytesIO(content))
    paragraphs: list[str] = []
    for block in document.iter_inner_content():
        if hasattr(block, "rows"):
            paragraphs += ["\n".join("\t".join(cell.text for cell in row.cells) for row in block.rows)]
        else:
            paragraphs.append(block.text)
    text = "\n\n".join(paragraph for paragraph in paragraphs if paragraph.strip())
    if text:
        yield file.name, text
    else:
        skip("Word document without text", file.name)
