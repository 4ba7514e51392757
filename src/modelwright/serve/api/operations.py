"""The list of all routes, with those of other packages, from which the application and /openapi.json are made.

Replies in OpenAI's form have the schemas of OpenAI's own client.
"""

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path

from modelwright.core.config import ConfigError
from modelwright.core.extensions import NoSettings, configured, installed
from modelwright.serve.ab.experiment import EndRequest, ExperimentRequest, ShareRequest
from modelwright.serve.api import admin, chat, completions, encode, pages
from modelwright.serve.keys import KeyScope
from modelwright.serve.service import FeedbackRequest, Service, service_of

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
    event: type[BaseModel] | str = ""
    """Model, or name of one of OpenAI's models, of a stream's events; "" for a route that cannot stream."""
    prepare: Callable[[Service, Any], None] | None = None
    """Called once before the server starts, with `settings`; may raise `ConfigError` and add to the service."""
    settings: Any = None
    """Settings of the route of another package."""
    needs_engine: bool = False
    """True if its requests are refused before they are routed while the engines have no room for an answer. The route
    needs the scope `infer`, and calls `admit`."""

    @property
    def name(self) -> str:
        return self.handler.__name__

    @property
    def own_models(self) -> list[type[BaseModel]]:
        """Models of its body, reply and events, without those of OpenAI's client."""
        return [one for one in (self.body, self.reply, self.event) if one and not isinstance(one, str)]


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """Returns the OpenAPI document."""
    bodies = {operation.body for operation in operations if operation.body}
    # sorted, because sets of classes have another order in each process
    modes: list[Any] = [(model, "validation") for model in sorted(bodies, key=lambda model: model.__name__)]
    own = {model for one in operations for model in one.own_models if model is not one.body}
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
        path = paths.setdefault(re.sub(r":\w+}", "}", operation.path), {})
        reply = operation.reply if isinstance(operation.reply, str) else operation.reply.__name__
        success: dict[str, Any] = {reply: {}} if "/" in reply else {"application/json": {"schema": _reference(reply)}}
        if operation.event and "/" not in reply:
            name = operation.event if isinstance(operation.event, str) else operation.event.__name__
            event = {"anyOf": [_reference(name), _reference("ErrorReply"), {"const": "[DONE]"}]}
            success["text/event-stream"] = {"schema": EVENT_SCHEMA, "x-event-schema": event}
        responses: dict[str, Any] = {"200": {"description": operation.summary, "content": success}}
        for status in operation.errors:
            headers = {"Retry-After": {"schema": {"type": "integer"}}} if status in (429, 503) else {}
            content = {"application/json": {"schema": _reference("ErrorReply")}}
            responses[str(status)] = {"description": REASONS[status], "headers": headers, "content": content}
        entry = path[operation.method.lower()] = {
            "operationId": operation.name,
            "summary": operation.summary,
            "responses": responses,
        }
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
    return {
        "openapi": "3.1.0",
        "info": {"title": "Modelwright", "version": version("modelwright")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


@functools.cache
def reply_models() -> dict[str, type[BaseModel]]:
    """Returns the replies that several routes have, by name."""
    # imported here, because the import of OpenAI's client takes a second
    from openai.types import Completion, CreateEmbeddingResponse
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    models = (
        *(Completion, ChatCompletion, ChatCompletionChunk, CreateEmbeddingResponse),
        ErrorReply,
    )
    return {model.__name__: model for model in models}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=name)}


GENERATES = (400, 401, 403, 404, 408, 413, 429, 500, 503)
"""Error statuses of routes that need the engine."""
READS_BODY = (400, 401, 403, 404, 408, 413, 429)
"""Error statuses of routes that read a body and do not need the engine."""
ADMINISTERS = (400, 401, 403, 408, 409, 413, 429)
"""Error statuses of routes that reload the model or change its adapters."""
NEEDS_KEY = (401, 403, 429)
"""Error statuses of routes that ask for a key and do not read a body."""
TESTS = (400, 401, 403, 404, 408, 409, 413, 429, 503)
"""Error statuses of routes that change A/B tests."""


async def openapi(request: Request) -> Response:
    """Returns the OpenAPI description of this application's routes."""
    # in another thread, because the first call imports OpenAI's client, which takes a second
    return JSONResponse(await asyncio.to_thread(describe, request.app.state.operations))


_get, _post = partial(Operation, "GET"), partial(Operation, "POST")

