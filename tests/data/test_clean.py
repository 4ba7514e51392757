"""Cleaning: every document is kept or dropped with a reason, and both can be looked at."""

import json
from pathlib import Path

import pytest

from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import ConfigError, DataError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.features import data_share, duplicate_share, is_data_line
from modelwright.data.clean.fingerprints import DuplicatesConfig
from modelwright.data.clean.folder import kept_files, read_dropped, read_kept
from modelwright.data.clean.report import CleanReport
from modelwright.data.clean.steps.format import FormatConfig, normalize
from modelwright.data.clean.steps.quality import QualityConfig
from modelwright.data.clean.steps.step import pack_lines, unpack_lines
from modelwright.data.document import Document
from refusals import config_error


def document(text: str, number: int = 0, **changes) -> Document:
    values = {"id": f"d{number}", "kind": "prose", "split": "train", "source": "test"} | changes
    return Document(text=text, **values)


def pair(question: str, answer: str, number: int = 0, **changes) -> Document:
    meta = {"question": question, "answer": answer}
    return document(f"{question}\n\n{answer}", number, kind="qa", meta=meta, **changes)


def clean(folder: Path, *documents: Document, **settings) -> CleanReport:
    return clean_documents(iter(documents), build_steps(CleanConfig(**settings)), folder, SilentProgress())[0]


def reasons(folder: Path) -> dict[str, tuple[str, str]]:
    return {dropped.document.id: (dropped.step, dropped.reason) for dropped in read_dropped(folder)}


def test_everything_is_kept_or_dropped_and_counted(tmp_path: Path) -> None:
    table = "\n".join(f"    '\\x{i:02x}',   #  0x{i:02x} -> LETTER" for i in range(40))
    report = clean(
        tmp_path,
        document("A sentence that is long enough.", 0),
        document("short", 1),
        document(" \n\t ", 2),
        document("\x00\x01\x02 binary \x03\x04\x05 data that goes on", 3),
        document(table, 4, kind="code"),
        document("the same line, over and over\n" * 30, 5),
        document("A  sentence that is\nlong enough.", 6),
        document("A held-out sentence, long enough.", 7, split="heldout"),
    )
    assert reasons(tmp_path) == {
        "d1": ("quality", "too short"),
        "d2": ("quality", "too short"),
        "d3": ("format", "binary data"),
        "d4": ("quality", "table of data"),
        "d5": ("quality", "repeated lines"),
        "d6": ("duplicates", "duplicate"),
    }
    assert [entry.id for entry in read_kept(tmp_path)] == ["d0", "d7"]
    assert [entry.id for entry in read_kept(tmp_path, split="heldout", kinds=("prose",))] == ["d7"]
    assert report.num_documents == 8
    assert (report.num_kept, report.num_dropped) == (2, 6)
    assert report.dropped["quality"]["too short"] == {"documents": 2, "bytes": 5}
    assert json.loads((tmp_path / "report.json").read_text())["kept"] == report.kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dropped.jsonl.zst", "kept-heldout-prose.jsonl.zst", "kept-train-prose.jsonl.zst", "order.zst", "report.json",
    ]  # fmt: skip


def test_the_held_out_side_wins_over_training(tmp_path: Path) -> None:
    given_away = "An answer that is held out."
    clean(
        tmp_path,
        document("first.name\n\nThe very same description.", 0, meta={"title": "first.name"}),
        document("other.name\n\nThe very same description.", 1, meta={"title": "other.name"}, split="heldout"),
        pair("What is a?", given_away, 2),
        pair("What is b?", given_away, 3, split="heldout"),
        document("x\n\n" + given_away + "\n\nArgs: x", 4, meta={"title": "x", "summary": given_away}),
        document("y\n\nQuite something else, all in all.", 5, meta={"title": "y"}),
    )  # fmt: skip
    assert [entry.id for entry in read_kept(tmp_path)] == ["d1", "d3", "d5"]
    assert set(reasons(tmp_path).values()) == {("duplicates", "in the held-out set")}


def test_a_held_out_text_inside_a_training_text_is_dropped(tmp_path: Path) -> None:
    inner = "Rotate the given matrix by ninety degrees."
    outer = f'def rotate(matrix):\n    """{inner}\n\n    Slowly.\n    """\n    return matrix'
    documents = [document(outer, 0, kind="code"), pair("What is r?", inner, 1, split="heldout")]
    clean(tmp_path / "on", *documents)
    assert reasons(tmp_path / "on") == {"d1": ("duplicates", "inside a training text")}
    clean(tmp_path / "off", *documents, duplicates=DuplicatesConfig(contained="off"))
    assert not reasons(tmp_path / "off")


