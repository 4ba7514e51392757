"""Bodies that clients send, against a model whose answer to any chat is known: each token has one successor."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch

from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import engine_in_thread
from modelwright.serve.server import ServerThread
from serve.conftest import make_served_tokenizer, make_tokenizer

ANSWER = "😀Hi STOP!"
HELLO = [{"role": "user", "content": "Hello"}]
TIDE = {"type": "function", "function": {"name": "get_tide", "parameters": {
    "type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}}}  # fmt: skip
COMMENT = {"type": "object", "properties": {"text": {"type": "string"}, "replies": {"type": "array", "items":
           {"$ref": "#/$defs/Comment"}}}, "required": ["text", "replies"]}  # fmt: skip
PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"]}  # fmt: skip
TREE = {"type": "object", "properties": {"name": {"type": "string"}, "children": {"type": "array", "items":
        {"$ref": "#"}}}, "required": ["name", "children"], "additionalProperties": False}  # fmt: skip


def form(schema: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def chain_model() -> Decoder:
    """Blocks add nothing, embeddings are unit vectors, and the head maps each token to the next one of the answer."""
    tokenizer = make_served_tokenizer()
    size = make_tokenizer().vocab_size + -make_tokenizer().vocab_size % 8
    config = ModelConfig(
        vocab_size=size, num_layers=1, model_dim=size, num_heads=1, num_kv_heads=1, head_dim=8, ffn_dim=8,
        max_seq_len=512, tie_embeddings=False,
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(0)
    assert model.head is not None
    ids = [
        *tokenizer.mark_ids("<|assistant|>"),
        *tokenizer.encode(ANSWER, with_begin=False),
        *tokenizer.mark_ids("<|end|>"),
    ]
    assert len(set(ids)) == len(ids), "a chain has each token once"
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.zero_()
        model.embedding.weight.copy_(torch.eye(size))
        model.head.weight.zero_()
        model.head.weight[ids[1:], ids[:-1]] = 10.0
    return model.eval()


@pytest.fixture(scope="module")
def machine() -> Iterator[ServerThread]:
    config = ServeConfig(port=0)
    client = engine_in_thread(chain_model(), config)
    with ServerThread(client, make_served_tokenizer(), config, model_name="machine") as server:
        yield server


def send(server: ServerThread, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    body = {"model": "machine", "messages": HELLO, "temperature": 0, "max_tokens": 40} | fields
    body = {name: value for name, value in body.items() if value is not None}
    return httpx.post(server.url + path, content=json.dumps(body), timeout=60)


@pytest.mark.parametrize("fields", [
    {},
    {"max_tokens": 4096},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "x"}}]}]},
    {"messages": [*HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "greet"}, *HELLO]},
    {"messages": [*HELLO, {"role": "assistant", "content": ""}, *HELLO]},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"tools": [TIDE]},
    {"tools": [TIDE], "tool_choice": "auto"},
])  # fmt: skip
def test_what_gives_the_answer(machine: ServerThread, fields: dict):
    reply = send(machine, **fields)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")


@pytest.mark.parametrize("schema", [PAIR, TREE, {"$defs": {"Comment": COMMENT}, "$ref": "#/$defs/Comment"}])
def test_schemas_that_refer_to_themselves_or_to_paths(machine: ServerThread, schema: dict):
    pytest.importorskip("llguidance")
    reply = send(machine, **form(schema))
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(("fields", "code"), [
    ({"messages": []}, "invalid_value"),
    ({"top_logprobs": 3}, "invalid_value"),
    ({"messages": [{"role": "user", "content": "half \ud83d"}]}, "invalid_json"),
])  # fmt: skip
def test_what_is_refused(machine: ServerThread, fields: dict, code: str):
    reply = send(machine, **fields)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)


def test_a_server_that_does_not_clamp_names_the_room(slow_server: Callable[..., ServerThread]):
    server = slow_server(clamp_max_tokens=False)
    reply = send(server, model="tiny", max_tokens=4096)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "2048 tokens" in reply.json()["error"]["message"]
    assert send(server, model="tiny", max_tokens=4).json()["usage"]["completion_tokens"] == 4


def test_two_answers(machine: ServerThread):
    choices = send(machine, n=2, temperature=1.0, seed=7).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]


@pytest.mark.parametrize(("fields", "said", "has_usage"), [
    ({}, ANSWER, False),
    ({"stream_options": {"include_usage": True}}, ANSWER, True),
    ({"stop": ["STOP"]}, "😀Hi ", False),
    ({"stop": ["STOX"]}, ANSWER, False),
])  # fmt: skip
def test_streams(machine: ServerThread, fields: dict, said: str, has_usage: bool):
    lines = [line[6:] for line in send(machine, stream=True, **fields).text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(pieces) == said
    assert not any("\ufffd" in piece for piece in pieces)
    assert [event for event in events if not event["choices"]] == (events[-1:] if has_usage else [])


def test_special_tokens_in_a_prompt_on_request(machine: ServerThread):
    none = {"messages": None, "temperature": None, "max_tokens": None}
    chat = send(machine, "/tokenize", **none | {"messages": HELLO}).json()["tokens"]
    tokenizer = machine.service.model.tokenizer
    text = tokenizer.decode(chat[1:], skip_special=False)
    read = send(machine, "/tokenize", **none, prompt=text, parse_special=True).json()["tokens"]
    plain = send(machine, "/tokenize", **none, prompt=text).json()["tokens"]
    assert read == chat
    assert len(plain) > len(chat)
    reply = send(machine, "/v1/completions", messages=None, prompt=text, parse_special=True)
    assert reply.json()["choices"][0]["text"] == ANSWER
