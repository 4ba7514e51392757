"""Requests: what asks for nothing is accepted, and a refusal says in plain words what is wrong."""

import json

import httpx
import pytest

from modelwright.serve.api.chat import ChatRequest
from modelwright.serve.api.completions import CompletionRequest
from modelwright.serve.api.encode import EmbeddingRequest, TokenizeRequest
from modelwright.serve.api.fields import GenerationRequest
from modelwright.serve.api.parsing import parse_request
from modelwright.serve.errors import ApiError
from modelwright.serve.limits import Limits
from modelwright.serve.server import ServerThread

LIMITS = Limits(context=100, max_choices=4, max_token_bytes=10, max_body_bytes=4_000_000)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def parse(kind: type[GenerationRequest], body: dict):
    return parse_request(kind, json.dumps(body).encode(), LIMITS)


def refusal(kind: type[GenerationRequest], body: dict) -> str:
    with pytest.raises(ApiError) as caught:
        parse(kind, body)
    assert caught.value.status == 400
    for word in ("Input", "valid ", "None", "False", "literal", ".str", "dictionary"):
        assert word not in caught.value.message.removeprefix("Invalid value"), caught.value.message
    return caught.value.message


def turn(**fields) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"} | fields]}


NOTHING = [
    (ChatRequest, {"repetition_penalty": 1.0, "ignore_eos": False, "min_p": 0, "tools": [], "logit_bias": {}}),
    (ChatRequest, {"repetition_penalty": None, "ignore_eos": None, "min_p": 0.0, "tools": None, "stop": None}),
    (ChatRequest, {"response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"]}),
    (ChatRequest, {"prediction": None, "reasoning_effort": None, "web_search_options": None}),
    (ChatRequest, {"stream_options": {"include_usage": None, "later": None}, "n": None}),
    (EmbeddingRequest, {"prompt": None, "input": "hi", "encoding_format": None, "pooling": None, "dimensions": None}),
    (TokenizeRequest, {"add_special_tokens": None, "add_generation_prompt": None, "messages": None}),
    (CompletionRequest, {"repetition_penalty": 1, "echo": False, "best_of": 1, "suffix": "", "stop": []}),
]


@pytest.mark.parametrize(("kind", "fields"), NOTHING)
def test_fields_that_ask_for_nothing_are_accepted(kind, fields):
    assert parse(kind, (CHAT if kind is ChatRequest else COMPLETION) | fields)


def test_null_is_no_value_of_a_field_that_must_be_there() -> None:
    assert refusal(ChatRequest, CHAT | {"messages": None}) == "Missing required field 'messages'."
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": None}}}
    asked = parse(ChatRequest, CHAT | {"response_format": schema})
    assert asked.response_format.json_schema.json_schema == {"const": None}


def test_an_answer_of_the_official_client_can_be_sent_back():
    answer = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None,
              "function_call": None, "tool_calls": []}  # fmt: skip
    assert parse(ChatRequest, {"model": "m", "messages": [answer, CHAT["messages"][0]]})


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = parse_request(ChatRequest, json.dumps(turn(content=parts)).encode(), LIMITS)
    assert request.messages[0].plain()["content"] == "one\ntwo"


REFUSED = [
    (CompletionRequest, COMPLETION | {"echo": 1}, "'echo': must be a boolean, got 1"),
    (CompletionRequest, COMPLETION | {"max_tokens": 0}, "max_tokens may be 0 only with echo or prompt_logprobs"),
    (CompletionRequest, COMPLETION | {"logprobs": 21}, "'logprobs': must be less than or equal to 20, got 21"),
    (CompletionRequest, COMPLETION | {"logit_bias": {"a": 1}}, "'logit_bias': must be an object of token ids"),
    (CompletionRequest, COMPLETION | {"logit_bias": {"5": 101}}, "'logit_bias': must be an object of token ids"),
    (CompletionRequest, COMPLETION | {"logit_bias": [5]}, "'logit_bias': must be an object of token ids"),
    (CompletionRequest, COMPLETION | {"stop_token_ids": [1.5]}, "'stop_token_ids.0': must be an integer, got 1.5"),
    (CompletionRequest, COMPLETION | {"top_k": -2}, "'top_k': must be greater than or equal to -1, got -2"),
    (CompletionRequest, COMPLETION | {"best_of": 2}, "'best_of': is not supported by this server"),
    (CompletionRequest, COMPLETION | {"suffix": "x"}, "'suffix': is not supported by this server"),
    (CompletionRequest, COMPLETION | {"prompt": 5}, "must be a text, a list of texts, a list of token ids"),
    (CompletionRequest, COMPLETION | {"prompt": ["a", 1]}, "must be a text, a list of texts, a list of token ids"),
    (CompletionRequest, COMPLETION | {"prompt": [True]}, "must be a text, a list of texts, a list of token ids"),
    (CompletionRequest, COMPLETION | {"stop": 5}, "at most 16 stop strings"),
    (CompletionRequest, COMPLETION | {"stop": [5]}, "at most 16 stop strings"),
    (ChatRequest, CHAT | {"temperature": "hot"}, "'temperature': must be a number, got \"hot\""),
    (ChatRequest, CHAT | {"temperature": 9}, "'temperature': must be less than or equal to 2, got 9"),
    (ChatRequest, CHAT | {"max_tokens": 2.5}, "'max_tokens': must be an integer"),
    (ChatRequest, CHAT | {"stream": "yes"}, "'stream': must be a boolean"),
    (ChatRequest, CHAT | {"min_p": 1.5}, "'min_p': must be less than or equal to 1, got 1.5"),
    (ChatRequest, CHAT | {"repetition_penalty": 0}, "'repetition_penalty': must be greater than 0, got 0"),
    (ChatRequest, CHAT | {"ignore_eos": "yes"}, "'ignore_eos': must be a boolean"),
    (ChatRequest, CHAT | {"messages": []}, "'messages': must not be empty"),
    (ChatRequest, CHAT | {"messages": ["hi"]}, "'messages.0': must be an object"),
    (ChatRequest, turn(role="wizard"), "must be 'system', 'developer', 'user', 'assistant' or 'tool', got"),
    (ChatRequest, turn(mood="good"), "Unknown field 'messages.0.mood'"),
    (ChatRequest, turn(content=5), "'messages.0.content': must be a text or a list of parts"),
    (ChatRequest, turn(content=["hi"]), 'each part must be {"type": "text", "text": "..."}'),
    (ChatRequest, turn(content=[{"type": "text", "text": 5}]), 'each part must be {"type": "text"'),
    (ChatRequest, turn(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
     "'messages.0.content': part 0: this server fetches nothing, so 'x' is not read"),
    (ChatRequest, turn(content=[{"type": "input_audio", "input_audio": {}}]),
     "'messages.0.content': parts of type 'input_audio' are not supported by this server, which reads text and"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_refusals_are_in_plain_words(kind, body, words):
    assert words in refusal(kind, body)


def test_an_unknown_address_names_those_there_are(server: ServerThread):
    answer = httpx.get(f"{server.url}/v1/images")
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert "nothing at /v1/images" in message
    for address in ("GET /health", "GET /v1/models", "POST /v1/completions", "POST /v1/chat/completions"):
        assert address in message
    wrong = httpx.get(f"{server.url}/v1/completions")
    assert "use POST" in wrong.json()["error"]["message"]