def test_same_answer_to_two_questions_is_a_duplicate_but_prose_may_say_it_too(tmp_path: Path) -> None:
    text = "Return the absolute version of a path."
    clean(tmp_path, pair("What is a?", text, 0), pair("What is b?", text, 1), document(text, 2))
    assert [entry.id for entry in read_kept(tmp_path)] == ["d0", "d2"]


def test_short_answers_are_duplicates_with_their_questions_only(tmp_path: Path) -> None:
    labels = [pair(f"Is {n} even?", "no, odd" if n % 2 else "yes", n) for n in range(6)]
    heldout = pair("Is 8 even?", "yes", 6, split="heldout")
    clean(tmp_path, *labels, heldout, pair("Is 2 even?", "yes", 7), pair("Is 8 even?", "yes", 8))
    assert [entry.id for entry in read_kept(tmp_path)] == [f"d{n}" for n in range(7)]
    assert reasons(tmp_path) == {"d7": ("duplicates", "duplicate"), "d8": ("duplicates", "in the held-out set")}


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    documents = [document(f"Sentence number {i % 40}, long enough.", i) for i in range(60)]
    for name in ("a", "b"):
        clean(tmp_path / name, *documents)
    for name in ("kept-train-prose.jsonl.zst", "order.zst", "dropped.jsonl.zst", "report.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_line_that_is_kept_is_what_its_document_would_be_written_as(tmp_path: Path) -> None:
    """Also of a document that no step after the first decisions changes, whose line is not written anew."""
    meta = {"score": 0.1, "url": "https://example.com/\u2028ä", "nested": {"ids": [1, None, True]}}
    clean(
        tmp_path,
        document("A sentence that is long enough \u2013 and has a dash.", 0, meta=meta),
        document("A sentence with half a surrogate \ud800 pair in it.", 1),
        document("A sentence about someone@example.com and others.", 2, split="heldout"),
    )
    lines = [
        line
        for split in ("train", "heldout")
        for line in unpack_lines((tmp_path / f"kept-{split}-prose.jsonl.zst").read_bytes())
    ]
    documents = [Document.from_json(line) for line in lines]
    assert lines == [document.to_json() for document in documents]
    assert [one.id for one in documents] == ["d0", "d1", "d2"]
    assert documents[0].meta == meta
    assert "someone@" not in documents[2].text


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    words = r"2 dropped: 2 too short \(keep them with --clean\.quality\.limits\.prose\.min_num_chars 1\); 0 held out"
    with pytest.raises(DataError, match=rf"no training document is left of 2 \({words}"):
        clean(tmp_path, document("a"), document("b"))
    assert len(list(read_dropped(tmp_path))) == 2


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="run the clean stage"):
        list(read_kept(tmp_path))
    clean(tmp_path, document("A sentence that is long enough.", 0), pair("What is it?", "Quite a good question.", 1))
    with pytest.raises(ArtifactError, match="is missing; run the clean stage"):
        list(read_dropped(tmp_path / "elsewhere"))
    whole = (tmp_path / "kept-train-prose.jsonl.zst").read_bytes()
    for content, problem in ((b"rubbish", "is damaged"), (pack_lines([]), "is damaged .it ends too early")):
        (tmp_path / "kept-train-prose.jsonl.zst").write_bytes(content)
        with pytest.raises(ArtifactError, match=rf"kept-train-prose.jsonl.zst: {problem}.*; run the clean stage again"):
            list(read_kept(tmp_path))
    (tmp_path / "kept-train-prose.jsonl.zst").write_bytes(whole)
    (tmp_path / "order.zst").unlink()
    assert len(list(read_kept(tmp_path, kinds=("prose",)))) == 1, "one file is in order by itself"
    with pytest.raises(ArtifactError, match=r"order.zst: is missing; run the clean stage"):
        list(read_kept(tmp_path))


