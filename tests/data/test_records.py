"""Preference pairs, record types, field mapping and JSON Schema."""

import json
from pathlib import Path

import pytest

from chat_templates import CALL, TOOL_CHAT, WEATHER
from modelwright.core.config import ConfigError, DataError
from modelwright.data.clean.fingerprints import identity
from modelwright.data.clean.steps.privacy import Privacy, PrivacyConfig
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "A"), ("assistant", "B"))
)


def read(tmp_path: Path, *records: object, **settings) -> tuple[list[Document], SourceReport]:
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    report = SourceReport()
    config = SourceConfig(sources=(str(path),), validation_fraction=0.0, **settings)
    return list(read_documents(config, report=report)), report


@pytest.mark.parametrize("record", [
    {"prompt": "Q", "chosen": "A", "rejected": "B"},
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"prompt": "Q", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
])  # fmt: skip
def test_preference_pairs(tmp_path: Path, record: dict) -> None:
    (document,), report = read(tmp_path, record)
    assert (document.kind, document.text) == ("qa", "Q\n\nA")
    assert document.messages == [USER, GOOD]
    assert document.meta["rejected"] == [BAD]
    assert report.record_types == {"preference": 1}
    assert document.map_text(str.lower).meta["rejected"] == [{**BAD, "content": "b"}]


def test_dialogues_in_one_text_share_their_prompt(tmp_path: Path) -> None:
    prompt = "\n\nHuman: Q\n\nAssistant: Which?\n\nHuman: This.\n\nDo it.\n\nAssistant:"
    (document,), _ = read(tmp_path, {"chosen": f"{prompt} A", "rejected": f"{prompt} B"})
    assert [turn["content"] for turn in document.messages] == ["Q", "Which?", "This.\n\nDo it.", "A"]
    assert (document.prompt_turns, document.rejected) == (3, [BAD])


def test_an_answer_may_have_several_turns(tmp_path: Path) -> None:
    more = [USER, {**GOOD, "content": "more"}]
    (document,), _ = read(tmp_path, {"chosen": [USER, GOOD, *more], "rejected": [USER, BAD]})
    assert (document.prompt_turns, document.rejected) == (1, [BAD])


@pytest.mark.parametrize(("record", "reason", "problem"), [
    ({"prompt": "Q", "chosen": "A", "rejected": "A"}, "chosen and rejected are the same", "are the same"),
    ({"chosen": "A", "rejected": "B"}, "bad conversation", "needs a field 'prompt'"),
    ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "other"}, BAD]},
     "chosen and rejected have different prompts", "differ before the answer"),
    ({"prompt": "Q", "chosen": "A", "rejected": {"a": 3}}, "bad conversation", "turn 1 of rejected has the role None"),
    ({"prompt": "Q", "chosen": "A"}, "half a preference pair", "needs the field 'rejected'"),
    ({"prompt": "Q", "chosen": "A", "rejected": None}, "half a preference pair", "the field 'rejected' is missing"),
    ({"prompt": "Q", "chosen": "A", "rejected": " "}, "empty answer", "'rejected' is empty"),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [{**BAD, "content": ""}]}, "empty answer", "an empty answer"),
    ({"chosen": [USER, GOOD, USER], "rejected": [USER, BAD]}, "no answer", "chosen does not end with an answer"),
    ({"prompt": "Q", "chosen": "A", "rejected": "B", "margin": "much"}, "the margin is not a number", "'much'"),
])  # fmt: skip
def test_bad_preference_pairs(tmp_path: Path, record: dict, reason: str, problem: str) -> None:
    with pytest.raises(DataError, match=rf"r\.jsonl:1: .*{problem}"):
        read(tmp_path, record)
    good = {"prompt": "Q", "chosen": "A", "rejected": "B", "margin": 2}
    (document,), report = read(tmp_path, record, good, on_bad_record="skip")
    assert report.skipped == {reason: 1}
    assert document.meta["margin"] == 2.0


