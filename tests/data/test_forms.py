"""Conversations in the forms of OpenAI, Mistral, ShareGPT, Axolotl, TRL, LLaMA-Factory and data sets of questions."""

import json
from pathlib import Path
from typing import Any

import pytest

from modelwright.core.config import DataError
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "A"), ("assistant", "B"))
)
CONTEXT = {**BAD, "train": False}


def read(path: Path, **settings: Any) -> tuple[list[Document], SourceReport]:
    report = SourceReport()
    config = SourceConfig(sources=(str(path),), validation_fraction=0.0, **settings)
    return list(read_documents(config, report=report)), report


def one(tmp_path: Path, record: object, **settings: Any) -> Document:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(record, allow_nan=True), encoding="utf-8")
    (document,), _ = read(path, **settings)
    return document


@pytest.mark.parametrize(("mark", "learned"), [
    ("weight", (0, 1)), ("weight", (0.0, None)), ("train", (False, True)), ("training", (False, None)),
    ("loss", (False, True)), ("loss_mask", (0, 1)), ("weight", ("0", "1")),
])  # fmt: skip
def test_turns_that_are_not_learned(tmp_path: Path, mark: str, learned: tuple) -> None:
    bad, good = ({**turn, mark: value} for turn, value in zip((BAD, GOOD), learned, strict=True))
    assert one(tmp_path, {"messages": [USER, bad, USER, good]}).messages == [USER, CONTEXT, USER, GOOD]
    again = Document.from_json(one(tmp_path, {"messages": [USER, bad, USER, good]}).to_json())
    assert again.messages[1]["train"] is False