def test_files_of_two_results_are_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends while it exchanges the files of an earlier result leaves a folder that is not read."""
    clean(tmp_path, document("A sentence that is long enough.", 0))
    replace, done = Path.replace, list[Path]()

    def end_after_one(path: Path, target: Path) -> Path:
        if path.parent == tmp_path:
            if done:
                raise KeyboardInterrupt
            done.append(path)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", end_after_one)
    with pytest.raises(KeyboardInterrupt):
        clean(tmp_path, pair("What is it?", "Quite a good question.", 1))
    with pytest.raises(ArtifactError, match=r"report\.json: is missing; run the clean stage"):
        list(read_kept(tmp_path))


def test_a_report_that_names_another_file_is_damaged(tmp_path: Path) -> None:
    clean(tmp_path, document("A sentence that is long enough.", 0))
    path = tmp_path / "report.json"
    path.write_text(path.read_text().replace("kept-train-prose", "../elsewhere"))
    with pytest.raises(ArtifactError, match=r"report\.json: is damaged: names '\.\./elsewhere"):
        list(read_kept(tmp_path))


def test_a_folder_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    """It has all kept documents in one file, and a report that names no files."""
    (tmp_path / "kept.jsonl.zst").write_bytes(pack_lines([document("A sentence.", 0).to_json()]))
    (tmp_path / "report.json").write_text('{"num_documents": 1}')
    with pytest.raises(ArtifactError, match=r"an earlier version wrote this folder.*; run the clean stage again"):
        list(read_kept(tmp_path))


def test_kept_documents_come_in_the_order_of_the_corpus(tmp_path: Path) -> None:
    """From files by split and kind, over several shards; files of an earlier result with another kind go."""
    made = [
        pair(f"What is number {n} of this list?", f"It is the {n}th of many.", n) if n % 3 == 1
        else document(f"Sentence number {n} of this text, long enough.", n, split="heldout" if n % 5 == 0 else "train")
        for n in range(40)
    ]  # fmt: skip
    (tmp_path / "kept.jsonl.zst").write_bytes(b"of an earlier version")
    (tmp_path / "kept-train-image.jsonl.zst").write_bytes(b"of an earlier result")
    clean_documents(iter(made), [], tmp_path, SilentProgress(), shard_documents=7)
    assert list(read_kept(tmp_path)) == made
    assert list(read_kept(tmp_path, split="train")) == [one for one in made if one.split == "train"]
    assert list(read_kept(tmp_path, kinds=("qa",))) == [one for one in made if one.kind == "qa"]
    assert list(read_kept(tmp_path, split="heldout", kinds=("image",))) == []
    files = kept_files(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("kept*")) == sorted(
        name for of_split in files.values() for name in of_split.values()
    )
    assert {split: list(of_split) for split, of_split in files.items()} == {
        "train": ["prose", "qa"],
        "heldout": ["prose"],
    }


def test_config_is_checked() -> None:
    for limits in ({"max_beauty": 1.0}, {"data_fraction": 0.5}, {"poetry.max_data_fraction": 0.5}):
        with pytest.raises(ConfigError, match=f"limits: '{next(iter(limits))}'"):
            QualityConfig(limits=limits)
    with config_error("auto_tail"):
        QualityConfig(auto_tail=0.5)
    with config_error("min_jaccard"):
        DuplicatesConfig(min_jaccard=0.3)


@pytest.mark.parametrize(("raw", "expected"), [
    ("a\r\nb\rc\x0cd\u2028e", "a\nb\nc\nd\ne"),
    ("e\u0301", "é"),
    ("\ufefftext \t\n\n\n\n\n\nmore  ", "text\n\n\nmore"),
    ("nul\x00 bell\x07", "nul bell"),
    ("    indented\n\ttabbed", "    indented\n\ttabbed"),
    ("👩‍🚀 مرحبا", "👩‍🚀 مرحبا"),
])  # fmt: skip
def test_normalize(raw: str, expected: str) -> None:
    assert normalize(raw) == expected
    assert normalize(expected) == expected


def test_normalize_reaches_conversations(tmp_path: Path) -> None:
    repair = FormatConfig(examples="repair")
    clean(tmp_path, pair("What\r\nis e\u0301?", "It is an  e \x07with an accent.  "), format=repair)
    (kept,) = read_kept(tmp_path)
    assert kept.meta == {"question": "What\nis é?", "answer": "It is an  e with an accent."}
    assert kept.text == "What\nis é?\n\nIt is an  e with an accent."


@pytest.mark.parametrize(("line", "expected"), [
    ("    0x0041,  # LATIN CAPITAL LETTER A", True),
    ("    'aa': 'bb', 'cc': 'dd',", True),
    ("1.5 2.25 3e-7", True),
    ("x = compute_something(1, 'a')", False),
    ("# 0x41 is a letter", False),
    ("A sentence about 3 things.", False),
    ("", False),
])  # fmt: skip
def test_data_lines(line: str, expected: bool) -> None:
    assert is_data_line(line) is expected


def test_shares() -> None:
    assert duplicate_share(["aa", "bb", "aa", "aa"]) == 0.5
    assert data_share(["1, 2", "word"]) == 0.5
    assert duplicate_share([]) == data_share([]) == 0.0


def test_line_separators_of_unicode_in_a_dropped_document(tmp_path: Path) -> None:
    """Dropped before they were normalized; only a line feed ends a line of JSON."""
    strange = "\x01\x02\x03 binary\u2028and\x85more\x0cand\x1dmore"
    clean(tmp_path, document(strange, 0), document("A sentence that is long enough.", 1))
    (dropped,) = read_dropped(tmp_path)
    assert (dropped.document.text, dropped.reason) == (strange, "binary data")
