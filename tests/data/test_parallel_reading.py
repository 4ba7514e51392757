"""Reading in several processes: the documents, ids, order, counts and errors of reading in one."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from modelwright.core.errors import DataError
from modelwright.data import file_parts
from modelwright.data.file_parts import divide_files, is_large
from modelwright.data.find_files import locate
from modelwright.data.sources import SourceConfig, SourceReport, read_documents
from modelwright.data.workers import LocalProcesses

Read = tuple[list[str], dict[str, Any], list[tuple[str, str, str]], str]


def write_corpus(folder: Path) -> None:
    """Large and small files, line ends of both kinds, blank and broken lines, other files between them."""
    (folder / "notes").mkdir(parents=True)
    for number in range(30):
        (folder / "notes" / f"{number:02}.txt").write_text(f"Note {number}.\n\n" + "More of it here.\n" * (number * 7))
    lines = [json.dumps({"text": f"Record {number}: " + "word " * (number % 50)}) for number in range(3000)]
    lines[700], lines[1500], lines[1501], lines[2400] = "", "{broken", '{"other": 1}', '{"text": ""}'
    (folder / "a.jsonl").write_bytes("\r\n".join(lines).encode() + b"\n\n")
    (folder / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "with a byte order mark"}')
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[:400]).encode()))
    (folder / "d.jsonl").write_bytes("\n".join(lines[2:900]).encode() + b'\n{"text": "\xff"}\n')
    (folder / "image.png").write_bytes(b"")


def read(folder: Path, engine: Any = None, **settings: Any) -> Read:
    report = SourceReport()
    skipped: list[tuple[str, str, str]] = []
    report.on_skip = lambda *entry: skipped.append(entry)
    config = SourceConfig(sources=(str(folder), f"{folder}/a.jsonl"), validation_fraction=0.1, **settings)
    documents, problem = [], ""
    options = {} if engine is None else {"engine": engine}
    try:
        for document in read_documents(config, report=report, **options):
            documents.append(document.to_json())
    except DataError as error:
        problem = str(error)
    return documents, report.facts(), skipped, problem


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.mark.parametrize("part_bytes", [3_000, 40_000])
def test_parts_give_the_same_as_whole_files(corpus: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    whole, stopped = read(corpus, on_bad_record="skip"), read(corpus)
    monkeypatch.setattr(file_parts, "PART_BYTES", part_bytes)
    parts = list(divide_files(locate((str(corpus),), lambda reason, name: None)))
    ranges = [part[0] for part in parts if part[0].end]
    assert len(ranges) > 5
    assert any(is_large(part) for part in parts) == (part_bytes == 3_000)  # the compressed file is read as a stream
    content = (corpus / "a.jsonl").read_bytes()
    of_first = [file for file in ranges if file.name.endswith("a.jsonl")]
    assert b"".join(content[file.start : file.end] for file in of_first) == content
    assert all(content[: file.start].count(b"\n") == file.first_line - 1 for file in of_first)
    assert read(corpus, on_bad_record="skip") == whole
    assert read(corpus) == stopped
    assert "a.jsonl:1501: is not valid JSON" in stopped[3]
    assert len(whole[2]) == 4
    assert whole[1]["num_files"] == 34


def test_processes_give_the_same_documents(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(corpus, on_bad_record="skip")
    monkeypatch.setattr(file_parts, "PART_BYTES", 20_000)
    assert read(corpus, LocalProcesses(2), on_bad_record="skip") == whole


def test_the_corpus_of_this_machine_is_the_same_from_processes() -> None:
    def ids(**options: Any) -> list[str]:
        config = SourceConfig(sources=("stdlib",), stdlib_fraction=0.03)
        return [document.to_json() for document in read_documents(config, report=SourceReport(), **options)]

    expected = ids()
    assert len({json.loads(line)["id"] for line in expected}) == len(expected) > 100
    assert ids(engine=LocalProcesses(2)) == expected
