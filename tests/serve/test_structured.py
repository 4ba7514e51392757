"""Constrained answers: JSON by schema, regular expressions, choices, grammars, forced calls of functions."""

import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch
from openai import OpenAI

from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.sequence import SamplingParams
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import engine_in_thread
from modelwright.serve.server import ServerThread
from serve.conftest import make_model, make_served_tokenizer

pytest.importorskip("llguidance")

QUESTION = [{"role": "user", "content": "what does this do?"}]
PATH = "/v1/chat/completions"


def ask(server: ServerThread, http: Any = httpx, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 200, "seed": 1} | fields
    return http.post(server.url + PATH, json=body, timeout=60)


def content(response: httpx.Response) -> tuple[str, str]:
    """Text and finish reason."""
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def json_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def small_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """A schema as JSONSchemaBench has them, with answers of some dozen tokens."""
    scalars: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": draw.randint(-50, 0), "maximum": draw.randint(1, 2000)},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 9},
        {"type": "string", "maxLength": draw.randint(0, 6)},
        {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]{1,3}$"},
        {"type": "string", "format": "date"},
        {"enum": draw.sample(["red", "green", "größer", 7, None, True, 2.5], 3)},
        {"const": draw.choice(["fixed", 12, False])},
        {"type": ["integer", "null"], "multipleOf": 1, "minimum": 0, "maximum": 99},
    ]
    kind = draw.randrange(5 if depth else 1)
    if kind == 1:
        names = draw.sample(["id", "name", "größe", "a b", "tags", 'quo"te'], draw.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: small_schema(draw, depth - 1) for name in names},
            "required": draw.sample(names, draw.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == 2:
        return {"type": "array", "items": small_schema(draw, depth - 1), "minItems": draw.randint(0, 1), "maxItems": 2}
    if kind == 3:
        return {"anyOf": [small_schema(draw, depth - 1) for _ in range(2)]}
    if kind == 4:
        definition = small_schema(draw, 0)
        return {"type": "object", "properties": {"one": {"$ref": "#/$defs/it"}, "two": {"$ref": "#/$defs/it"}},
                "required": ["one"], "additionalProperties": False, "$defs": {"it": definition}}  # fmt: skip
    return draw.choice(scalars)


def rooted(draw: random.Random) -> dict[str, Any]:
    """References count from the root, so a schema with definitions stands alone."""
    while True:
        schema = small_schema(draw, 2)
        if json.dumps(schema).count('$defs": {') == ("$defs" in schema):
            return schema


def test_200_schemas_give_valid_answers(server: ServerThread):
    draw = random.Random(5)
    schemas = [rooted(draw) for _ in range(200)]
    assert len({json.dumps(schema) for schema in schemas}) > 120

    def answered(schema: dict[str, Any]) -> tuple[str, str]:
        return content(ask(server, http, response_format=json_format(schema)))

    with httpx.Client() as http, ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(answered, schemas))
    num_finished = 0
    for schema, (text, reason) in zip(schemas, answers, strict=True):
        if reason == "stop":
            num_finished += 1
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
    assert num_finished >= 190


def test_the_official_client_parses_a_model_of_pydantic(client: OpenAI):
    from typing import Literal

    import pydantic

    class Person(pydantic.BaseModel):
        name: Literal["Ada", "Grace"]
        age: int = pydantic.Field(ge=0, le=120)

    answer = client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Person, max_tokens=100)
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert 0 <= person.age <= 120


def test_json_objects_regular_expressions_choices_and_grammars(server: ServerThread):
    text, reason = content(ask(server, response_format={"type": "json_object"}, logit_bias={}))
    assert text.startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)
    text, reason = content(ask(server, structured_outputs={"regex": "[a-c]{3}-[0-9]{2}"}))
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", text)
    assert reason == "stop"
    texts = {
        content(ask(server, structured_outputs={"choice": ["yes", 'no"\n', "größer"]}, seed=i))[0] for i in range(9)
    }
    assert len(texts) > 1
    assert texts <= {"yes", 'no"\n', "größer"}
    sums = 'start: number ("+" number)~2\nnumber: /[1-9][0-9]?/'
    text, _ = content(ask(server, structured_outputs={"grammar": sums}))
    assert re.fullmatch(r"[1-9]\d?(\+[1-9]\d?){2}", text)
    body = {"model": "tiny", "prompt": ["the", "a"], "structured_outputs": {"json": {"type": "boolean"}}, "n": 2}
    completion = httpx.post(f"{server.url}/v1/completions", timeout=60, json=body)
    assert {choice["text"] for choice in completion.json()["choices"]} <= {"true", "false"}
    assert content(ask(server, response_format={"type": "text"}, max_tokens=4))[1] == "length"


