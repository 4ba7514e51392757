"""Web archives: pages of every form of an archive, what is left out, and damage."""

import gzip
from pathlib import Path

import pytest
import zstandard

from modelwright.core.config import DataError
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents

PAGE = "<html><head><title>T</title></head><body><nav>menu</nav><p>Text of page {}.</p><footer>f</footer></body></html>"


def record(kind: str, url: str, block: bytes, content_type: str = "application/http; msgtype=response") -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(block)}\r\n\r\n".encode() + block + b"\r\n\r\n"


def answer(
    url: str, body: bytes, kind: str = "text/html; charset=utf-8", status: str = "200 OK", more: str = ""
) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}\r\n".encode()
    return record("response", url, head + body)


RUSSIAN = "привет, как дела?"
PAGES = [answer(f"http://example.org/{number}", PAGE.format(number).encode()) for number in range(3)]


def read(path: Path, **settings: object) -> tuple[list[Document], SourceReport]:
    report = SourceReport()
    config = SourceConfig(sources=(str(path),), validation_fraction=0.0, **settings)  # type: ignore[arg-type]
    return list(read_documents(config, report=report)), report


def forms() -> dict[str, bytes]:
    whole = b"".join(PAGES)
    return {
        "a.warc": whole,
        "members.warc.gz": b"".join(map(gzip.compress, PAGES)),
        "whole.warc.gz": gzip.compress(whole),
        "a.warc.zst": zstandard.ZstdCompressor().compress(whole),
    }


@pytest.mark.parametrize("name", forms())
def test_pages(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(forms()[name])
    documents, report = read(tmp_path)
    assert [document.text for document in documents] == [f"Text of page {number}." for number in range(3)]
    assert [document.meta["url"] for document in documents] == [f"http://example.org/{number}" for number in range(3)]
    assert documents[1].id == f"{tmp_path / name}: page 2"
    assert not report.skipped


def test_encodings_of_the_content(tmp_path: Path) -> None:
    packed = gzip.compress(b"<p>packed and sent in chunks</p>")
    chunked = f"{len(packed):x}\r\n".encode() + packed + b"\r\n0\r\n\r\n"
    more = "Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"
    content = [
        answer("http://a", "<p>caf\u00e9</p>".encode("latin-1"), "text/html; charset=ISO-8859-1"),
        answer(
            "http://b",
            "<p>\u043f\u0440\u0438\u0432\u0435\u0442, \u043a\u0430\u043a \u0434\u0435\u043b\u0430?</p>".encode("cp1251")
            * 20,
            "text/html",
        ),
        answer("http://c", chunked, more=more),
        answer("http://d", b"plain <p> text", "text/plain"),
        record("conversion", "http://e", "gr\u00fc\u00dfe".encode(), "text/plain"),
    ]
    (tmp_path / "a.warc").write_bytes(b"".join(content))
    texts = [document.text for document in read(tmp_path)[0]]
    assert texts[0] == "caf\u00e9"
    assert texts[1].startswith(RUSSIAN)
    assert texts[2:] == ["packed and sent in chunks", "plain <p> text", "gr\u00fc\u00dfe"]


def test_what_is_no_page_is_left_out_and_counted(tmp_path: Path) -> None:
    content = [
        record("warcinfo", "", b"software: x", "application/warc-fields"),
        record("request", "http://a", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request"),
        answer("http://a", b"<p>gone</p>", status="404 Not Found"),
        answer("http://b", b"\x89PNG", "image/png"),
        record("response", "dns:example.org", b"1.2.3.4", "text/dns"),
        PAGES[0],
        answer("http://c", b"<html></html>"),
    ]
    (tmp_path / "a.wet").write_bytes(b"".join(content))
    documents, report = read(tmp_path)
    assert len(documents) == 1
    assert report.skipped == {
        "web page with status 404": 1, "image/png in a web archive": 1, "no answer of a web server": 1, "empty text": 1,
    }  # fmt: skip


def damaged() -> dict[str, tuple[bytes, int]]:
    """Content and the number of pages that can still be read."""
    whole, members = forms()["a.warc"], forms()["members.warc.gz"]
    flipped = bytearray(members)
    flipped[len(gzip.compress(PAGES[0])) + 60] ^= 255
    return {
        "cut.warc": (whole[: len(PAGES[0]) + len(PAGES[1]) - 30], 1),
        "head.warc": (whole[: len(PAGES[0]) + 40], 1),
        "cut.warc.gz": (members[: len(members) - 40], 2),
        "flipped.warc.gz": (bytes(flipped), 1),
        "other.warc": (b"hello\n" * 100, 0),
    }


@pytest.mark.parametrize("name", damaged())
def test_damage_is_named_and_the_pages_before_it_are_kept(name: str, tmp_path: Path) -> None:
    path, (content, num_whole) = tmp_path / name, damaged()[name]
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"the archive (is damaged here \(.*\)|ends here within a page); fetch the file"
    ):
        read(path)
    if num_whole:
        documents, report = read(path, on_bad_record="skip")
        assert (len(documents), sum(report.skipped.values())) == (num_whole, 1)
    else:
        with pytest.raises(DataError, match=r"none of the records could be read \(1 damaged file\)"):
            read(path, on_bad_record="skip")


@pytest.mark.parametrize("length", ["abc", "-5", "", "1e3", "99999999999999999999", "9" * 5000, "12, 13"])
def test_a_length_that_is_none_is_damage(length: str, tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    said = b"Content-Length: " + str(len(PAGES[1].partition(b"\r\n\r\n")[2]) - 4).encode()
    assert said in PAGES[1]
    path.write_bytes(PAGES[0] + PAGES[1].replace(said, f"Content-Length: {length}".encode()))
    with pytest.raises(DataError, match=r"a\.warc: (after )?page (1|2): the archive (is damaged|ends) here"):
        read(path)
    documents, report = read(path, on_bad_record="skip")
    assert [document.text for document in documents] == ["Text of page 0."]
    assert sum(report.skipped.values()) == 1


def test_pages_that_cannot_be_decoded_are_left_out_and_counted(tmp_path: Path) -> None:
    content = [
        *(
            answer("http://a", b"\x1f\x8b\x08 cut off", more=f"Content-Encoding: {encoding}\r\n")
            for encoding in ("gzip", "br", "deflate", "zstd", "x-own")
        ),
        answer("http://b", b"zz\r\nabc", more="Transfer-Encoding: chunked\r\n"),
        answer("http://c", b"ffffffffffffffff\r\nabc", more="Transfer-Encoding: chunked\r\n"),
        record("response", "http://d", bytes(range(256))),
        answer("http://e", b"<p>x</p>", "text/html\x00"),
        PAGES[0],
    ]
    (tmp_path / "a.warc").write_bytes(b"".join(content))
    documents, report = read(tmp_path)
    assert [document.text for document in documents] == ["Text of page 0."]
    assert report.skipped == {
        "web page whose content cannot be decoded": 7,
        "web page with status unknown": 1,
        "unknown content type in a web archive": 1,
    }
