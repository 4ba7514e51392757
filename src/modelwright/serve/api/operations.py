"""The list of all routes, with those of other packages, from which the application and /openapi.json are made."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path

from modelwright.core.errors import ConfigError
from modelwright.core.extensions import installed
from modelwright.serve.ab import experiment, routes
from modelwright.serve.account.exchange import FeedbackRequest
from modelwright.serve.api import admin, chat, completions, feedback, pages, pooled, tokens
from modelwright.serve.api.openapi import Operation, describe, reply_models
from modelwright.serve.keys import KeyScope
from modelwright.serve.service import service_of

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
    _get("/livez", pages.livez, "Whether the server needs no restart", pages.LiveReply, errors=(503,)),
    _get("/readyz", pages.readyz, "Whether new requests are taken", pages.ReadyReply, errors=(503,)),
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
    ),
    _post(
        "/v1/chat/completions",
        chat.create_chat_completion,
        "Answer in a conversation",
        "ChatCompletion",
        chat.ChatRequest,
        GENERATES,
        event="ChatCompletionChunk",
    ),
    _post(
        "/v1/embeddings",
        pooled.create_embeddings,
        "Embed texts",
        "CreateEmbeddingResponse",
        pooled.EmbeddingRequest,
        GENERATES,
    ),
    _post("/v1/score", pooled.create_score, "Score pairs of texts", pooled.ScoreReply, pooled.ScoreRequest, GENERATES),
    _post("/v1/rerank", pooled.rerank, "Order documents by score", pooled.RerankReply, pooled.RerankRequest, GENERATES),
    _post(
        "/v1/feedback",
        feedback.give_feedback,
        "Say how good an answer was",
        feedback.FeedbackReply,
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
    _get("/ab.json", routes.list_tests, "All A/B tests", routes.ExperimentListReply, errors=NEEDS_KEY),
    _post(
        "/admin/ab", routes.begin_test, "Begin an A/B test", routes.ExperimentReply, experiment.ExperimentRequest, TESTS
    ),
    _post(
        "/admin/ab/share",
        routes.set_test_share,
        "Change B's share",
        routes.ExperimentReply,
        experiment.ShareRequest,
        TESTS,
    ),
    _post("/admin/ab/end", routes.end_test, "End the A/B test", routes.ExperimentReply, experiment.EndRequest, TESTS),
    _post("/tokenize", tokens.tokenize, "Text to tokens", tokens.TokenizeReply, tokens.TokenizeRequest, READS_BODY),
    _post(
        "/detokenize", tokens.detokenize, "Tokens to text", tokens.DetokenizeReply, tokens.DetokenizeRequest, READS_BODY
    ),
)

ROUTES_GROUP = "modelwright.routes"
"""Group of the entry points of other packages, each a `RouteSpec`."""


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """A route of another package."""

    operation: Operation
    """The route. /openapi.json names it after the entry point."""
    scope: KeyScope | None = "admin"
    """Scope that a key needs, which the server checks before it calls the handler; None for a public route."""


def all_operations() -> tuple[Operation, ...]:
    """Returns the routes of this package, then those of installed ones. Raises `ConfigError` as `installed` does, and
    for a route that an earlier one hides or whose schemas have names that are taken.
    """
    result, names = list(OPERATIONS), tuple(one.name for one in OPERATIONS)
    for name, route in installed(ROUTES_GROUP, RouteSpec, taken=names).items():
        added, where = route.operation, f"entry point {name} of {ROUTES_GROUP}"
        for one in result:
            if one.method == added.method and compile_path(one.path)[0].match(added.path):
                raise ConfigError(f"{where}: {added.method} {added.path} is answered by {one.method} {one.path}")
        models = [model for one in result for model in (one.body, one.reply) if isinstance(model, type)]
        by_name = {model.__name__: model for model in (*models, *reply_models().values())}
        for model in (added.body, added.reply):
            if isinstance(model, type) and by_name.get(model.__name__, model) is not model:
                raise ConfigError(f"{where}: the name of its schema {model.__name__} is taken; choose another one")
        if isinstance(added.reply, str) and "/" not in added.reply and added.reply not in reply_models():
            text = f"{where}: its reply {added.reply!r} is not a media type"
            raise ConfigError(f"{text}; give a model or, say, text/plain")
        errors = tuple(sorted({*added.errors, *(NEEDS_KEY if route.scope else ())}))
        result.append(replace(added, handler=_checked(name, added.handler, route.scope), errors=errors))
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
