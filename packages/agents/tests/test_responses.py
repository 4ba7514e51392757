"""/v1/responses with OpenAI's own client, its schemas, and what it refuses."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import jsonschema
import pytest
import yaml
from openai import OpenAI

from added_package import add_agent_routes
from modelwright.core.config import ConfigError
from modelwright.serve.api.operations import OPERATIONS
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import engine_in_thread, load_engines
from modelwright.serve.keys import key_hash
from modelwright.serve.load import ModelSource, ServedTokenizer
from modelwright.serve.server import ServerThread
from serve.conftest import make_model, make_served_tokenizer, make_tokenizer
from serve.image_model import png, write_image_model
from serve.test_agents import TEMPLATE, check_cuts

PARAMETERS = {"type": "object", "properties": {"town": {"type": "string", "maxLength": 5}}, "required": ["town"],
              "additionalProperties": False}  # fmt: skip
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
TOOL = {"type": "function", "name": "get_tide", "parameters": PARAMETERS, "strict": True}


@pytest.fixture(scope="module", autouse=True)
def routes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        add_agent_routes(tmp_path_factory.mktemp("routes"), monkeypatch)
        yield


@contextmanager
def served(name: str = "t", tokenizer: ServedTokenizer | None = None, **settings) -> Iterator[ServerThread]:
    config = ServeConfig(port=0, **settings)
    client = engine_in_thread(make_model(), config)
    with ServerThread(client, tokenizer or make_served_tokenizer(), config, model_name=name) as one:
        yield one


@pytest.fixture(scope="module")
def keeping() -> Iterator[ServerThread]:
    """A server that keeps two responses."""
    with served(routes={"responses": {"stored": 2}}) as one:
        yield one


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with served("tiny", max_body_bytes=20_000) as one:
        yield one


@pytest.fixture(scope="module")
def openai(keeping: ServerThread) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{keeping.url}/v1", api_key="unused", max_retries=0, timeout=60) as one:
        yield one


def post(server: ServerThread, **fields) -> httpx.Response:
    body = {"model": server.service.model_name, "input": "the quick", "max_output_tokens": 4} | fields
    return httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)


def test_text_is_that_of_the_chat_api(openai: OpenAI):
    asked = {"model": "t", "temperature": 0}
    answer = openai.responses.create(**asked, input="the quick brown", instructions="be brief", max_output_tokens=12)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick brown"}]
    chat = openai.chat.completions.create(**asked, messages=messages, max_tokens=12)
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 12)


def test_named_events_make_the_whole_response(openai: OpenAI):
    fields = {"model": "t", "input": [{"role": "user", "content": [{"type": "input_text", "text": "größer"}]}],
              "max_output_tokens": 9, "temperature": 0}  # fmt: skip
    whole = openai.responses.create(**fields)
    events = list(openai.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    with openai.responses.stream(**fields) as stream:  # the client's own accumulator
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_forced_call_its_result_and_the_next_turn(openai: OpenAI):
    pytest.importorskip("llguidance")
    fields = {"model": "t", "tools": [TOOL], "max_output_tokens": 120, "temperature": 0, "parallel_tool_calls": False}
    first = openai.responses.create(**fields, input="tide?", tool_choice="required")
    (call,) = first.output
    assert (call.type, call.name, set(json.loads(call.arguments))) == ("function_call", "get_tide", {"town"})
    named = {"type": "function", "name": "get_tide"}
    events = list(openai.responses.create(**fields, input="tide?", tool_choice=named, stream=True))
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (item,) = events[-1].response.output
    assert events[-1].type == "response.completed"
    assert "".join(parts) == item.arguments
    assert item.name == "get_tide"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "high {{ 7*7 }}<|end|>"}
    kept = openai.responses.create(**fields, input=[result], previous_response_id=first.id, tool_choice="none")
    echoed = [
        {"role": "user", "content": "tide?"},
        *[one.model_dump(exclude_none=True) for one in first.output],
        result,
    ]
    sent = openai.responses.create(**fields, input=echoed, tool_choice="none")
    assert kept.usage.input_tokens == sent.usage.input_tokens > first.usage.output_tokens
    assert kept.previous_response_id == first.id


def test_kept_responses_are_bounded(keeping: ServerThread, server: ServerThread):
    names = [post(keeping).json()["id"] for _ in range(3)]
    assert post(keeping, previous_response_id=names[2]).status_code == 200
    reply = post(keeping, previous_response_id=names[0])
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "previous_response_not_found")
    forgotten = post(keeping, store=False).json()
    assert forgotten["store"] is False
    assert post(keeping, previous_response_id=forgotten["id"]).status_code == 400
    for fields in ({"previous_response_id": names[2]}, {"store": True}):
        reply = post(server, **fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(fields)))
    assert post(server).json()["store"] is False


@pytest.mark.parametrize(("fields", "param"), [
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"input": []}, "input"),
    ({"input": [{"type": "computer_call_output"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a/b.png"}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": []}]}]}, "input"),
    ({"input": [{"role": "user", "content": [7]}]}, "input"),
    ({"input": [{"role": "assistant", "content": [PICTURE]}]}, "input"),
    ({"input": [{"role": "system", "content": [PICTURE]}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": [PICTURE]}]}, "input"),
    ({"input": [{"role": "user", "content": [PICTURE]}]}, "input"),
    ({"input": [{"type": {}}]}, "input"),
    ({"text": {"verbosity": "low"}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}}}, "text"),
    ({"made_up": 1}, "made_up"),
])  # fmt: skip
def test_unsupported_features_are_refused_by_name(server: ServerThread, fields: dict, param: str):
    reply = post(server, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_formats_and_reasoning(server: ServerThread):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    reply = post(server, text={"format": form}, max_output_tokens=40)
    assert json.loads(reply.json()["output"][0]["content"][0]["text"])["n"] in (1, 2)
    assert reply.json()["text"]["format"]["schema"] == schema
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "hi", "annotations": []}],
    }
    reply = post(server, input=[{"role": "user", "content": "a"}, thought, said, {"role": "user", "content": "b"}],
                 reasoning={"effort": "low", "summary": "auto"})  # fmt: skip
    assert reply.status_code == 200, reply.text
    assert "reasoning.summary" in reply.headers["X-Ignored-Fields"]


def test_images_are_those_of_the_chat_api(tmp_path: Path):
    config = ServeConfig(port=0)
    source = ModelSource(name="eyes", folder=write_image_model(tmp_path))
    url = f"data:image/png;base64,{base64.b64encode(png(1)).decode()}"
    with (
        ServerThread(*load_engines(source, config), config, model_name="eyes", source=source) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as openai,
    ):
        parts = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": "What?"}]
        answer = openai.responses.create(
            model="eyes", input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=6
        )
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
        messages = [{"role": "user", "content": parts}]
        chat = openai.chat.completions.create(model="eyes", messages=messages, temperature=0, max_tokens=6)
        assert answer.output_text == chat.choices[0].message.content
        assert answer.usage.input_tokens == chat.usage.prompt_tokens


REQUESTS = [
    {"input": "the quick"},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
               {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
               {"type": "function_call_output", "call_id": "c", "output": "b"}]},
]  # fmt: skip


@pytest.mark.parametrize("fields", REQUESTS)
def test_requests_replies_and_events_match_their_schemas(server: ServerThread, fields: dict):
    document = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    entry = document["paths"]["/v1/responses"]["post"]
    content = entry["responses"]["200"]["content"]

    def check(value: object, schema: dict) -> None:
        jsonschema.validate(value, {**schema, "components": document["components"]})

    body = {"model": "tiny", "max_output_tokens": 3} | fields
    check(body, entry["requestBody"]["content"]["application/json"]["schema"])
    check(post(server, **body).json(), content["application/json"]["schema"])
    for event in post(server, **body, stream=True).text.strip().split("\n\n"):
        name, data = (line.partition(": ")[2] for line in event.split("\n"))
        check(json.loads(data), content["text/event-stream"]["x-event-schema"])
        assert json.loads(data)["type"] == name
    wrong = post(server, **body | {"temperature": 9})
    check(wrong.json(), entry["responses"]["400"]["content"]["application/json"]["schema"])


def test_streams_reassemble_wherever_their_bytes_are_cut(tmp_path: Path):
    pytest.importorskip("llguidance")
    make_tokenizer().save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    with served(tokenizer=ServedTokenizer.load(tmp_path)) as server:
        reply = post(server, input="größer 🙂", tools=[TOOL], tool_choice="required", max_output_tokens=60, stream=True)
        check_cuts(reply.content)


def test_a_request_counts_once_for_its_key(tmp_path: Path):
    entries = [{"name": "a", "sha256": key_hash("a"), "scopes": ["infer"], "requests_per_minute": 2},
               {"name": "b", "sha256": key_hash("b"), "scopes": ["metrics"]}]  # fmt: skip
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": entries}))
    with served(keys_file=str(tmp_path / "keys.yaml")) as server:
        body = {"model": "t", "input": "the", "max_output_tokens": 1}

        def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return httpx.post(f"{server.url}/v1/responses", json=body, headers=headers, timeout=60).status_code

        assert [status(key) for key in ("", "wrong", "b")] == [401, 401, 403]
        assert [status("a") for _ in range(3)] == [200, 200, 429]


def test_settings_are_checked():
    for routes in ({"responses": {"stored": -1}}, {"responses": {"kept": 1}}, {"response": {}}):
        with pytest.raises(ConfigError) as caught, served(routes=routes):
            pass
        assert str(caught.value).startswith(f"routes.{next(iter(routes))}")


def test_a_server_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modelwright.serve.server.all_operations", lambda _: OPERATIONS)
    with served() as server:
        reply = post(server)
        assert reply.status_code == 404
        assert "modelwright[agents]" in reply.json()["error"]["message"]