@pytest.mark.parametrize(("turns", "problem"), [
    ([USER, {**GOOD, "weight": 0.5}], "weight 0.5"),
    ([USER, {**GOOD, "weight": 0}], "marks every answer"),
    ([{**USER, "train": True}, {**GOOD, "train": False}, USER, GOOD], "only the assistant's turns are"),
    ([USER, {**GOOD, "mask": 1}], "has a mask"),
    ([USER, {**GOOD, "weight": 0, "train": True}], "both to be learned and not"),
    ([USER, {**GOOD, "content": ""}], "lacks an answer"),
    ([USER, {"role": "assistant", "content": None}], "lacks a text"),
])  # fmt: skip
def test_marks_of_turns_that_cannot_be_followed(tmp_path: Path, turns: list, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        one(tmp_path, {"messages": turns})


def test_an_empty_answer_is_context(tmp_path: Path) -> None:
    for empty in ({**GOOD, "content": ""}, {**GOOD, "content": " \n"}, {"role": "assistant", "content": []}):
        turns = one(tmp_path, {"messages": [USER, empty, USER, GOOD]}).messages
        assert [turn.get("train", True) for turn in turns] == [True, False, True, True]


@pytest.mark.parametrize("name", ["kto_tag", "label", "desirable"])
@pytest.mark.parametrize(("value", "expected"), [
    (True, True), (False, False), (1, True), (0, False), ("true", True), ("False", False), ("chosen", True),
    ("rejected", False), (1.0, True),
])  # fmt: skip
@pytest.mark.parametrize("record", [
    {"messages": [USER, GOOD]}, {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    {"instruction": "Q", "output": "A"}, {"question": "Q", "answer": "A"}, {"prompt": "Q", "completion": "A"},
])  # fmt: skip
def test_labels_beside_any_form(tmp_path: Path, record: dict, name: str, value: object, expected: bool) -> None:
    document = one(tmp_path, {**record, name: value})
    assert (document.meta["desirable"], document.prompt_turns) == (expected, 1)
    assert document.messages == [USER, GOOD]


@pytest.mark.parametrize(("values", "expected"), [
    (("good", "bad"), [True, False]), (("yes", "no"), [True, False]), (("accepted", "rejected"), [True, False]),
    ((1, 0), [True, False]), (("reject", "accept"), [False, True]),
])  # fmt: skip
def test_a_judgement_in_a_field_of_any_name_is_refused_until_it_is_named(
    tmp_path: Path, values: tuple, expected: list[bool]
) -> None:
    path = tmp_path / "r.jsonl"
    records = [{"messages": [USER, {**GOOD, "content": str(n)}], "rating": value} for n, value in enumerate(values)]
    path.write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(DataError, match=r"'rating' .*--data\.fields '{label: rating}'"):
        read(path)
    found, _ = read(path, fields={"label": "rating"})
    assert [document.meta["desirable"] for document in found] == expected


def test_signs_are_refused_and_names_of_classes_are_not(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for values, is_refused in (((1, -1), True), ((1, -1, 2), False), (("sea", "land"), False)):
        records = [{"question": f"Q{n}", "answer": "A", "vote": value} for n, value in enumerate(values)]
        path.write_text("\n".join(map(json.dumps, records)))
        if is_refused:
            with pytest.raises(DataError, match="'vote'"):
                read(path)
        else:
            assert len(read(path)[0]) == len(values)


@pytest.mark.parametrize("prompt", ["Q", [USER], USER])
def test_prompts_alone_are_for_rewards(tmp_path: Path, prompt: object) -> None:
    document = one(tmp_path, {"prompt": prompt, "solution": "S"}, keep_fields=("solution",))
    assert (document.kind, document.messages, document.has_answer) == ("qa", [USER], False)
    assert document.meta["solution"] == "S"


@pytest.mark.parametrize(("record", "problem"), [
    ({"prompt": [USER, GOOD]}, "nothing is left to answer"),
    ({"prompt": "Q", "chosen": "A"}, "rejected"),
    ({"prompt": "Q", "completion": None}, "completion"),
    ({"question": "Q", "answer": "A", "text": "A passage."}, "--data.fields '{context: text}'"),
    ({"question": "Q", "answer": "A", "document": "A passage."}, "--data.fields '{context: document}'"),
    ({"question": "Q", "answer": "A", "paragraph": "A passage."}, "--data.fields '{context: paragraph}'"),
    ({"question": "Q", "answer": "A", "chat_history": [["Q", "A"]]}, "--data.fields '{history: chat_history}'"),
    ({"question": "Q", "answer": "A", "cot": "T"}, "--data.fields '{reasoning_content: cot}'"),
])  # fmt: skip
def test_siblings_that_are_refused(tmp_path: Path, record: dict, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        one(tmp_path, record)


def test_a_text_with_its_prompt_is_a_text(tmp_path: Path) -> None:
    assert one(tmp_path, {"prompt": "Write.", "text": "A text of its own."}).kind == "prose"
    assert one(tmp_path, {"question": "Q", "answer": "A", "text": "Q and A"}).text == "Q\n\nA", "made of both"


@pytest.mark.parametrize("name", ["system", "system_prompt", "system_message"])
def test_names_of_a_system_turn(tmp_path: Path, name: str) -> None:
    turns = one(tmp_path, {name: "S", "messages": [USER, GOOD]}).messages
    assert turns == [{"role": "system", "content": "S"}, USER, GOOD]


@pytest.mark.parametrize("value", [float("nan"), 2, None, 0.5, [1]])
def test_labels_that_are_no_judgement_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(DataError, match="not true or false"):
        one(tmp_path, {"prompt": "Q", "completion": "A", "label": value})


@pytest.mark.parametrize(("record", "expected"), [
    ({"instruction": "Q2", "input": "", "output": "A2", "history": [["Q", "A"]]}, ["Q", "A", "Q2", "A2"]),
    ({"question": "Q2", "answer": "A2", "history": [["Q", "A"], ["R", "B"]]}, ["Q", "A", "R", "B", "Q2", "A2"]),
    ({"prompt": "Q2", "completion": "A2", "history": [USER, GOOD], "system": "S"}, ["S", "Q", "A", "Q2", "A2"]),
    ({"instruction": "Q2", "output": "A2", "history": []}, ["Q2", "A2"]),
    ({"question": "Q", "answer": "A", "context": "C"}, ["C\n\nQ", "A"]),
    ({"passage": "C", "question": "Q", "answer": True}, ["C\n\nQ", "true"]),
    ({"context": "C", "question": "Q", "answers": {"text": ["A", "B"], "answer_start": [0, 1]}}, ["C\n\nQ", "A"]),
    ({"instruction": "Q", "context": "C", "response": "A", "category": "x"}, ["Q\n\nC", "A"]),
    ({"question": "Q", "answer": 33}, ["Q", "33"]),
    ({"question": "Q", "answer": False}, ["Q", "false"]),
    ({"prompt": "Q", "completion": -2}, ["Q", "-2"]),
])  # fmt: skip
def test_earlier_turns_passages_and_answers_that_are_no_text(tmp_path: Path, record: dict, expected: list) -> None:
    assert [turn["content"] for turn in one(tmp_path, record).messages] == expected


@pytest.mark.parametrize("number", ["1.50", "3.14159265358979323846", "1e3", "-0.0"])
def test_numbers_keep_the_spelling_of_their_file(tmp_path: Path, number: str) -> None:
    path = tmp_path / "n.jsonl"
    path.write_text(f'{{"question": "Q", "answer": {number}}}')
    assert read(path)[0][0].meta["answer"] == number


def test_history_that_is_no_list_of_pairs_is_refused(tmp_path: Path) -> None:
    for history in ([["Q"]], "Q", [["Q", 1]], [[USER, GOOD]]):
        with pytest.raises(DataError, match="history"):
            one(tmp_path, {"instruction": "Q", "output": "A", "history": history})


@pytest.mark.parametrize("record", [
    {"messages": [USER, {**GOOD, "reasoning_content": "T"}]},
    {"messages": [USER, {**GOOD, "thinking": "T"}]},
    {"messages": [USER, {**GOOD, "content": [{"type": "thinking", "thinking": "T"}, {"type": "text", "text": "A"}]}]},
    {"question": "Q", "reasoning": "T", "answer": "A"},
    {"prompt": [USER], "completion": [{**GOOD, "reasoning": "T"}]},
])  # fmt: skip
def test_thoughts(tmp_path: Path, record: dict) -> None:
    document = one(tmp_path, record)
    assert document.messages == [USER, {**GOOD, "reasoning_content": "T"}]
    assert document.text == "Q\n\nT\nA"
    assert document.map_text(str.lower).messages[1]["reasoning_content"] == "t"


def test_calls_in_the_roles_of_llama_factory_and_the_fields_of_openai(tmp_path: Path) -> None:
    call = {"name": "tide", "arguments": {"town": "Arvik"}}
    tool = {"name": "tide", "parameters": {"type": "object"}}
    expected = {"type": "function", "function": call}
    turns = [("human", "Q"), ("function_call", json.dumps(call)), ("observation", "06:20"), ("gpt", "A")]
    sharegpt = [{"from": who, "value": text} for who, text in turns]
    legacy = [
        USER, {"role": "assistant", "content": None, "function_call": {**call, "arguments": '{"town": "Arvik"}'}},
        {"role": "function", "name": "tide", "content": "06:20"}, GOOD,
    ]  # fmt: skip
    for record in (
        {"conversations": sharegpt, "tools": json.dumps([tool])},
        {"messages": legacy, "functions": [tool], "parallel_tool_calls": True},
    ):
        document = one(tmp_path, record)
        assert document.tools == [tool]
        assert [turn["role"] for turn in document.messages] == ["user", "assistant", "tool", "assistant"]
        assert document.messages[1]["tool_calls"] == [expected]
    with pytest.raises(DataError, match="turn 2 of conversations"):
        one(tmp_path, {"conversations": [sharegpt[0], {"from": "function_call", "value": "no JSON"}, *sharegpt[2:]]})


@pytest.mark.parametrize("record", [
    {"input": {"messages": [USER]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
    {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"},
     "rejected": {"from": "gpt", "value": "B"}},
    {"instruction": "Q", "input": "", "chosen": "A", "rejected": "B"},
    {"question": "Q", "chosen": "A", "rejected": "B"},
    {"prompt": "Q", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD], "score_chosen": 8.0},
])  # fmt: skip
def test_preference_forms(tmp_path: Path, record: dict) -> None:
    document = one(tmp_path, record)
    assert (document.messages, document.rejected, document.prompt_turns) == ([USER, GOOD], [BAD], 1)


def test_variables_of_the_template_are_kept(tmp_path: Path) -> None:
    record = {"messages": [USER, GOOD], "chat_template_kwargs": {"enable_thinking": False, "other": None}}
    assert one(tmp_path, record).meta["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(DataError, match="chat_template_kwargs"):
        one(tmp_path, {"messages": [USER, GOOD], "chat_template_kwargs": 3})


def test_files_of_turns(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([USER, GOOD]))
    (tmp_path / "b.json").write_text(json.dumps([[USER, BAD], [USER, GOOD]]))
    (tmp_path / "c.json").write_text(json.dumps([{"messages": [USER, GOOD]}]))
    (tmp_path / "d.jsonl").write_text(json.dumps([USER, GOOD]) + "\n" + json.dumps([USER, BAD]))
    documents, report = read(tmp_path)
    assert [document.meta["answer"] for document in documents] == ["A", "B", "A", "A", "A", "B"]
    assert not report.passed_over


def test_a_content_is_not_rewritten(tmp_path: Path) -> None:
    text = "  def f():\r\n\treturn 'cafÃ©'  \n\n\n\n\n"
    assert one(tmp_path, {"question": "Q", "answer": text}).meta["answer"] == text


def nested(levels: int) -> object:
    value: object = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


HUGE = 10**400


@pytest.mark.parametrize(("record", "answer"), [
    ({"question": "Q", "answer": HUGE}, str(HUGE)),
    ({"messages": [USER, {"role": "assistant", "content": -HUGE}]}, str(-HUGE)),
    ({"messages": [USER, GOOD], "tools": [{"name": "f", "parameters": nested(90)}]}, "A"),
    ({"question": "Q", "choices": {"text": ["A", "B"], "label": [1, 2]}, "answer": "1"}, "A"),
])  # fmt: skip
def test_numbers_beyond_floating_point_and_deep_functions_are_read(tmp_path: Path, record: dict, answer: str) -> None:
    assert one(tmp_path, record).messages[-1]["content"] == answer


def test_a_number_beyond_floating_point_is_learned_as_it_is_spelled(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"question": "Q", "answer": 1e999}')
    assert read(path)[0][0].messages[-1]["content"] == "1e999"
    path.write_text('{"question": "Q", "answer": -Infinity}')
    with pytest.raises(DataError, match=r"'answer' holds -inf, which is not a number"):
        read(path)


@pytest.mark.parametrize(("record", "problem"), [
    ({"prompt": "Q", "chosen": "A", "rejected": "B", "margin": HUGE}, r"margin is 1000+, not a finite number"),
    ({"prompt": "Q", "completion": "A", "label": HUGE}, r"label is 1000+, not true"),
    ({"messages": [USER, {**GOOD, "weight": HUGE}]}, r"has the weight 1000+; a turn"),
    ({"messages": [{**USER, "role": "x" * 10_000}, GOOD]}, r"turn 1 of messages has the role 'x{59}, not"),
    ({"question": "Q", "choices": ["A", "B"], "answer": "x" * 10_000}, r"the answer 'x{59} is neither"),
    ({"question": "Q", "choices": {"text": ["A", "B"], "label": 5}, "answer": "A"}, "one label for each text"),
    ({"question": "Q", "choices": {"text": ["A", "B"], "label": ["x", "y", "z"]}, "answer": "z"}, "one label for each"),
    ({"messages": [USER, GOOD], "tools": [{"name": "f", "parameters": nested(600)}]}, "levels .* field 'tools'"),
    ({"messages": [USER, GOOD], "tools": json.dumps([{"name": "f", "parameters": nested(300)}])}, "too many levels"),
    ({"messages": [USER, GOOD], "topic": nested(900)}, "levels .* field 'topic'"),
    ({"image": "a\0.png", "caption": "x"}, "not a path within the folder"),
    ({"image": "\ud800.png", "caption": "x"}, "not a path within the folder"),
])  # fmt: skip
def test_values_at_the_edge_of_json_are_refused_with_their_line(tmp_path: Path, record: dict, problem: str) -> None:
    with pytest.raises(DataError, match=rf"r\.jsonl:1: .*{problem}"):
        one(tmp_path, record)
