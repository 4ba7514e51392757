"""Reads web archives: WARC files of crawls (ISO 28500:2017), and their WET files of extracted text (Common Crawl has
both), with the extra `clean`.

A record of one is a page: the visible text of an answer with status 200 and HTML or plain text, or the text of a
`conversion`. Each becomes `{"text", "url"}`. Other records are not text, and are counted or ignored.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecord, WarcRecordType  # pyright: ignore[reportMissingModuleSource]
from resiliparse.extract.html2text import extract_plain_text  # pyright: ignore[reportMissingModuleSource]
from resiliparse.parse.encoding import (  # pyright: ignore[reportMissingModuleSource]
    bytes_to_str,
    detect_encoding,
    map_encoding_to_html5,
)

from modelwright.data.sources.readers import Complaint, File, Record, Skip, opened

PAGES = WarcRecordType.response | WarcRecordType.conversion
"""Record types with the text of a page, unlike requests, revisits and metadata of the crawler."""
MARKUP_TYPES = ("text/html", "application/xhtml+xml")
TEXT_TYPES = ("text/plain",)
_MIME_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+|no content type", re.ASCII)


def read_warc(file: File, complain: Complaint, skip: Skip) -> Iterator[tuple[str, Record]]:
    """Yields `(where, record)` of the pages of an archive; `where` counts the archive's pages from 1, read or not.

    Pages before damage are yielded first, then the complaint is raised.
    """
    number = 0
    with opened(file) as raw:
        # HTTP is parsed below, so that a malformed answer is not damage to the archive.
        records = iter(ArchiveIterator(raw, record_types=PAGES, parse_http=False))
        while True:
            where = f"{file.name}: page {number + 1}"
            try:
                record = next(records, None)
                if record is None:
                    return None
                stated = str(record.headers.get("Content-Length", ""))
                if not (stated.isascii() and stated.isdecimal()):
                    raise ValueError(f"Content-Length is {stated[:40]!r}")
                length, block = int(stated), record.reader.read()  # Python refuses numbers of over 4,300 digits
            except (OSError, ValueError) as error:
                after = f"{file.name}: after page {number}" if number else file.name
                return complain("damaged file", after, f"the archive is damaged here ({error})", "fetch the file again")
            number += 1
            if len(block) != length:  # the reader ends at the end of the file without an error
                return complain("truncated", where, "the archive ends here within a page", "fetch the file again")
            text = _text(record, block, lambda reason, where=where: skip(reason, where))
            if text is not None:
                url = record.headers.get("WARC-Target-URI", "")
                yield where, {"text": text, **({"url": url} if url else {})}


def _text(record: Any, block: bytes, skip: Callable[[str], None]) -> str | None:
    """Returns the text of a record with the content `block`; None without text, after a call of `skip`."""
    if record.record_type == WarcRecordType.conversion:
        return bytes_to_str(block, "utf-8")
    answer = WarcRecord()  # a copy, because after undecodable content the archive's own reader could not continue
    answer.set_bytes_content(block)
    answer.is_http = record.is_http
    try:
        answer.parse_http(auto_decode="all")
        if answer.http_headers is None:
            return skip("no answer of a web server")
        if answer.http_headers.status_code != 200:
            return skip(f"web page with status {answer.http_headers.status_code or 'unknown'}")
        kind = answer.http_content_type or "no content type"
        if kind not in MARKUP_TYPES + TEXT_TYPES:
            return skip(f"{kind if _MIME_TYPE.fullmatch(kind) else 'unknown content type'} in a web archive")
        content = answer.reader.read()
    except (OSError, ValueError):  # what the web server sent, not damage to the archive
        return skip("web page whose content cannot be decoded")
    encoding = map_encoding_to_html5(answer.http_charset) if answer.http_charset else detect_encoding(content)
    text = bytes_to_str(content, encoding or "utf-8")
    if kind in TEXT_TYPES:
        return text
    return extract_plain_text(text, alt_texts=False, skip_elements=["nav", "footer"])