# Starlette takes the first match, so a path with a parameter comes after the paths that it would hide.
OPERATIONS = (
    _get("/", pages.chat_page, "The chat page", "text/html"),
    _get("/live", pages.live_page, "Load, latencies and cache as they change", "text/html"),
    _get("/pages.css", pages.page_style, "The style that pages share", "text/css"),
    _get("/health", pages.health, "Whether the server takes requests", pages.HealthReply, errors=(503,)),
    _get("/livez", pages.livez, "Whether the server needs no restart", "application/json", errors=(503,)),
    _get("/readyz", pages.readyz, "Whether new requests are taken", "application/json", errors=(503,)),
    _get("/grafana.json", pages.grafana_dashboard, "A dashboard for Grafana", "application/json"),
    _get("/metrics", pages.metrics, "Metrics for Prometheus", "text/plain", errors=NEEDS_KEY),
    _get("/openapi.json", openapi, "This description", "application/json"),
    _get("/v1/models", pages.list_models, "The names of the model", pages.ModelListReply, errors=NEEDS_KEY),
    _get("/v1/models/{name:path}", pages.get_model, "One name", pages.ModelReply, errors=(404, *NEEDS_KEY)),
    _post(
        "/v1/completions",
        completions.create_completion,
        "Continue texts",
        "Completion",
        completions.CompletionRequest,
        GENERATES,
        event="Completion",
        needs_engine=True,
    ),
    _post(
        "/v1/chat/completions",
        chat.create_chat_completion,
        "Answer in a conversation",
        "ChatCompletion",
        chat.ChatRequest,
        GENERATES,
        event="ChatCompletionChunk",
        needs_engine=True,
    ),
    _post(
        "/v1/embeddings",
        encode.create_embeddings,
        "Embed texts",
        "CreateEmbeddingResponse",
        encode.EmbeddingRequest,
        GENERATES,
        needs_engine=True,
    ),
    _post(
        "/v1/score",
        encode.create_score,
        "Score pairs of texts",
        encode.ScoreReply,
        encode.ScoreRequest,
        GENERATES,
        needs_engine=True,
    ),
    _post(
        "/v1/rerank",
        encode.rerank,
        "Order documents by score",
        encode.RerankReply,
        encode.RerankRequest,
        GENERATES,
        needs_engine=True,
    ),
    _post(
        "/v1/feedback",
        admin.give_feedback,
        "Say how good an answer was",
        admin.FeedbackReply,
        FeedbackRequest,
        (400, 401, 403, 404, 408, 413, 429, 503),
    ),
    _post(
        "/admin/reload",
        admin.reload_model,
        "Put another version of the model in service",
        admin.ReloadReply,
        admin.ReloadRequest,
        ADMINISTERS,
    ),
    _post(
        "/v1/load_lora_adapter",
        admin.load_lora_adapter,
        "Let requests ask for an adapter",
        "text/plain",
        admin.LoadAdapterRequest,
        (*ADMINISTERS, 503),
    ),
    _post(
        "/v1/unload_lora_adapter",
        admin.unload_lora_adapter,
        "Let no request ask for an adapter any more",
        "text/plain",
        admin.UnloadAdapterRequest,
        (*ADMINISTERS, 404, 503),
    ),
    _get("/ab", pages.ab_page, "A/B tests as they stand", "text/html"),
    _get("/ab.json", admin.list_tests, "All A/B tests", "application/json", errors=NEEDS_KEY),
    _post("/admin/ab", admin.begin_test, "Begin an A/B test", "application/json", ExperimentRequest, TESTS),
    _post("/admin/ab/share", admin.set_test_share, "Change B's share", "application/json", ShareRequest, TESTS),
    _post("/admin/ab/end", admin.end_test, "End the A/B test", "application/json", EndRequest, TESTS),
    _post("/tokenize", encode.tokenize, "Text to tokens", encode.TokenizeReply, encode.TokenizeRequest, READS_BODY),
    _post(
        "/detokenize", encode.detokenize, "Tokens to text", encode.DetokenizeReply, encode.DetokenizeRequest, READS_BODY
    ),
)

ROUTES_GROUP = "modelwright.routes"
"""Group of the entry points of other packages, each a `RouteSpec`."""
EXTRAS = {"/v1/responses": "agents"}
"""Routes of this project's other packages, and the extra that installs each."""


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """A route of another package."""

    operation: Operation
    """The route. /openapi.json names it after the entry point."""
    scope: KeyScope | None = "admin"
    """Scope that a key needs, which the server checks before it calls the handler; None for a public route."""
    config: type = NoSettings
    """Dataclass of its settings in `serve.routes`, which the operation's `prepare` receives."""


def all_operations(routes: Mapping[str, Any]) -> tuple[Operation, ...]:
    """Returns the routes of this package, then those of installed ones with their settings. routes: settings by entry
    point. Raises `ConfigError` as `installed` and `configured` do, and for a route that an earlier one hides, whose
    schemas have names that are taken, or that needs the engines and not the scope `infer`.
    """
    result, names = list(OPERATIONS), tuple(one.name for one in OPERATIONS)
    settings = {name: value for name, (_, value) in configured(ROUTES_GROUP, RouteSpec, routes, "routes").items()}
    for name, route in installed(ROUTES_GROUP, RouteSpec, taken=names).items():
        added, where = route.operation, f"entry point {name} of {ROUTES_GROUP}"
        for one in result:
            if one.method == added.method and compile_path(one.path)[0].match(added.path):
                raise ConfigError(f"{where}: {added.method} {added.path} is answered by {one.method} {one.path}")
        models = [model for one in result for model in one.own_models]
        by_name = {model.__name__: model for model in (*models, *reply_models().values())}
        for model in added.own_models:
            if by_name.get(model.__name__, model) is not model:
                raise ConfigError(f"{where}: the name of its schema {model.__name__} is taken; choose another one")
        if isinstance(added.reply, str) and "/" not in added.reply and added.reply not in reply_models():
            text = f"{where}: its reply {added.reply!r} is not a media type"
            raise ConfigError(f"{text}; give a model or, say, text/plain")
        if added.needs_engine and route.scope != "infer":  # which the server checks where it refuses early
            raise ConfigError(f"{where}: needs_engine is for routes of the scope 'infer', not {route.scope!r}")
        errors = tuple(sorted({*added.errors, *(NEEDS_KEY if route.scope else ())}))
        handler, config = _checked(name, added.handler, route.scope), settings.get(name, route.config())
        result.append(replace(added, handler=handler, errors=errors, settings=config))
    return tuple(result)


def _checked(
    name: str, handler: Callable[[Request], Awaitable[Response]], scope: KeyScope | None
) -> Callable[[Request], Awaitable[Response]]:
    """Returns a handler that checks the key before it calls the one of another package."""

    async def checked(request: Request) -> Response:
        if scope:
            service_of(request).caller(request, scope)
        return await handler(request)

    checked.__name__ = name
    return checked
