"""The conversations of the recipe `tools`."""

import copy
import json
import random
from pathlib import Path

import httpx
import jsonschema
import pytest

from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import engine_in_thread
from modelwright.serve.server import ServerThread
from modelwright_agents import tool_corpus
from modelwright_agents.tool_corpus import NUM_REQUESTS, TOOLS, call_function, draw_request, tool_conversations
from serve.conftest import make_model, make_served_tokenizer, make_tokenizer

SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_corpus, "NUM_CONVERSATIONS", 400)


def test_calls_fit_their_schemas_and_have_their_results():
    num_calls = num_declined = 0
    for document in tool_conversations():
        offered = {tool["function"]["name"] for tool in document.tools}
        turns = document.messages
        assert sum(turn["role"] == "user" for turn in turns) == NUM_REQUESTS
        for turn, after in zip(turns, [*turns[1:], {}], strict=True):
            num_declined += turn["content"].startswith("I have no")
            for call in turn.get("tool_calls", ()):
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                assert name in offered
                jsonschema.validate(arguments, SCHEMAS[name])
                assert after["content"] == call_function(name, json.loads(json.dumps(arguments)))
                num_calls += 1
    assert num_calls > 400
    assert num_declined > 20


def test_held_out_requests_ask_about_what_training_never_has():
    asked = {split: {draw_request(random.Random(seed), split).question for seed in range(500)}
             for split in ("train", "heldout")}  # fmt: skip
    towns = {split: {word for one in texts for word in one.split()} & {f"{town}{end}" for town in tool_corpus.TOWNS
             for end in "?."} for split, texts in asked.items()}  # fmt: skip
    names = {split: {word.rstrip("?.") for word in words} for split, words in towns.items()}
    assert names["train"]
    assert names["heldout"]
    assert not names["train"] & names["heldout"]
    assert not asked["train"] & asked["heldout"]


def test_the_same_every_time():
    first, again = (list(tool_conversations()) for _ in range(2))
    assert first == again
    assert len({document.id for document in first}) == len(first)


@pytest.mark.parametrize(("name", "arguments", "result"), [
    ("convert_unit", {"value": 10, "unit": "miles", "target": "kilometers"}, "16.09"),
    ("convert_unit", {"value": 16.09344, "unit": "kilometers", "target": "miles"}, "10.00"),
    ("add_days", {"date": "2024-02-28", "days": 2}, "2024-03-01"),
    ("add_days", {"date": "2023-03-01", "days": -1}, "2023-02-28"),
])  # fmt: skip
def test_results(name: str, arguments: dict, result: str):
    assert call_function(name, arguments) == result


def test_wrong_arguments_have_no_result():
    for name, arguments in (("look_up", {"town": "Nowhere", "column": "area"}), ("other", {}),
                            ("convert_unit", {"value": 1, "unit": "miles", "target": "liters"}),
                            ("add_days", {"date": "soon", "days": 1})):  # fmt: skip
        with pytest.raises((ValueError, KeyError)):
            call_function(name, arguments)


def test_training_and_serving_give_the_same_ids_of_the_built_in_template(tmp_path: Path):
    """The built-in template renders a conversation as `transformers` does."""
    make_tokenizer().save(tmp_path)
    document = next(one for one in tool_conversations() if any(turn["role"] == "tool" for turn in one.messages))
    turns = list(document.messages)
    last = max(number for number, turn in enumerate(turns) if turn["role"] == "assistant")
    messages = copy.deepcopy(turns[:last])
    for turn in messages:
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    config = ServeConfig(port=0)
    client = engine_in_thread(make_model(), config)
    with ServerThread(client, make_served_tokenizer(), config, model_name="tiny") as server:
        body = {"model": "tiny", "messages": messages, "tools": list(document.tools)}
        served = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
        assert server.service.model.form.name == "hermes"
    ((ids, mask),) = make_tokenizer().chat.encode_training_chats(turns, tools=document.tools)
    assert ids[: len(served)].tolist() == served
    assert mask[len(served) :].all()
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rendered = theirs.apply_chat_template(turns, tools=list(document.tools), tokenize=True, return_dict=False)
    assert list(rendered) == ids.tolist()
