"""Records that are question/answer pairs or conversations, in the forms that data sets have."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from modelwright.core.config import DataError
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents


def read(path: Path, *, text_field: str = "text") -> tuple[list[Document], SourceReport]:
    report = SourceReport()
    config = SourceConfig(sources=(str(path),), text_field=text_field, validation_fraction=0.0)
    return list(read_documents(config, report=report)), report


def turns_of(record: dict, tmp_path: Path) -> list[tuple[str, str]]:
    """The turns that a record is read as."""
    path = tmp_path / "pair.jsonl"
    path.write_text(json.dumps(record))
    (document,) = read(path)[0]
    assert document.kind == "qa"
    assert document.text == "\n\n".join(turn["content"] for turn in document.messages)
    return [(turn["role"], turn["content"]) for turn in document.messages]


PAIR = [("user", "Q"), ("assistant", "A")]
TALK = [("system", "S"), *PAIR, ("user", "Q2"), ("assistant", "A2")]


def as_turns(turns: list[tuple[str, str]], role: str = "role", content: str = "content", **names: str) -> list[dict]:
    return [{role: names.get(who, who), content: text} for who, text in turns]


@pytest.mark.parametrize(("record", "expected"), [
    ({"question": "Q", "answer": "A", "id": 5}, PAIR),
    ({"instruction": "Q", "output": "A", "text": "### Q ### A"}, PAIR),
    ({"instruction": "Q", "input": "", "output": "A"}, PAIR),
    ({"instruction": "Q", "input": "about this", "output": "A"}, [("user", "Q\n\nabout this"), ("assistant", "A")]),
    ({"prompt": "Q", "completion": "A"}, PAIR),
    ({"prompt": as_turns(TALK[:4]), "completion": as_turns(TALK[4:])}, TALK),
    ({"messages": as_turns(TALK)}, TALK),
    ({"conversations": as_turns(TALK, "from", "value", user="human", assistant="gpt")}, TALK),
    ({"conversations": as_turns(TALK)}, TALK),
    ({"system": "S", "question": "Q", "answer": "A"}, TALK[:3]),
    ({"system": "S", "conversations": as_turns(PAIR, "from", "value", user="human", assistant="gpt")}, TALK[:3]),
])  # fmt: skip
def test_forms_of_pairs(tmp_path: Path, record: dict, expected: list[tuple[str, str]]) -> None:
    assert turns_of(record, tmp_path) == expected


def test_pairs_from_tables(tmp_path: Path) -> None:
    columns = {"instruction": ["Q", None], "output": ["A", None], "text": ["whole", "prose"], "number": [1, 2]}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("number,instruction,output,text\n1,Q,A,whole\n\n2,,,prose\n")
    (tmp_path / "t.tsv").write_text("number\tinstruction\toutput\ttext\n1\tQ\tA\twhole\n2\t\t\tprose\n")
    for name in ("t.parquet", "t.csv", "t.tsv"):
        documents, report = read(tmp_path / name)
        assert [(d.kind, d.text) for d in documents] == [("qa", "Q\n\nA"), ("prose", "prose")], name
        assert not report.skipped


@pytest.mark.parametrize("record", [
    {"question": "Q", "response": "A"}, {"query": "Q", "id": 1}, {"query": "Q", "answers": "A"},
])  # fmt: skip
def test_unknown_pairs_get_no_advice_that_would_train_on_questions_alone(tmp_path: Path, record: dict) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "prose"}\n' + json.dumps(record))
    with pytest.raises(DataError) as failure:
        read(path)
    message = str(failure.value)
    assert message.startswith(f"{path}:2: has no field 'text'")
    assert "instruction (+ input) + output, prompt + completion, messages [" in message
    assert "text_field" not in message


def test_a_text_field_that_was_asked_for_wins_over_pairs(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "Q", "completion": "A", "body": "plain"}\n')
    (document,), _ = read(path, text_field="body")
    assert (document.kind, document.text) == ("prose", "plain")
