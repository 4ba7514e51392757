"""Registries that describe the files of a folder: LLaMA-Factory's `dataset_info.json`, and `datasets.yaml`."""

import json
from pathlib import Path
from typing import Any

import pytest

from modelwright.core.config import DataError
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents

FILES: dict[str, list[Any]] = {
    "sft.json": [{"instruction": "Q2", "input": "", "output": "A2", "system": "S", "history": [["Q", "A"]]}],
    "renamed.json": [{"ask": "Q", "say": "A", "topic": "sea"}],
    "kto.json": [{"chat": [{"who": "visitor", "said": "Q"}, {"who": "clerk", "said": "A"}], "good": False}],
    "pairs.json": [{"instruction": "Q", "input": "in", "chosen": "A", "rejected": "B"}],
    "open.jsonl": [{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}],
}
ENTRIES: dict[str, Any] = {
    "sft": {"file_name": "sft.json", "columns": {
        "prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}},
    "renamed": {"file_name": "renamed.json", "columns": {"prompt": "ask", "response": "say"}},
    "kto": {"file_name": "kto.json", "formatting": "sharegpt", "columns": {"messages": "chat", "kto_tag": "good"},
            "tags": {"role_tag": "who", "content_tag": "said", "user_tag": "visitor", "assistant_tag": "clerk"}},
    "pairs": {"file_name": "pairs.json", "ranking": True, "columns": {
        "prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}},
    "open": {"file_name": "open.jsonl", "formatting": "openai", "columns": {"messages": "messages"}},
}  # fmt: skip


def folder(tmp_path: Path, entries: dict[str, Any] = ENTRIES, name: str = "dataset_info.json") -> Path:
    for file, records in FILES.items():
        lines = "\n".join(map(json.dumps, records)) if file.endswith("l") else json.dumps(records)
        (tmp_path / file).write_text(lines)
    (tmp_path / name).write_text(json.dumps(entries))  # JSON is YAML, too
    return tmp_path


def read(*paths: Path, **settings: Any) -> tuple[dict[str, Document], SourceReport]:
    report = SourceReport()
    config = SourceConfig(sources=tuple(map(str, paths)), validation_fraction=0.0, **settings)
    documents = list(read_documents(config, report=report))
    return {document.source.rpartition("/")[2]: document for document in documents}, report


@pytest.mark.parametrize("name", ["dataset_info.json", "datasets.yaml"])
@pytest.mark.parametrize("by", ["folder", "registry", "files"])
def test_files_are_read_as_the_registry_says(tmp_path: Path, name: str, by: str) -> None:
    place = folder(tmp_path, name=name)
    sources = {"folder": [place], "registry": [place / name], "files": [place / file for file in FILES]}[by]
    found, report = read(*sources)
    texts = {file: [turn["content"] for turn in document.messages] for file, document in found.items()}
    assert texts == {
        "sft.json": ["S", "Q", "A", "Q2", "A2"], "renamed.json": ["Q", "A"], "kto.json": ["Q", "A"],
        "pairs.json": ["Q\n\nin", "A"], "open.jsonl": ["Q", "A"],
    }  # fmt: skip
    assert found["kto.json"].is_undesirable
    assert found["pairs.json"].rejected == [{"role": "assistant", "content": "B"}]
    assert not report.passed_over
    assert report.summary()[0].endswith("; not used in 1 of 5 records: topic")
    assert "say" in report.all_fields.used


def test_columns_that_the_registry_leaves_out_are_refused_where_they_matter(tmp_path: Path) -> None:
    entries = {"sft": {"file_name": "sft.json"}}
    place = folder(tmp_path, entries)
    with pytest.raises(DataError, match=r"sft\.json:1: the field '(history|system)'"):
        read(place / "sft.json")
    found, _ = read(place / "sft.json", ignore=("history", "system"))
    assert [turn["content"] for turn in found["sft.json"].messages] == ["Q2", "A2"]


@pytest.mark.parametrize(("entry", "problem"), [
    ({"columns": {"prompt": "ask"}}, "names no file"),
    ({"file_name": "renamed.json", "columns": {"promt": "ask"}}, "the column 'promt'; did you mean 'prompt'"),
    ({"file_name": "renamed.json", "tags": {"user": "x"}}, "the tag 'user'"),
    ({"file_name": "renamed.json", "formatting": "chatml"}, "the formatting 'chatml'"),
    ({"file_name": "renamed.json", "num_samples": 3}, "'num_samples', which is not understood"),
    ({"file_name": "renamed.json", "colums": {}}, "'colums', which no registry has"),
    ({"file_name": "renamed.json", "columns": {"images": "images"}}, "images"),
    ({"file_name": "renamed.json", "columns": {"prompt": "question"}}, "lacks the field 'question'"),
    ({"file_name": "renamed.json", "columns": ["ask"]}, "columns that are not names"),
    ({"file_name": "renamed.json", "columns": {"chosen": "say"}}, "without ranking"),
    ({"file_name": "renamed.json", "weight": 0}, "the weight 0"),
    ({"file_name": "renamed.json", "weight": "2"}, "the weight '2'"),
    ("renamed.json", "is not a mapping"),
])  # fmt: skip
def test_entries_that_cannot_be_followed_are_named(tmp_path: Path, entry: Any, problem: str) -> None:
    place = folder(tmp_path, {"bad": entry, "sft": {"file_name": "sft.json"}})
    with pytest.raises(DataError, match=problem) as failure:
        read(place / "renamed.json", ignore=("history", "system"))
    assert "bad" in str(failure.value)


def test_entries_without_data_here_are_named(tmp_path: Path) -> None:
    entries = {**ENTRIES, "hub": {"hf_hub_url": "a/b"}, "gone": {"file_name": "gone.json"}}
    found, report = read(folder(tmp_path, entries))
    assert len(found) == 5
    assert report.passed_over == {
        "entry of a registry whose data are elsewhere": 1, "entry of a registry without its file": 1,
    }  # fmt: skip
    with pytest.raises(DataError, match=r"gone\.json .* is missing"):
        read(tmp_path / "dataset_info.json")


def test_a_file_of_the_library_datasets_is_no_registry(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string"}}, "splits": {}}))
    (tmp_path / "a.jsonl").write_text('{"text": "A text."}')
    found, report = read(tmp_path)
    assert list(found) == ["a.jsonl"]
    assert not report.passed_over
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match=r"dataset_info\.json: cannot be read"):
        read(tmp_path)
