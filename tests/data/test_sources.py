"""Sources: every format gives documents; every bad input gives one clear error or a counted skip."""

import csv
import errno
import gzip
import json
import os
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from modelwright.core.config import DataError
from modelwright.data.document import Document
from modelwright.data.sources import readers
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from refusals import config_error

LINES = "".join(json.dumps({"text": f"record number {i}"}) + "\n" for i in range(4))


def read(*sources, **settings) -> tuple[list[Document], SourceReport]:
    report = SourceReport()
    config = SourceConfig(sources=tuple(map(str, sources)), **settings)
    return list(read_documents(config, report=report)), report


def texts(*sources, **settings) -> list[str]:
    return sorted(document.text for document in read(*sources, **settings)[0])


RECORDS = sorted(f"record number {i}" for i in range(4))


def write_zst(path: Path, text: str, frames: int = 1) -> Path:
    size = -(-len(text) // frames)
    parts = [text[i : i + size].encode() for i in range(0, len(text), size)]
    path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(part) for part in parts))
    return path


def test_text_and_code_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfA plain text.\r\n")
    (tmp_path / "b.md").write_text("# Title\n\nProse with ümlauts.\n", encoding="utf-8")
    (tmp_path / "c.py").write_text("print('x')\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.rs").write_text("fn main() {}\n")
    (tmp_path / "e.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden.txt").write_text("not read")
    documents, report = read(tmp_path)
    kinds = {Path(document.source).name: document.kind for document in documents}
    assert kinds == {"a.txt": "prose", "b.md": "prose", "c.py": "code", "d.rs": "code"}
    assert next(d.text for d in documents if d.source.endswith("a.txt")) == "A plain text.\r\n"
    assert report.passed_over == {"image without a caption": 1}
    assert not report.skipped
    assert report.documents == {"prose": 2, "code": 2}
    assert report.num_files == 4


def test_long_texts_are_cut_at_blank_lines(tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {i} " + "word " * 30 for i in range(50)) + "\n"
    path = tmp_path / "long.txt"
    path.write_text(text)
    documents, _ = read(path, max_document_chars=1000, validation_fraction=0.0)
    assert "".join(document.text for document in documents) == text
    assert len(documents) > 5
    assert all(document.text.startswith("Paragraph") for document in documents)
    assert documents[1].id.startswith(f"{path}:")


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.jsonl.zst"])
def test_jsonl(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(LINES.encode()))
    elif name.endswith(".zst"):
        write_zst(path, LINES, frames=3)
    else:
        path.write_text(LINES.rstrip("\n"))
    assert texts(path) == RECORDS


def test_parquet_and_arrow_folders(tmp_path: Path) -> None:
    table = pa.table({"text": RECORDS, "id": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert texts(tmp_path / "t.parquet") == RECORDS

    folder = tmp_path / "dataset"
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        (folder / split / "state.json").write_text("{}")
        (folder / split / "dataset_info.json").write_text("{}")
        with pyarrow.ipc.new_stream(folder / split / "data-00000-of-00001.arrow", table.schema) as stream:
            stream.write_table(pa.table({"text": [f"{split} {i}" for i in range(3)], "id": [1, 2, 3]}))
        (folder / split / "cache-12.arrow").write_bytes(b"not read")
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    documents, report = read(folder, validation_fraction=0.0)
    assert {(d.text.split()[0], d.split) for d in documents} == {("train", "train"), ("test", "heldout")}
    assert len(documents) == 6
    assert not report.skipped


def test_datasets_library_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"question": ["Why?", "How?"], "answer": ["So.", "Thus."]})
    dataset.save_to_disk(tmp_path / "saved")
    documents, _ = read(tmp_path / "saved")
    assert {d.meta["answer"] for d in documents} == {"So.", "Thus."}
    assert {d.kind for d in documents} == {"qa"}


def test_globs_urls_and_repeats(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    (tmp_path / "odd[1].txt").write_text("odd name")
    assert texts(tmp_path / "[01].txt") == ["text 0", "text 1"]
    assert texts(tmp_path / "odd[1].txt") == ["odd name"]
    assert len(texts(tmp_path / "*.txt", tmp_path, f"file://{tmp_path}/0.txt")) == 4
    memory = fsspec.filesystem("memory")
    memory.pipe("/box/a.jsonl", LINES.encode())
    assert texts("memory://box/a.jsonl") == texts("memory://box") == texts("memory://box/*.jsonl") == RECORDS


def test_conversations(tmp_path: Path) -> None:
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user", "assistant")]
    records = [{"question": "Q", "answer": "A"}, {"messages": turns}, {"messages": turns[1:3]}]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, records)))
    documents, _ = read(tmp_path / "qa.jsonl", validation_fraction=0.0)
    assert [d.kind for d in documents] == ["qa"] * 3
    assert documents[0].meta == {"question": "Q", "answer": "A"}
    assert documents[0].text == "Q\n\nA"
    assert documents[1].messages == turns
    assert documents[1].body == "assistant\n\nassistant"
    assert documents[2].meta == {"question": "user", "answer": "assistant"}