HALF_CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
HALF_TOOL = {"type": "function", "function": {"name": "f", "description": "x\udc00", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(("record", "name"), [
    ({"question": "Q \ud800", "answer": "A"}, "question"),
    ({"prompt": "Q", "chosen": "A", "rejected": "B\ud800"}, "rejected"),
    ({"messages": [USER, {**GOOD, "content": "\ude00 A"}]}, "messages"),
    ({"messages": [USER, {**GOOD, "tool_calls": [HALF_CALL]}]}, "arguments"),
    ({"messages": [USER, GOOD], "tools": [HALF_TOOL]}, "tools"),
])  # fmt: skip
def test_half_a_surrogate_pair_in_an_example_is_not_replaced(tmp_path: Path, record: dict, name: str) -> None:
    """The model would learn a question mark that nobody wrote. A field that is not used may have it."""
    with pytest.raises(DataError, match=rf"r\.jsonl:1: the field {name} has one half of a surrogate pair"):
        read(tmp_path, record)
    found, report = read(tmp_path, record, {"question": "Q", "answer": "A", "note": "\ud800"}, on_bad_record="skip")
    assert report.skipped == {"half a surrogate pair": 1}
    assert len(found) == 1


def test_unpaired_preferences(tmp_path: Path) -> None:
    turns = {"prompt": [USER, GOOD, USER], "completion": [BAD]}
    good, bad = {"prompt": "Q", "completion": "A", "label": True}, {**turns, "label": False}
    found, report = read(tmp_path, good, bad)
    assert [document.is_undesirable for document in found] == [False, True]
    assert [document.prompt_turns for document in found] == [1, 3]
    assert report.record_types == {"unpaired_preference": 2}
    (document,), report = read(tmp_path, {**good, "label": "sums"})
    assert (report.record_types, document.is_undesirable) == ({"prompt_completion": 1}, False)
    with pytest.raises(DataError, match="label is 'sums', not true or false"):
        read(tmp_path, {**good, "label": "sums"}, record_type="unpaired_preference")
    again = Document.from_json(found[1].to_json())
    assert again.is_undesirable


def test_pairs_with_other_rejected_answers_are_no_duplicates() -> None:
    meta = {"question": "Q", "answer": "A"}
    documents = [
        Document(id=name, text="Q\n\nA", kind="qa", split="train", source="s", meta={**meta, "rejected": [turn]})
        for name, turn in (("1", BAD), ("2", {**BAD, "content": "C"}))
    ]
    assert len({identity(document) for document in documents}) == 2


def test_field_names_and_types_can_be_given(tmp_path: Path) -> None:
    (document,), _ = read(tmp_path, {"q": "Q", "a": "A"}, fields={"question": "q", "answer": "a"})
    assert document.meta == {"question": "Q", "answer": "A"}
    both = {"text": "Q whole", "question": "Q", "answer": "A"}
    assert read(tmp_path, both)[0][0].kind == "qa"
    assert read(tmp_path, both, record_type="text")[0][0].text == "Q whole"
    with pytest.raises(DataError, match="a record of type messages needs the field 'messages'"):
        read(tmp_path, both, record_type="messages")


def test_schema(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"required": ["id"], "properties": {"id": {"type": "integer"}}}))
    records = [{"text": "one", "id": 1}, {"text": "two"}, {"text": "three", "id": "secret"}]
    problems: list[str] = []
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    report = SourceReport(on_skip=lambda reason, where, problem: problems.append(problem))
    config = SourceConfig(sources=(str(path),), validation_fraction=0.0, schema=str(schema), on_bad_record="skip")
    assert [document.text for document in read_documents(config, report=report)] == ["one"]
    assert report.skipped == {"violates the schema": 2}
    assert problems == ["the record violates required: ['id']", "id violates type: 'integer'"]


