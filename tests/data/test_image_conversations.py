"""Conversations about one image, in the forms that data sets have."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from modelwright.core.config import DataError
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents


def read(folder: Path, **settings: Any) -> tuple[list[Document], SourceReport]:
    report = SourceReport()
    config = SourceConfig(sources=(str(folder),), validation_fraction=0.0, **settings)
    return list(read_documents(config, report=report)), report


def file_of(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


PICTURE = file_of(Image.linear_gradient("L").resize((64, 48)).convert("RGB"))


def test_conversations_about_an_image_keep_their_turns(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PICTURE)
    asked, answered = "What is it?", "A cat."
    part, spoken = {"type": "text", "text": asked}, {"role": "assistant", "content": answered}
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [{"type": "image"}, part]}, spoken]},
        {"conversations": [{"from": "human", "value": f"<image>\n{asked}"}, {"from": "gpt", "value": answered}]},
        {"question": asked, "answer": answered, "caption": "not this one"},
        {"instruction": asked, "output": answered},
        {"question": f"<image>\n{asked}", "answer": answered},
    ]
    lines = [json.dumps({"file_name": "cat.png", "label": 3, **one}) for one in records]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    documents, report = read(tmp_path)
    assert report.documents == {"image": 5}
    for document in documents:
        assert [(turn["role"], turn["content"]) for turn in document.messages] == [
            ("user", asked), ("assistant", answered),
        ]  # fmt: skip
        assert document.text == f"{asked}\n\n{answered}"
        assert document.meta["label"] == "3"
        louder = document.map_text(str.upper)
        assert (louder.text, louder.messages[1]["content"]) == (f"{asked}\n\n{answered}".upper(), answered.upper())
        assert Document.from_json(document.to_json()) == document


def test_half_a_surrogate_pair_in_a_turn_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PICTURE)
    records = [{"file_name": "cat.png", "question": f"What{half}?", "answer": "A cat."} for half in ("\udc00", "")]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, records)))
    documents, report = read(tmp_path, on_bad_record="skip")
    assert [one.text for one in documents] == ["What?\n\nA cat."]
    assert report.skipped == {"half a surrogate pair": 1}


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        ([("user", [{"type": "image"}, {"type": "image"}]), ("assistant", "Two.")], "has 2 images"),
        ([("user", "What?")], "lacks an answer"),
        ([("assistant", "A cat.")], "does not begin with a turn of the user"),
        ([("assistant", "Ask."), ("user", "What?"), ("assistant", "A cat.")], "does not begin with a turn of the user"),
        ([("user", [{"type": "audio"}]), ("assistant", "A cat.")], "type 'audio'"),
    ],
)
def test_conversations_that_cannot_be_learned_are_counted(turns: Any, problem: str, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PICTURE)
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "cat.png", "messages": messages}))
    with pytest.raises(DataError, match=problem):
        read(tmp_path)
    (tmp_path / "notes.txt").write_text("A text that can be read.")
    documents, report = read(tmp_path, on_bad_record="skip")
    assert [one.kind for one in documents] == ["prose"]
    assert report.skipped == {"bad image record": 1}
