"""Files as programs really write them: encodings, line ends, headers, formats under another name."""

import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from modelwright.core.config import DataError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.config import CleanConfig
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.pipeline.cleaning import clean_sources


def read(path: Path, **settings: Any) -> tuple[list[Document], SourceReport]:
    report = SourceReport()
    config = SourceConfig(sources=(str(path),), validation_fraction=0.0, **settings)
    return list(read_documents(config, report=report)), report


def pairs(path: Path) -> list[tuple[str, str]]:
    return [(document.meta["question"], document.meta["answer"]) for document in read(path)[0]]


@pytest.mark.parametrize(("content", "expected"), [
    ("question,answer\rQ,A\rR,B\r", [("Q", "A"), ("R", "B")]),
    ('question,answer\rQ,"A\rC"\rR,B', [("Q", "A\rC"), ("R", "B")]),
    ("question;answer\r\nQ, then;A\r\n", [("Q, then", "A")]),
    ("sep=;\r\nquestion;answer\r\nQ;A\r\n", [("Q", "A")]),
    ('"question"\t"answer"\nQ\tA\n', [("Q", "A")]),
    ('"answer","question"\n"A\nC",Q\n', [("Q", "A\nC")]),
    (" question , answer \nQ,A\n", [("Q", "A")]),
    ('answer,question,"a note;\nwith; ends"\nA,Q,x\n', [("Q", "A")]),
    ("\ufeffquestion,answer\nQ,A\n\ufeffR,B\n", [("Q", "A"), ("R", "B")]),
])  # fmt: skip
def test_tables_of_text(tmp_path: Path, content: str, expected: list) -> None:
    (tmp_path / "t.csv").write_bytes(content.encode())
    assert pairs(tmp_path / "t.csv") == expected


@pytest.mark.parametrize(("content", "problem"), [
    ("question,answer,answer\nQ,A,B\n", r"t\.csv:1: has 2 columns called 'answer'"),
    ("question;answer; answer \nQ;A;B\n", r"t\.csv:1: has 2 columns called 'answer'"),
    ("question,answer\nQ,A\nquestion,answer\nR,B\n", r"t\.csv:3: repeats the first row"),
    ('"question\n(in English)",answer\nQ,A\n', r"t\.csv:3: .*its fields: question \(in English\), answer"),
    ('"question,answer\nQ,A\n', r"t\.csv:1: .*has a quote that is not closed"),
])  # fmt: skip
def test_tables_that_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "t.csv").write_bytes(content.encode())
    with pytest.raises(DataError, match=problem):
        read(tmp_path / "t.csv")


