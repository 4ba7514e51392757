"""No field of a record is ignored without a word: each is used, reported, or refused with the remedy."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from modelwright.core.config import DataError
from modelwright.data.document import Document
from modelwright.data.sources.forms import FORMS_OF_RECORDS, UNPAIRED
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "A"), ("assistant", "B"))
)
EXAMPLES: dict[str, dict[str, Any]] = {
    "openai_preference": {
        "input": {"messages": [USER]}, "preferred_output": [GOOD], "non_preferred_output": [BAD],
    },
    "preference": {"prompt": "Q", "chosen": "A", "rejected": "B"},
    "messages": {"messages": [USER, GOOD]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    "multiple_choice": {"question": "Q", "choices": ["A", "B"], "answer": 0},
    "question_answer": {"question": "Q", "answer": "A"},
    "instruction": {"instruction": "Q", "output": "A"},
    "prompt_completion": {"prompt": "Q", "completion": "A"},
    "prompt_only": {"prompt": "A"},
    UNPAIRED: {"prompt": "Q", "completion": "A", "label": True},
    "text": {"text": "A text of its own."},
}  # fmt: skip


def read(path: Path, **settings: Any) -> tuple[list[Document], SourceReport]:
    report = SourceReport()
    config = SourceConfig(sources=(str(path),), validation_fraction=0.0, **settings)
    return list(read_documents(config, report=report)), report


def written(tmp_path: Path, *records: object, name: str = "r.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def test_every_form_has_an_example_here() -> None:
    assert EXAMPLES.keys() == {*(form.name for form in FORMS_OF_RECORDS), UNPAIRED, "text"}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow"])
@pytest.mark.parametrize("form", EXAMPLES)
def test_a_field_that_no_reader_uses_is_in_the_report(tmp_path: Path, form: str, suffix: str) -> None:
    records = [{**EXAMPLES[form], "topic": "sea"}, {**EXAMPLES[form], "topic": ""}, EXAMPLES[form]]
    path = tmp_path / f"r{suffix}"
    table = pa.Table.from_pylist(records[:1] * 3) if form == "text" or suffix == ".parquet" else None
    if suffix == ".jsonl":
        written(tmp_path, *records)
    elif suffix == ".json":
        path.write_text(json.dumps(records))
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        table = pa.Table.from_pylist(records[:1] * 3)
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    _, report = read(path)
    times = 1 if suffix in (".jsonl", ".json") else 3
    (line, *_) = report.summary()
    assert line.endswith(f"; not used in {times} of 3 records: topic")
    use = report.all_fields
    assert use.used["topic"] == 0
    assert all(use.used[name] == 3 for name in EXAMPLES[form])
    assert report.facts()["field_use"][str(path)]["fields"]["topic"] == {"records": times, "used": 0}


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("form", ["text", "question_answer", "instruction", "prompt_completion", UNPAIRED])
def test_a_column_that_no_reader_uses_is_in_the_report(tmp_path: Path, form: str, suffix: str) -> None:
    names, separator = [*EXAMPLES[form], "topic"], "\t" if suffix == ".tsv" else ","
    row = separator.join([*(str(one) for one in EXAMPLES[form].values()), "sea"])
    path = tmp_path / f"r{suffix}"
    path.write_text("\n".join([separator.join(names), row, row]))
    _, report = read(path)
    assert report.summary()[0].endswith("; not used in 2 of 2 records: topic")
    assert {name for name, count in report.all_fields.used.items() if count == 2} == EXAMPLES[form].keys()


def test_fields_beside_images_and_in_folders_of_a_registry_are_in_the_report(tmp_path: Path) -> None:
    Image.new("RGB", (80, 60), "navy").save(tmp_path / "a.png")
    path = written(tmp_path, {"image": "a.png", "caption": "A boat.", "topic": "sea"})
    _, report = read(path)
    assert report.summary()[0] == "fields used: image, caption; not used in 1 of 1 records: topic"
    folder = tmp_path / "registered"
    folder.mkdir()
    written(folder, {"ask": "Q", "say": "A", "topic": "sea"})
    entry = {"file_name": "r.jsonl", "columns": {"prompt": "ask", "response": "say"}}
    (folder / "dataset_info.json").write_text(json.dumps({"towns": entry}))
    _, report = read(folder)
    assert report.summary()[0] == "fields used: ask, say; not used in 1 of 1 records: topic"


@pytest.mark.parametrize("form", [name for name in EXAMPLES if name != "text"])
@pytest.mark.parametrize(("name", "value"), [
    ("verified", False), ("verified", True), ("good", "false"), ("evidence", ["A passage."]), ("weight", 0.5),
    ("images", ["a.png"]), ("mask", [0, 1]),
])  # fmt: skip
def test_a_field_that_may_change_what_is_learned_is_refused_unless_it_is_ignored(
    tmp_path: Path, form: str, name: str, value: object
) -> None:
    path = written(tmp_path, {**EXAMPLES[form], name: value})
    with pytest.raises(DataError, match=rf"r\.jsonl:1: the field '{name}' .*--data\.ignore {name} "):
        read(path)
    (document,), report = read(path, ignore=(name,))
    assert report.summary()[0].endswith(f"; not used in 1 of 1 records: {name}")
    assert document.messages[-1]["content"] == "A"


def test_zeros_and_ones_beside_conversations_are_refused_once_both_have_occurred(tmp_path: Path) -> None:
    pair = EXAMPLES["question_answer"]
    both = written(tmp_path, *({**pair, "useful": number % 2} for number in range(4)))
    with pytest.raises(DataError, match=r"'useful' is 0 or 1 .*in every record"):
        read(both)
    assert len(read(both, ignore=("useful",))[0]) == 4
    assert len(read(written(tmp_path, *({**pair, "number": number} for number in range(4))))[0]) == 4
    assert len(read(written(tmp_path, *({**pair, "version": 1} for _ in range(4))))[0]) == 4
    pyarrow.parquet.write_table(
        pa.table({"question": ["Q"] * 2, "answer": ["A"] * 2, "ok": [0, 1]}), tmp_path / "t.parquet"
    )
    with pytest.raises(DataError, match="'ok' is 0 or 1"):
        read(tmp_path / "t.parquet")


def test_what_a_document_keeps_is_not_what_is_learned(tmp_path: Path) -> None:
    pair = EXAMPLES["question_answer"]
    kept = {"id": "a", "url": "http://example.org", "language": "en", "score": 0.5}
    (document,), report = read(written(tmp_path, {**pair, **kept}))
    assert report.summary()[0] == (
        "fields used: question, answer; not used in 1 of 1 records: id, url, language, score"
    )
    assert {name: document.meta[name] for name in kept} == kept
    with pytest.raises(DataError, match="'score' is 0 or 1"):
        read(written(tmp_path, *({**pair, "score": number % 2} for number in range(4))))


@pytest.mark.parametrize(
    ("values", "is_number"),
    [([[0, 1], [0, 1]], True), ([[0, 1], [0, 0]], False), ([[None, 1], [None, 0]], False)],
)
def test_numbers_of_turns_do_not_judge_them(tmp_path: Path, values: list, is_number: bool) -> None:
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    records = [
        {"messages": [turn | ({} if one is None else {"turn": one}) for turn, one in zip(turns, row, strict=True)]}
        for row in values
    ]
    path = written(tmp_path, *records)
    if is_number:
        assert read(path)[1].summary()[0].endswith("not used in 2 of 2 records: messages[].turn")
    else:
        with pytest.raises(DataError, match=r"'messages\[\]\.turn' is 0 or 1"):
            read(path)


def test_numbers_of_two_records_do_not_judge_them(tmp_path: Path) -> None:
    for name in ("id", "index", "example_id", "row"):
        both = written(tmp_path, *({**EXAMPLES["question_answer"], name: number} for number in (1, 0)))
        assert len(read(both)[0]) == 2
    several = written(tmp_path, *({**EXAMPLES["question_answer"], "valid_id": number % 2} for number in range(4)))
    with pytest.raises(DataError, match="'valid_id' is 0 or 1"):
        read(several)


def test_a_field_to_ignore_or_to_map_that_no_record_has_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, EXAMPLES["question_answer"])
    with pytest.raises(DataError, match=r"data\.ignore: no record has a value in the field 'wieght'"):
        read(path, ignore=("wieght",))
    with pytest.raises(DataError, match=r"data\.fields: no record has a value in the field 'q'"):
        read(path, fields={"question": "q"})


@pytest.mark.parametrize(("fields", "record", "expected"), [
    ({"question": "answer", "answer": "question"}, {"question": "1", "answer": "2"}, ("2", "1")),
    ({"instruction": "output", "output": "instruction"}, {"instruction": "1", "output": "2"}, ("2", "1")),
    ({"question": "answer", "answer": "reply"}, {"question": "0", "answer": "1", "reply": "2"}, ("1", "2")),
    ({"prompt": "a", "completion": "b"}, {"a": "1", "b": "2"}, ("1", "2")),
])  # fmt: skip
def test_fields_may_swap_their_names(tmp_path: Path, fields: dict, record: dict, expected: tuple[str, str]) -> None:
    (document,), report = read(written(tmp_path, record), fields=fields)
    assert tuple(turn["content"] for turn in document.messages) == expected
    left = "; not used in 1 of 1 records: question" if len(record) == 3 else ""
    assert report.summary()[0].partition(";")[2] == left.removeprefix(";")


def test_fields_of_turns_are_counted_too(tmp_path: Path) -> None:
    turns = [{**USER, "time": "12:00"}, {**GOOD, "model": "x"}]
    _, report = read(written(tmp_path, {"messages": turns, "parallel_tool_calls": False}))
    assert report.summary()[0] == (
        "fields used: messages; not used in 1 of 1 records: parallel_tool_calls, messages[].time, messages[].model"
    )
    with pytest.raises(DataError, match=r"'messages\[\]\.draft' is true"):
        read(written(tmp_path, {"messages": [USER, {**GOOD, "draft": True}]}))


def test_thousands_of_names_take_bounded_memory(tmp_path: Path) -> None:
    _, report = read(written(tmp_path, *({"text": "x y", f"k{number}": "v"} for number in range(900))))
    assert len(report.all_fields.present) <= 501
    assert "and " in report.summary()[0]
    assert report.all_fields.present["(further fields)"] == 401