def test_a_kept_document_can_come_in_again(tmp_path: Path) -> None:
    document = Document(id="x", text="Some text", kind="code", split="heldout", source="s", meta={"a": 1})
    (tmp_path / "kept.jsonl").write_text(document.to_json())
    assert read(tmp_path / "kept.jsonl")[0] == [document]


def test_the_own_fields_of_a_record_are_kept(tmp_path: Path) -> None:
    own = {"id": "abc-7", "url": "https://example.org/a?b=1", "language": "en", "score": 0.75}
    (tmp_path / "m.jsonl").write_text(json.dumps({"text": "a", **own, "other": [1]}) + '\n{"text": "b", "id": [1]}')
    rows = [{"text": "a text", **own, "other": "x"}, {"text": "b", **dict.fromkeys(own)}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    for name in ("m.jsonl", "m.parquet"):
        documents, _ = read(tmp_path / name, validation_fraction=0.0)
        assert [document.meta for document in documents] == [own, {}], name
        assert documents[0].id.startswith(str(tmp_path / name)), "unique among all sources"


def test_a_kept_field_of_a_wrong_type_is_left_out(tmp_path: Path) -> None:
    """Fields that documents give a meaning; tables have nulls where a record has none."""
    records = [
        {"text": "a", "title": None, "messages": [1]},
        {"text": "b", "title": "T", "rejected": "x", "other": None},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    names = ("title", "messages", "rejected", "other")
    documents = read(tmp_path / "a.jsonl", record_type="text", keep_fields=names, validation_fraction=0.0)[0]
    assert [document.meta for document in documents] == [{}, {"title": "T", "other": None}]
    assert [document.body for document in documents] == ["a", "b"]


def test_half_surrogates_become_question_marks(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{"text": "broken \\ud83d here"}\n{"text": "whole \\ud83d\\ude00"}')
    documents, report = read(tmp_path / "s.jsonl")
    assert sorted(document.text for document in documents) == ["broken ? here", "whole 😀"]
    (line,) = (line for line in report.summary() if line.startswith("changed: "))
    assert "1 half a surrogate pair became a question mark" in line
    assert "s.jsonl:1" in line


def test_split_depends_on_the_text_alone(tmp_path: Path) -> None:
    for order, name in ((range(400), "a.jsonl"), (reversed(range(400)), "b.jsonl")):
        (tmp_path / name).write_text("\n".join(json.dumps({"text": f"text {i}"}) for i in order))
    sides = [{d.text: d.split for d in read(tmp_path / name)[0]} for name in ("a.jsonl", "b.jsonl")]
    assert sides[0] == sides[1]
    assert 8 <= sum(side == "heldout" for side in sides[0].values()) <= 32


@pytest.mark.parametrize("count", [2, 3, 7])
def test_something_is_held_out_of_few_documents(tmp_path: Path, count: int) -> None:
    (tmp_path / "few.jsonl").write_text("\n".join(json.dumps({"text": f"text {i}"}) for i in range(count)))
    sides = [document.split for document in read(tmp_path / "few.jsonl", validation_fraction=0.001)[0]]
    assert len(sides) == count
    assert sides.count("heldout") == 1
    assert "heldout" not in [d.split for d in read(tmp_path / "few.jsonl", validation_fraction=0.0)[0]]


def test_one_document_is_for_training(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("alone")
    assert [document.split for document in read(tmp_path / "one.txt", validation_fraction=0.001)[0]] == ["train"]


def fails(match: str, *sources, **settings) -> None:
    with pytest.raises(DataError, match=match):
        read(*sources, **settings)


def test_missing_and_unsupported_sources(tmp_path: Path) -> None:
    fails(r"nothing\.txt: no such file or directory; check --data\.sources", tmp_path / "nothing.txt")
    fails(r"the pattern matches no file", tmp_path / "*.txt")
    fails(r"the directory holds no file of a supported format", tmp_path)
    (tmp_path / "a.odt").write_bytes(b"x")
    fails(r"a\.odt: the extension \.odt is not supported; convert it to one of \.txt", tmp_path / "a.odt")
    (tmp_path / "README").write_bytes(b"x")
    fails(r"README: the extension \(none\) is not supported", tmp_path / "README")
    fails(r"nope://x/y: is not a URL that fsspec supports", "nope://x/y")
    fails(r"needs a package that is not installed", "adl://x/y.txt")
    with config_error("sources"):
        SourceConfig(sources=())


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n{"text": "  "}\n{"text": null}\n'])
def test_empty_corpus(tmp_path: Path, content: str) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text(content)
    fails(r"e\.jsonl: the corpus is empty", path)


def test_corrupt_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "good one"}\n{"text": "cut\n[1, 2]\n{"text": "good two"}\n')
    fails(r"c\.jsonl:2: is not valid JSON \(.*column 14\); correct the line.*--data\.on_bad_record skip", path)
    documents, report = read(path, on_bad_record="skip")
    assert {d.text for d in documents} == {"good one", "good two"}
    assert report.skipped == {"not JSON": 1, "not a JSON object": 1}
    assert report.examples["not JSON"] == [f"{path}:2"]


def test_missing_text_field_names_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"content": "the text", "url": "u"}\n')
    fails(r"m\.jsonl:1: has no field 'text' \(its fields: content, url\); .*--data\.text_field", path)
    assert texts(path, text_field="content") == ["the text"]
    pyarrow.parquet.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "m.parquet")
    fails(r"m\.parquet: row 1: has no field 'text' \(its fields: body, id\)", tmp_path / "m.parquet")
    path.write_text('{"text": 5}\n')
    fails(r"m\.jsonl:1: the field 'text' holds a int", path)


@pytest.mark.parametrize(("record", "problem"), [
    ({"messages": []}, "not a list of turns"),
    ({"messages": [{"role": "user"}]}, "turn 1 of messages lacks a text"),
    ({"messages": ["Hi"]}, "turn 1 of messages is not an object"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "robot", "content": "x"}]}, "turn 2 .* role 'robot'"),
    ({"conversations": [{"from": "robot", "value": "x"}]}, "turn 1 of conversations has the role 'robot'"),
    ({"messages": [{"role": "user", "content": "x"}]}, "lacks an answer"),
    ({"question": "x", "answer": None}, "the field 'answer' is empty or not a text"),
    ({"instruction": "x", "output": ""}, "the field 'output' is empty"),
    ({"prompt": [{"role": "user", "content": "x"}], "completion": " "}, "the field 'completion' is empty"),
    ({"prompt": {"a": 1}, "completion": "x"}, "turn 1 of prompt has the role None"),
])  # fmt: skip
def test_bad_conversations(tmp_path: Path, record: dict, problem: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(record) + '\n{"question": "Q", "answer": "A"}')
    fails(rf"q\.jsonl:1: .*{problem}", path)
    documents, report = read(path, on_bad_record="skip")
    assert len(documents) == 1
    assert report.skipped == {"bad conversation": 1}


