"""The OpenAPI description of the server, from the list of routes and the models that validate requests. Replies in
OpenAI's form have the schemas of OpenAI's own client.
"""

import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

REFERENCE = "#/components/schemas/{model}"

EVENT_SCHEMA = {
    "type": "object",
    "description": "Each server-sent event.",
    "properties": {
        "data": {"type": "string", "description": "JSON in the form of x-event-schema; of the last event [DONE]."}
    },
    "required": ["data"],
}

REASONS = {
    400: "The request is not understood or asks for something that this server lacks",
    401: "The API key is missing or wrong",
    403: "The API key may not do this",
    404: "There is no such model, answer or test",
    409: "Another reload, test or change of adapters is under way, or the name is taken",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "A limit of the key is reached or the queue is full; Retry-After says when to try again",
    500: "The engine or the model has failed",
    503: "The server is draining, starting or broken",
}


class ErrorDetail(BaseModel):
    """An error. `param` names the field of the request; `code` is stable and meant for programs."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every reply with a status of 400 or more, and the last event of a stream that failed."""

    error: ErrorDetail


@dataclass(frozen=True)
class Operation:
    """A route. body: model of its body, None without a body; reply: model of its reply, name of one of OpenAI's models,
    or, with a slash, media type; errors: statuses that a client has to expect in addition to 200.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    reply: type[BaseModel] | str
    body: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    event: str = ""
    """Name of the schema of a stream's events; "" for a route that cannot stream."""

    @property
    def name(self) -> str:
        return self.handler.__name__


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """Returns the OpenAPI document."""
    bodies = {operation.body for operation in operations if operation.body}
    # sorted, because sets of classes have another order in each process
    modes: list[Any] = [(model, "validation") for model in sorted(bodies, key=lambda model: model.__name__)]
    own = {operation.reply for operation in operations if not isinstance(operation.reply, str)}
    replies = [*reply_models().values(), *sorted(own, key=lambda model: model.__name__)]
    modes += [(model, "serialization") for model in replies]
    _, definitions = models_json_schema(modes, ref_template=REFERENCE)
    schemas = definitions["$defs"]
    # The models of OpenAI's client are stricter than the API: the first token of an echoed prompt has no
    # log-probability, events before the last have no finish reason, and embeddings may be base64.
    logprobs = schemas["Logprobs"]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        for choice in logprobs[name]["anyOf"]:
            if "items" in choice:
                choice["items"] = {"anyOf": [choice["items"], {"type": "null"}]}
    for model, name, other in (("CompletionChoice", "finish_reason", "null"), ("Embedding", "embedding", "string")):
        properties = schemas[model]["properties"]
        properties[name] = {"anyOf": [properties[name], {"type": other}]}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        # the document has no converters such as {name:path}
        entry = paths.setdefault(re.sub(r":\w+}", "}", operation.path), {})
        entry[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Modelwright", "version": version("modelwright")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


@functools.cache
def reply_models() -> dict[str, type[BaseModel]]:
    """Returns the replies that several routes have, by name."""
    # imported here, because the import of OpenAI's client takes a second
    from openai.types import Completion, CreateEmbeddingResponse
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    models = (Completion, ChatCompletion, ChatCompletionChunk, CreateEmbeddingResponse, ErrorReply)
    return {model.__name__: model for model in models}


def _operation(operation: Operation) -> dict[str, Any]:
    reply = operation.reply if isinstance(operation.reply, str) else operation.reply.__name__
    success: dict[str, Any] = {reply: {}} if "/" in reply else {"application/json": {"schema": _reference(reply)}}
    if operation.event and "/" not in reply:
        event = {"anyOf": [_reference(operation.event), _reference("ErrorReply"), {"const": "[DONE]"}]}
        success["text/event-stream"] = {"schema": EVENT_SCHEMA, "x-event-schema": event}
    responses: dict[str, Any] = {"200": {"description": operation.summary, "content": success}}
    for status in operation.errors:
        headers = {"Retry-After": {"schema": {"type": "integer"}}} if status in (429, 503) else {}
        content = {"application/json": {"schema": _reference("ErrorReply")}}
        responses[str(status)] = {"description": REASONS[status], "headers": headers, "content": content}
    entry = {"operationId": operation.name, "summary": operation.summary, "responses": responses}
    if operation.body:
        content = {"application/json": {"schema": _reference(operation.body.__name__)}}
        entry["requestBody"] = {"required": True, "content": content}
    # a route that can answer 401 asks for a key
    if 401 in operation.errors:
        entry["security"] = [{"key": []}]
    if names := re.findall(r"{(\w+)", operation.path):
        entry["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return entry


def _reference(name: str) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=name)}