def tree(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


DEEP_TOOL = {"type": "function", "function": {"name": "f", "parameters": tree(400)}}
BAD = [
    ({"response_format": json_format({"$ref": "#"})}, "refers to itself"),
    ({"response_format": json_format(tree(40))}, "nested deeper than 64"),
    ({"tools": [DEEP_TOOL], "tool_choice": "required"}, "nested deeper than 64"),
    ({"response_format": json_format({"enum": [1] * 1000, "anyOf": [{"enum": [1] * 1000}] * 5})}, "more than 5000"),
    ({"response_format": json_format({"$ref": "http://example.com/a"})}, "leads out of the schema"),
    ({"response_format": json_format({"$ref": "#/$defs/none"})}, "leads nowhere"),
    ({"response_format": json_format({"type": "object", "unevaluatedProperties": False})}, "unevaluatedProperties"),
    ({"response_format": json_format({"type": "wizard"})}, "wizard"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"structured_outputs": {"regex": "(unclosed"}}, "unclosed"),
    ({"structured_outputs": {"grammar": "start: missing"}}, "missing"),
    ({"structured_outputs": {"grammar": "\x00"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
    ({"structured_outputs": {}}, "exactly one"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "cannot be combined"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "cannot be combined with ignore_eos"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), BAD, ids=[f"{i}-{words}" for i, (_, words) in enumerate(BAD)])
def test_bad_grammars_are_refused_and_end_nothing(server: ServerThread, fields: dict, words: str):
    refused = ask(server, **fields)
    assert refused.status_code == 400, refused.text
    assert words in refused.json()["error"]["message"]
    assert content(ask(server, max_tokens=1))[1] == "length"


@pytest.mark.parametrize(("opening", "closing"), [('{"properties":{"a":', "}}"), ("[", "]"), ('{"anyOf":[', "]}")])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_60000_deep_schema_is_refused(deep_server: ServerThread, opening: str, closing: str, is_whole: bool):
    depth = 60_000 // len(closing)
    schema = opening * depth + ("1" + closing * depth if is_whole else "")
    body = '{"model":"tiny","messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema",'
    body += f'"json_schema":{{"name":"a","schema":{schema}}}}}}}'
    refused = httpx.post(deep_server.url + PATH, content=body.encode(), timeout=60)
    assert refused.status_code == 400, refused.text
    assert content(ask(deep_server, max_tokens=1))[1] == "length"


@pytest.fixture(scope="module")
def deep_server() -> Iterator[ServerThread]:
    """A server whose context lets large bodies in."""
    config = ServeConfig(port=0, engine=EngineConfig(kv_cache_tokens=65_536))
    with ServerThread(
        engine_in_thread(make_model(65_536), config), make_served_tokenizer(), config, model_name="tiny"
    ) as running:
        yield running


class FailingConstraint:
    """Allows everything for a while."""

    def __init__(self, error: Exception) -> None:
        self._error, self._left = error, 3

    def allowed(self) -> torch.Tensor:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return torch.ones(336, dtype=torch.bool)

    def advance(self, token_id: int) -> None:
        pass


def test_a_constraint_that_fails_ends_its_own_sequence_alone():
    from modelwright.core.config import ConfigError

    engine = Engine(make_model(), EngineConfig())
    params = SamplingParams(max_tokens=6, temperature=0)
    engine.add("bad", [5, 6], params, FailingConstraint(ConfigError("too complex")))
    engine.add("good", [5, 6], params)
    reasons: dict[str, list[str]] = {"bad": [], "good": []}
    while engine.has_work:
        for output in engine.step():
            reasons[output.request_id].append(output.finish_reason)
    assert reasons == {"bad": ["", "", "", "constraint"], "good": ["", "", "", "", "", "length"]}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_constrained_answers_do_not_depend_on_the_load(server: ServerThread):
    schema = json_format({"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]})

    def one(seed: int) -> str:
        return content(ask(server, http, response_format=schema, seed=seed, max_tokens=20))[0]

    with httpx.Client() as http, ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, range(8)))
        assert together == [one(seed) for seed in range(8)]
    assert len(set(together)) > 3


WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1,
    "maximum": 9}}, "required": ["city", "days"], "additionalProperties": False}}}  # fmt: skip
PICK = {"type": "function", "function": {"name": "pick", "parameters": {
    "$defs": {"color": {"enum": ["red", "blue"]}}, "type": "object", "properties": {"color": {"$ref": "#/$defs/color"}},
    "required": ["color"], "additionalProperties": False}}}  # fmt: skip


@pytest.fixture
def tool_client(deep_server: ServerThread) -> Iterator[Callable[..., Any]]:
    client = OpenAI(base_url=f"{deep_server.url}/v1", api_key="unused", max_retries=0, timeout=60)

    def call(**fields: Any) -> Any:
        options = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER, PICK], "max_tokens": 120} | fields
        return client.chat.completions.create(**options)

    with client:
        yield call


def check_call(name: str, arguments: str) -> None:
    tool = WEATHER if name == "weather" else PICK
    jsonschema.validate(json.loads(arguments), tool["function"]["parameters"])


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "pick"}}], ids=["any", "pick"]
)
def test_forced_calls_are_valid_whole_and_streamed(tool_client, choice):
    names = set()
    for seed in range(3):
        answer = tool_client(tool_choice=choice, seed=seed, parallel_tool_calls=False).choices[0]
        (call,) = answer.message.tool_calls
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        check_call(call.function.name, call.function.arguments)
        names.add(call.function.name)
        name, arguments, ids = "", "", set()
        for event in tool_client(tool_choice=choice, seed=seed, parallel_tool_calls=False, stream=True):
            for part in event.choices[0].delta.tool_calls or []:
                ids |= {part.id} - {None}
                name += part.function.name or ""
                arguments += part.function.arguments or ""
        assert (name, arguments) == (call.function.name, call.function.arguments)
        assert len(ids) == 1
    assert names <= ({"weather", "pick"} if choice == "required" else {"pick"})


def test_calls_and_results_are_part_of_a_conversation(tool_client):
    answer = tool_client(tool_choice="required").choices[0].message
    turns = [*QUESTION, answer.model_dump(), {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "12"}]
    assert tool_client(messages=turns, tool_choice="none").choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="not among"):
        tool_client(tool_choice={"type": "function", "function": {"name": "x"}})
    with pytest.raises(openai.BadRequestError, match="there are no tools"):
        tool_client(tools=[], tool_choice="required")