@pytest.mark.parametrize(("content", "lines"), [
    ('[\n {"text": "one"},\n\n {"text":\n  "two"}, {"text": "three"}\n]\n', [2, 4, 5]),
    ('[{"text": "one"}, {"text": "two"}, {"text": "three"}]', [1, 1, 1]),
    ('{"text": "one"}\n{"text": "two"}\n\n{"text": "three"}\n', [1, 2, 4]),
])  # fmt: skip
def test_json_lists_and_lines(tmp_path: Path, content: str, lines: list[int]) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    documents, _ = read(path, validation_fraction=0.0)
    assert [d.text for d in documents] == ["one", "two", "three"]
    assert [d.id for d in documents] == [f"{path}:{line}" for line in lines]
    path.with_suffix(".json.gz").write_bytes(gzip.compress(content.encode()))
    assert texts(path.with_suffix(".json.gz")) == ["one", "three", "two"]


def test_json_of_one_record_and_damaged_json(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{\n "question": "Q",\n "answer": "A"\n}')
    assert texts(path) == ["Q\n\nA"]
    for content, line in (
        ('[{"text": "one"},\n{"text": "cut', 2),
        ('[{"text": "one"}\n {"text": "two"}]', 2),
        ('[{"text": "one"}', 1),
        ('{\n"text": "one"\n} x', 3),
    ):
        path.write_text(content)
        fails(rf"r\.json:{line}: is not valid JSON", path)
    path.write_text('[{"text": "one"},\n{"text": "cut')
    documents, report = read(path, on_bad_record="skip")
    assert [d.text for d in documents] == ["one"]
    assert report.skipped == {"rest of a file that is not JSON": 1}
    assert report.summary()[-1].startswith("1 record could not be read and was left out: 1 rest of a file")
    path.write_text('["one", {"text": "two"}]')
    fails(r"r\.json:1: holds a JSON str where an object is expected", path)


def test_csv_cells_with_separators_quotes_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('\ufeffid,text\n1,"one, ""quoted""\nover lines"\n2,two\n3,\n')
    documents, report = read(path, validation_fraction=0.0)
    assert [(d.id, d.text) for d in documents] == [
        (f"{path}:2", 'one, "quoted"\nover lines'), (f"{path}:4", "two"),
    ]  # fmt: skip
    assert report.skipped == {"empty text": 1}
    path.write_text("question;answer\nQ, really;A\n")
    assert texts(path) == ["Q, really\n\nA"]
    path.write_text("text\n" + "x" * 200_000 + "\n")
    assert len(texts(path)[0]) == 200_000
    path.write_text("id,text\n1,good\n2,too, many\n")
    fails(r"t\.csv:3: has 3 cells under 2 columns; quote cells", path)
    documents, report = read(path, on_bad_record="skip")
    assert ([d.text for d in documents], report.skipped) == (["good"], {"not CSV": 1})
    path.write_text('id,text\n1,"never closed\n')
    fails(r"t\.csv:2: is not a row of a table .* the rest of the file", path)
    path.write_text("id,body\n1,x\n")
    fails(r"t\.csv:2: has no field 'text' \(its fields: id, body\)", path)


def test_the_limit_on_a_cell_is_no_one_elses(tmp_path: Path) -> None:
    """It belongs to the process: importlib.metadata, too, reads tables with it."""
    path, before = tmp_path / "t.csv", csv.field_size_limit()
    path.write_text("id,text\n1,good\n2," + "x" * 90 + "\n3,last\n")
    config = SourceConfig(sources=(str(path),), max_record_bytes=100, validation_fraction=0.0)
    reading = iter(read_documents(config, report=SourceReport()))
    assert next(reading).text == "good"
    assert csv.field_size_limit() == before
    assert [document.text for document in reading] == ["x" * 90, "last"]
    path.write_text('id,text\n1,"' + "over lines\n" * 20 + '"\n')
    fails(r"t\.csv:11: is not a row of a table \(field larger than field limit \(100\)\)", path, max_record_bytes=100)
    assert csv.field_size_limit() == before


def test_web_pages(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        "<html><head><title>T</title><style>p {color: red}</style><script>if (a < b) { x() }</script></head><body>"
        "<nav><a href='/'>Home</a></nav><h1>Fish &amp; chips</h1><p>First\nparagraph with <b>bold</b>."
        "<p>Second &eacute;.<ul><li>one<li>two</ul><pre>a\n  b</pre><footer>Imprint</footer></body></html>",
        encoding="utf-8",
    )
    (text,) = texts(path)
    assert text.split("\n\n")[:3] == ["Fish & chips", "First paragraph with bold.", "Second é."]
    assert "one\n" in text
    assert "a\n  b" in text
    for unwanted in ("color", "x()", "Home", "Imprint", "<"):
        assert unwanted not in text
    path.write_text("<p>" + "</p><p>".join(f"Paragraph {i} " + "word " * 50 for i in range(40)) + "</p>")
    assert len(texts(path, max_document_chars=1000)) > 5
    path.write_bytes("<p>schön</p>".encode("latin1"))
    fails(r"page\.html:1: is not UTF-8", path)


def test_what_a_directory_holds_besides_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "pairs.json").write_text('[{"instruction": "Q", "output": "A"}]')
    (tmp_path / "package.json").write_text('{"name": "x", "version": 1}')
    (tmp_path / "tsconfig.json").write_text('{ // a comment\n"a": 1}')
    (tmp_path / "figures.csv").write_text("a,b\n1,2\n3\n")
    for name in ("a.odt", "b.odt", "c.key", "Makefile"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    documents, report = read(tmp_path)
    assert sorted(d.text for d in documents) == ["A text.", "Q\n\nA"]
    assert report.passed_over == {
        "unsupported .odt": 2, "unsupported .key": 1, "unsupported file without an extension": 1, "dangling link": 1,
        "link to a directory (not followed)": 1, ".json without text": 2, ".csv without text": 1,
    }  # fmt: skip
    fields, line = report.summary()
    assert fields == "fields used: instruction, output"
    assert line.startswith("not read: ")
    assert f"2 unsupported .odt ({tmp_path}/a.odt, ...)" in line
    assert f"1 dangling link ({tmp_path}/link.txt)" in line
    assert not report.skipped
    for path, problem in (
        ("package.json", "has no field 'text'"),
        ("figures.csv", r"figures\.csv:2: has no field 'text'"),
    ):
        fails(problem, tmp_path / path)
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a.odt").write_bytes(b"x")
    fails(r"the directory holds no file of a supported format .*; skipped: 1 unsupported \.odt", tmp_path / "only")


def test_unknown_pairs_in_a_found_json_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "pairs.json").write_text('[\n{"query": "Q", "response": "A"}]')
    fails(r"pairs\.json:2: has no field 'text' .*accepted forms", tmp_path)


