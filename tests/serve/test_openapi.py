"""The OpenAPI description against what the server does."""

import functools

import httpx
import jsonschema
import pytest

from modelwright.serve.server import ServerThread

QUESTION = [{"role": "user", "content": "what does this do?"}]


@pytest.fixture(scope="module")
def document(server: ServerThread) -> dict:
    return httpx.get(f"{server.url}/openapi.json", timeout=60).json()


def resolved(document: dict, schema: dict) -> dict:
    """A schema that stands alone."""
    return {**schema, "components": document["components"]}


def operation(document: dict, method: str, path: str) -> dict:
    return document["paths"][path][method]


def test_every_route_is_described_and_every_reference_exists(document: dict):
    operations = [entry for path in document["paths"].values() for entry in path.values()]
    assert len(operations) >= 11
    assert len({entry["operationId"] for entry in operations}) == len(operations)

    def references(node: object) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [one for value in node.values() for one in references(value)]
        return [one for entry in node for one in references(entry)] if isinstance(node, list) else []

    for reference in references(document):
        functools.reduce(lambda node, key: node[key], reference.removeprefix("#/").split("/"), document)
    for entry in operations:
        for status, response in entry["responses"].items():
            if int(status) >= 400:
                schema = response["content"]["application/json"]["schema"]
                assert schema["$ref"] == "#/components/schemas/ErrorReply"


REQUESTS = [
    ("get", "/health", None),
    ("get", "/v1/models", None),
    (
        "post",
        "/v1/completions",
        {"model": "tiny", "prompt": ["the", "a"], "max_tokens": 3, "logprobs": 2, "echo": True},
    ),
    ("post", "/v1/completions", {"model": "tiny", "prompt": [1, 5, 70], "max_tokens": 3, "logit_bias": {"5": -1}}),
    ("post", "/v1/chat/completions", {"model": "tiny", "messages": QUESTION, "max_tokens": 3, "logprobs": True}),
    ("post", "/v1/embeddings", {"model": "tiny", "input": "the quick"}),
    ("post", "/tokenize", {"prompt": "the quick"}),
    ("post", "/detokenize", {"tokens": [70, 71]}),
]


@pytest.mark.parametrize(
    ("method", "path", "body"), REQUESTS, ids=[f"{path}-{i}" for i, (_, path, _) in enumerate(REQUESTS)]
)
def test_requests_and_replies_match_their_schemas(server: ServerThread, document: dict, method, path, body):
    entry = operation(document, method, path)
    if body is not None:
        schema = entry["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.validate(body, resolved(document, schema))
    response = httpx.request(method.upper(), server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    schema = entry["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(response.json(), resolved(document, schema))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_events_and_errors_match_their_schemas(server: ServerThread, document: dict, path: str):
    entry = operation(document, "post", path)
    body = {"model": "tiny", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"prompt": "the"} if path == "/v1/completions" else {"messages": QUESTION}
    schema = resolved(document, entry["responses"]["200"]["content"]["text/event-stream"]["x-event-schema"])
    events = httpx.post(server.url + path, json=body, timeout=60).text.strip().split("\n\n")
    for event in events[:-1]:
        jsonschema.validate(httpx.Response(200, text=event[6:]).json(), schema)
    jsonschema.validate("[DONE]", schema)
    wrong = httpx.post(server.url + path, json=body | {"temperature": 9}, timeout=60)
    error = entry["responses"]["400"]["content"]["application/json"]["schema"]
    jsonschema.validate(wrong.json(), resolved(document, error))
    request = resolved(document, entry["requestBody"]["content"]["application/json"]["schema"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body | {"temperature": 9}, request)