@pytest.mark.parametrize(("content", "problem"), [
    ("{", "is not JSON"),
    ('{"type": "nothing"}', "is not a JSON Schema"),
    ('{"$ref": "https://example.invalid/x"}', "cannot be applied"),
    ('{"properties": {"text": {"pattern": "("}}}', "is not a JSON Schema|cannot be applied"),
    (None, "cannot be read"),
])  # fmt: skip
def test_bad_schemas(tmp_path: Path, content: str | None, problem: str) -> None:
    schema = tmp_path / "schema.json"
    if content is not None:
        schema.write_text(content)
    with pytest.raises(ConfigError, match=f"schema: .*schema.json: ({problem})"):
        read(tmp_path, {"text": "some text"}, schema=str(schema))


def test_a_content_may_be_a_list_of_text_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "image_url": None}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "A"}]}]
    (document,), _ = read(tmp_path, {"messages": turns})
    assert document.text == "one\ntwo\n\nA"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "text", None])
def test_other_parts_are_refused_with_file_and_line(tmp_path: Path, part: object) -> None:
    turns = [{"role": "user", "content": [part]}, GOOD]
    with pytest.raises(DataError, match=r"r\.jsonl:1: .*turn 1 of messages has a part that is not text"):
        read(tmp_path, {"messages": turns})


def test_tools_calls_and_results_are_kept(tmp_path: Path) -> None:
    record = {"messages": TOOL_CHAT, "tools": [WEATHER]}
    (document,), _ = read(tmp_path, record)
    assert document.messages == TOOL_CHAT
    assert document.tools == [WEATHER]
    assert '{"name": "weather", "arguments": {"city": "Bern"}}\n\nYes, 24 degrees.' in document.body
    assert Document.from_json(document.to_json()) == document
    again, _ = read(tmp_path, json.loads(document.to_json()))
    assert again == [document]


def test_calls_and_tools_as_texts_and_with_the_empty_fields_of_tables(tmp_path: Path) -> None:
    function = {"name": "weather", "arguments": '{"city": "Bern"}', "strict": None}
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}]
    (document,), _ = read(tmp_path, {"messages": turns, "tools": json.dumps([WEATHER])})
    assert document.messages[1]["tool_calls"] == [{"id": "1", **CALL}]
    assert document.tools == [WEATHER]


def test_a_change_of_the_text_reaches_arguments_but_not_names(tmp_path: Path) -> None:
    (document,), _ = read(tmp_path, {"messages": TOOL_CHAT, "tools": [WEATHER]})
    changed = document.map_text(str.upper)
    (call,) = changed.messages[2]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "BERN"}}
    assert '{"name": "weather", "arguments": {"city": "BERN"}}' in changed.text
    assert changed.tools == [WEATHER]


@pytest.mark.parametrize(("changes", "problem"), [
    ({"tools": {"name": "f"}}, "the field 'tools' is not a list of functions"),
    ({"tools": [{"type": "function"}]}, "tool 1 of the field 'tools' is not a function with a name"),
    ({"messages": [USER, {**GOOD, "tool_calls": [{"arguments": {}}]}]}, "a call without the name of a function"),
    ({"messages": [USER, {**GOOD, "tool_calls": "f()"}]}, "tool_calls that are not a list"),
    ({"messages": [USER, {**GOOD, "tool_calls": [{"name": "f", "arguments": "x=1"}]}]}, "not a JSON object"),
])  # fmt: skip
def test_bad_tools_are_refused_with_file_and_line(tmp_path: Path, changes: dict, problem: str) -> None:
    with pytest.raises(DataError, match=rf"r\.jsonl:1: .*{problem}"):
        read(tmp_path, {"messages": [USER, GOOD], **changes})


def test_personal_data_in_arguments_is_replaced_and_counted(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "mail", "arguments": {"to": ["ann.lee@acme-mail.com"]}}}
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "sent"}]
    (document,), _ = read(tmp_path, {"messages": [*turns, GOOD]})
    step = Privacy(PrivacyConfig())
    (changed,) = step(document).messages[1]["tool_calls"]
    assert changed["function"]["arguments"] == {"to": ["<EMAIL_1>"]}
    assert step.take_counts()["replaced"] == {"email": 1}
