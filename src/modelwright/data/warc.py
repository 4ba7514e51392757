"""Reads web archives: WARC files of crawls, and their WET files of extracted text (Common Crawl has both).

A record is a page: the text that a browser shows of an answer with status 200 and HTML or plain text, or the text of a
`conversion`. Each becomes `{"text", "url"}`. Other records are no text, and are counted or left alone.

Source: ISO 28500:2017, "The WARC File Format".
"""

from collections.abc import Callable, Iterator
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecordType  # pyright: ignore[reportMissingModuleSource]
from resiliparse.extract.html2text import extract_plain_text  # pyright: ignore[reportMissingModuleSource]
from resiliparse.parse.encoding import (  # pyright: ignore[reportMissingModuleSource]
    bytes_to_str,
    detect_encoding,
    map_encoding_to_html5,
)

from modelwright.data.readers import Complaint, File, Record, opened

PAGES = WarcRecordType.response | WarcRecordType.conversion
"""Requests, revisits and metadata of the crawler hold no text of a page."""
MARKUP_TYPES = ("text/html", "application/xhtml+xml")
TEXT_TYPES = ("text/plain",)

Skip = Callable[[str, str], None]
"""Told `(reason, where)` about a record that is left out."""


def read_warc(file: File, complain: Complaint, skip: Skip) -> Iterator[tuple[str, Record]]:
    """`(where, record)` of the pages of an archive; `where` counts the archive's pages from 1, read or not.

    What can be read before damage is yielded first, then the complaint is raised.
    """
    number = 0
    with opened(file) as raw:
        records = iter(ArchiveIterator(raw, record_types=PAGES, parse_http=False))
        while True:
            where = f"{file.name}: page {number + 1}"
            try:
                record = next(records, None)
                block = b"" if record is None else record.reader.read()
            except (OSError, ValueError) as error:
                after = f"{file.name}: after page {number}" if number else file.name
                return complain("damaged file", after, f"the archive is damaged here ({error})", "fetch the file again")
            if record is None:
                return None
            number += 1
            if len(block) != int(record.headers.get("Content-Length") or -1):
                return complain("truncated", where, "the archive ends here within a page", "fetch the file again")
            text = _text(record, block, lambda reason, where=where: skip(reason, where))
            if text is not None:
                url = record.headers.get("WARC-Target-URI", "")
                yield where, {"text": text, **({"url": url} if url else {})}


def _text(record: Any, block: bytes, skip: Callable[[str], None]) -> str | None:
    """The text of a record whose content is `block`; None if it has none, which `skip` is told."""
    if record.record_type == WarcRecordType.conversion:
        return bytes_to_str(block, "utf-8")
    record.set_bytes_content(block)
    record.parse_http(auto_decode="all")
    if record.http_headers is None:
        return skip("no answer of a web server")
    if record.http_headers.status_code != 200:
        return skip(f"web page with status {record.http_headers.status_code}")
    kind = record.http_content_type or "no content type"
    if kind not in MARKUP_TYPES + TEXT_TYPES:
        return skip(f"{kind} in a web archive")
    content = record.reader.read()
    encoding = map_encoding_to_html5(record.http_charset) if record.http_charset else detect_encoding(content)
    text = bytes_to_str(content, encoding or "utf-8")
    if kind in TEXT_TYPES:
        return text
    return extract_plain_text(text, alt_texts=False, skip_elements=["nav", "footer"])