def test_a_directory_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("open", "closed"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    (tmp_path / ".hidden").mkdir()
    list_folder = os.scandir

    def refuse(path):
        if str(path).endswith(("closed", ".hidden")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", refuse)
    documents, report = read(tmp_path)
    assert [d.text for d in documents] == ["open"]
    reason = "directory that cannot be read (Permission denied)"
    assert report.passed_over == {reason: 1}
    assert report.summary() == [f"not read: 1 {reason} ({tmp_path}/closed)"]
    fails(r"closed: the directory holds no file .*cannot be read \(Permission denied\)", tmp_path / "closed")


LONG = "x" * 150


@pytest.mark.slow
@pytest.mark.parametrize(("name", "content", "line", "kept"), [
    ("t.txt", f"first\n{LONG}\nlast\n", ":2", ["first\n", "last\n"]),
    ("t.txt", f"first\n{LONG}", ":2", ["first\n"]),
    ("t.jsonl", f'{{"text": "one"}}\n{{"text": "{LONG}"}}\n{{"text": "two"}}\n', ":2", ["one", "two"]),
    ("t.csv", f"id,text\n1,one\n2,{LONG}\n3,two\n", ":3", ["one", "two"]),
    ("t.csv", f"id,text,{LONG}\n1,one,1\n", ":1", []),
    ("t.json", f'{{"text": "one"}}\n{{"text": "{LONG}"}}\n{{"text": "two"}}\n', ":2", ["one", "two"]),
    ("t.json", f'[{{"text": "one"}},\n{{"text": "{LONG}"}},\n{{"text": "two"}}]', ":2", ["one", "two"]),
    ("t.json", f'{{"text": "{LONG}"}}', ":1", []),
    ("t.html", f"<p>{LONG}</p>", "", []),
    ("t.py", "print(0)\n" * 20, "", []),
])  # fmt: skip
def test_what_is_longer_than_a_record_may_be(
    tmp_path: Path, name: str, content: str, line: str, kept: list[str]
) -> None:  # fmt: skip
    (tmp_path / name).write_text(content)
    (tmp_path / "good.txt").write_text("good")
    kind = {".json": "record|line", ".html": "file", ".py": "file"}.get(Path(name).suffix, "line")
    way_out = r"raise --data\.max_record_bytes, or pass --data\.on_bad_record skip"
    message = rf"/{name}{line}: the ({kind}) .*(longer|more) than 100 bytes; .*{way_out}"
    fails(message, tmp_path / name, max_record_bytes=100)
    sources = tmp_path / name, tmp_path / "good.txt"
    documents, report = read(*sources, max_record_bytes=100, on_bad_record="skip", validation_fraction=0.0)
    assert [document.text for document in documents] == [*kept, "good"]
    ((reason, count),) = report.skipped.items()
    assert count == 1
    assert reason in ("line too long", "record too long", "file too long")
    assert not read(*sources, max_record_bytes=200, on_bad_record="skip")[1].skipped


def test_lines_behind_one_that_is_left_out_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"first\n" + LONG.encode() + b"\nthird\nsch\xf6n\n")
    _, report = read(path, max_record_bytes=100, on_bad_record="skip")
    assert report.examples == {"line too long": [f"{path}:2"], "not UTF-8": [f"{path}:4"]}


def test_cells_and_files_have_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow.parquet.write_table(pa.table({"text": ["one", LONG, "two"]}), tmp_path / "t.parquet")
    fails(r"t\.parquet: row 2: the record is longer than 100 bytes", tmp_path / "t.parquet", max_record_bytes=100)
    (tmp_path / "t.csv").write_text('text\none\n"' + "some words\n" * 20 + '"\n')
    fails(r"t\.csv:\d+: .*field larger .*--data\.max_record_bytes", tmp_path / "t.csv", max_record_bytes=100)
    monkeypatch.setattr(readers, "MAX_JSON_BYTES", 200)
    (tmp_path / "t.json").write_text("[" + ", ".join(['{"text": "one"}'] * 20) + "]")
    fails(
        r"t\.json: the file is read as a whole and has more than 200 bytes; write one record a line",
        tmp_path / "t.json",
    )
    (tmp_path / "t.json").write_text('{"text": "one"}\n' * 20)
    assert len(texts(tmp_path / "t.json")) == 20, "which is not read as a whole"


def test_truncated_compression(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"{i} " + str(i * 7919) * 20}) + "\n" for i in range(2000))
    checked = zstandard.ZstdCompressor(write_checksum=True)
    for path, compress in ((tmp_path / "t.jsonl.gz", gzip.compress), (tmp_path / "t.jsonl.zst", checked.compress)):
        whole = compress(lines.encode())
        path.write_bytes(whole[: len(whole) * 2 // 3])
        fails(rf"t\.jsonl{path.suffix}:\d+: the \w+ data is cut off here", path)
        documents, report = read(path, on_bad_record="skip")
        assert 100 < len(documents) < 2000
        assert report.skipped["truncated"] == 1
        assert set(report.skipped) <= {"truncated", "not JSON"}
        path.write_bytes(whole[:300] + b"\0\1\2" + whole[303:])
        fails(rf"t\.jsonl{path.suffix}:\d+: the \w+ data is damaged here", path)
        path.write_bytes(b"not compressed at all")
        fails(rf"t\.jsonl{path.suffix}:1: the \w+ data is damaged here", path)


def test_truncated_tables(tmp_path: Path) -> None:
    table = pa.table({"text": [f"text {i}" for i in range(5000)]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "t.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    (tmp_path / "good.txt").write_text("good")
    for path in (tmp_path / "t.parquet", tmp_path / "t.arrow"):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        fails(rf"{path.name}: .*the \w+ file is damaged or cut off", path)
        _, report = read(tmp_path / "good.txt", path, on_bad_record="skip")
        assert report.skipped == {"damaged file": 1}


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "l.txt"
    path.write_bytes("erste Zeile\nzweite\nsch\xf6n\n".encode("latin1"))
    fails(r"l\.txt:3: is not UTF-8 \(byte 0xf6\); convert the file \(iconv -f LATIN1 -t UTF-8\)", path)
    fails(r"none of the records could be read \(1 not UTF-8\)", path, on_bad_record="skip")
    path.write_text("wide", encoding="utf-16")
    fails(r"l\.txt:1: is not UTF-8 .*iconv -f UTF-16", path)
    lines = tmp_path / "l.jsonl"
    lines.write_bytes(b'{"text": "good"}\n{"text": "sch\xf6n"}\n')
    fails(r"l\.jsonl:2: is not UTF-8", lines)
    assert texts(lines, on_bad_record="skip") == ["good"]