@pytest.mark.parametrize("record", [
    '{"question": "Q", "answer": "A", "answer": "B"}', '{"answer": 1, "question": "Q", "answer": 1}',
    '{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "content": "B"}]}',
])  # fmt: skip
def test_fields_that_occur_twice_are_refused(tmp_path: Path, record: str) -> None:
    for name, content in (("r.jsonl", f"{record}\n"), ("r.json", f"[{record}]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=rf"{name}:1: has two fields called '(answer|content)'"):
            read(tmp_path / name)
    (tmp_path / "r.json").write_text(f'[{record}, {{"question": "Q", "answer": "C"}}]')
    documents, report = read(tmp_path / "r.json", on_bad_record="skip")
    assert ([d.meta["answer"] for d in documents], report.skipped) == (["C"], {"two fields of one name": 1})


def test_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.table([["Q"], ["A"], ["B"]], names=["question", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pa.ipc.new_stream(tmp_path / "t.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("t.parquet", "t.arrow"):
        with pytest.raises(DataError, match="2 columns called 'answer'"):
            read(tmp_path / name)


@pytest.mark.parametrize("name", ["t.txt", "t.py", "t.csv", "t.jsonl", "t.html"])
@pytest.mark.parametrize(("text", "encoding", "named"), [
    ("Don\u2019t stop \u2013 caf\u00e9", "cp1252", "WINDOWS-1252"), ("caf\u00e9 ol\u00e9", "latin-1", "LATIN1"),
    ("Привет, это обычный русский текст о море и о лодках.", "cp1251", "CP1251"),
    ("これは日本語で書かれた海と船についての文章です。", "shift_jis", "SHIFT_JIS"),
    ("A plain text of some length.", "utf-16", "UTF-16"), ("A plain text.", "utf-16-le", "UTF-16LE"),
    ("A plain text.", "utf-16-be", "UTF-16BE"), ("A plain text.", "utf-32", "UTF-32"),
])  # fmt: skip
def test_the_remedy_names_the_encoding(tmp_path: Path, name: str, text: str, encoding: str, named: str) -> None:
    path = tmp_path / name
    path.write_bytes(f"{text}\n".encode(encoding))
    with pytest.raises(DataError, match=rf"is not UTF-8 .*\(iconv -f {named} -t UTF-8\)"):
        read(path)
    assert path.read_bytes().decode(named) == f"{text}\n"
    with pytest.raises(DataError, match="none of the records could be read"):
        read(path, on_bad_record="skip")


@pytest.mark.parametrize(("content", "what"), [
    (b"%PDF-1.7\n...", "a PDF document"), (b"PK\x03\x04...", "a ZIP archive"), (gzip.compress(b"x", mtime=0), "gzip"),
])  # fmt: skip
def test_formats_under_another_name_are_named(tmp_path: Path, content: bytes, what: str) -> None:
    for name in ("a.txt", "a.jsonl", "a.csv"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=what):
            read(tmp_path / name)


@pytest.mark.parametrize(("head", "encoding"), [
    ('<meta charset="windows-1251">', "cp1251"), ("<META http-equiv=x content='text/html; charset=koi8-r'>", "koi8-r"),
    ("<?xml version='1.0' encoding='iso-8859-5'?>", "iso8859-5"), ("<meta charset=utf-8>", "utf-8"), ("", "utf-8"),
])  # fmt: skip
def test_pages_in_the_encoding_that_they_declare(tmp_path: Path, head: str, encoding: str) -> None:
    (tmp_path / "p.html").write_bytes(f"{head}<body><p>Привет, море</p></body>".encode(encoding))
    assert [document.text.strip() for document in read(tmp_path / "p.html")[0]] == ["Привет, море"]


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_files_and_streams(tmp_path: Path, kind: str) -> None:
    table = pa.table({"question": ["Q", "R"], "answer": ["A", "B"]})
    with getattr(pa.ipc, f"new_{kind}")(tmp_path / "t.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=1)
    assert pairs(tmp_path / "t.arrow") == [("Q", "A"), ("R", "B")]
    content = (tmp_path / "t.arrow").read_bytes()
    (tmp_path / "t.arrow").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="damaged or cut off"):
        read(tmp_path / "t.arrow")


def test_several_byte_order_marks(tmp_path: Path) -> None:
    line = '\ufeff{"text": "A text of the sea."}\n'
    (tmp_path / "t.jsonl").write_text(line * 2 + "\ufeff" + line, encoding="utf-8")
    assert [document.text for document in read(tmp_path / "t.jsonl")[0]] == ["A text of the sea."] * 3


def test_file_names_that_are_not_utf8(tmp_path: Path) -> None:
    place = tmp_path / "in"
    place.mkdir()
    for name in (b"caf\xe9.txt", b"caf\xe8.txt", b"\xff.bin"):
        try:
            Path(os.fsdecode(os.fsencode(place) + b"/" + name)).write_text("A text of the sea and of its boats, long.")
        except OSError:
            pytest.skip("this file system has no such names")
    documents, report = read(place)
    assert [document.id for document in documents] == [rf"{place}/caf\xe8.txt:1", rf"{place}/caf\xe9.txt:1"]
    assert report.examples["unsupported .bin"] == [rf"{place}/\xff.bin"]
    config = SourceConfig(sources=(str(place),), validation_fraction=0.0)
    assert clean_sources(config, CleanConfig(num_workers=1), str(tmp_path / "out"), SilentProgress())


def test_pdf_and_word_documents(tmp_path: Path) -> None:
    docx, pypdf = pytest.importorskip("docx"), pytest.importorskip("pypdf")
    document = docx.Document()
    document.add_paragraph("The harbor opens at six.")
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "Arvik", "06:20"
    document.save(str(tmp_path / "a.docx"))
    assert [d.text.strip() for d in read(tmp_path / "a.docx")[0]] == ["The harbor opens at six.\n\nArvik\t06:20"]
    (tmp_path / "a.pdf").write_bytes(_pdf("The harbor opens at six."))
    (found,), _ = read(tmp_path / "a.pdf")
    assert (found.text.strip(), found.id) == ("The harbor opens at six.", f"{tmp_path}/a.pdf: page 1")
    writer, locked = pypdf.PdfWriter(), io.BytesIO()
    writer.add_blank_page(72, 72)
    writer.write(str(tmp_path / "scan.pdf"))
    _, report = read(tmp_path)
    assert report.skipped == {"PDF page without text (a scan?)": 1}
    writer.encrypt("secret")
    writer.write(locked)
    for name, content in (
        ("locked.pdf", locked.getvalue()),
        ("cut.pdf", b"%PDF-1.7\n1 0"),
        ("bad.docx", b"PK\x03\x04x"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}: the (PDF|Word) document cannot be read"):
            read(tmp_path / name)


def test_without_the_extra_documents_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelwright.data.sources.office.importlib.util.find_spec", lambda name: None)
    (tmp_path / "a.pdf").write_bytes(_pdf("x"))
    with pytest.raises(DataError, match=r"a\.pdf: is a PDF document; pip install 'modelwright\[documents\]'"):
        read(tmp_path / "a.pdf")
    (tmp_path / "a.txt").write_text("A text.")
    _, report = read(tmp_path)
    (reason,) = report.passed_over
    assert reason.startswith("PDF document (pip install")


def _pdf(text: str) -> bytes:
    """A page with one line."""
    stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    fonts = b"/Resources << /Font << /F1 5 0 R >> >>"
    parts = [
        b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Contents 4 0 R %s >>" % fonts,
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]  # fmt: skip
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, part in enumerate(parts, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, part)
    start = len(out)
    out += b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places)
    return bytes(out + b"trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start)


@pytest.mark.parametrize("suffix", [".zst", ".gz", ""])
@pytest.mark.parametrize("between", ["\u2028", "\u2029", "\x85", "\x0c"])
def test_files_of_several_frames_whose_texts_have_other_line_separators(
    tmp_path: Path, suffix: str, between: str
) -> None:
    texts = [f"number {half} begins{between}and ends" for half in (1, 2)]
    halves = [f"{json.dumps({'text': text}, ensure_ascii=False)}\n".encode() for text in texts]
    frame = zstandard.ZstdCompressor().compress
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"any"
    contents = {
        ".zst": frame(halves[0]) + skippable + frame(halves[1]) + skippable,
        ".gz": gzip.compress(halves[0]) + gzip.compress(b"") + gzip.compress(halves[1]),
        "": b"".join(halves),
    }
    path = tmp_path / f"t.jsonl{suffix}"
    path.write_bytes(contents[suffix])
    assert [document.text for document in read(path)[0]] == texts
