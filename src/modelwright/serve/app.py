"""The ASGI application: routes, authorization, limits, errors, streams."""

import asyncio
import hmac
import importlib.resources
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelwright.serve import chat, completions
from modelwright.serve.config import ServeConfig
from modelwright.serve.errors import ApiError, error_body, shutting_down
from modelwright.serve.expectation import expectation
from modelwright.serve.generation import Generation, start
from modelwright.serve.limits import Limits
from modelwright.serve.load import ModelSource
from modelwright.serve.metrics import Metrics
from modelwright.serve.protocol import ChatRequest, CompletionRequest, parse_request
from modelwright.serve.tokenizer import Codec
from modelwright.serve.worker import RETRY_AFTER_S, EngineWorker

log = logging.getLogger("modelwright.serve")

T = TypeVar("T")

COMPLETION_DEFAULT_TOKENS = 16
"""What OpenAI's completions generate when `max_tokens` is left out; chat fills the context instead."""

INLINE_BODY_BYTES = 16_384
"""Smaller bodies are read in less time than it takes to hand them to another thread and back."""

DISCARD_PAUSE_S = 0.01
"""Between two reads (of up to 256 KiB each) of a body that is too large."""

PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


@dataclass
class Service:
    """State shared by the routes. `source`: where the model comes from, None for one that exists in memory only."""

    config: ServeConfig
    model_name: str
    worker: EngineWorker
    codec: Codec
    metrics: Metrics
    limits: Limits
    api_key: str = field(default="", repr=False)
    source: ModelSource | None = None
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


def build_app(service: Service) -> ASGIApp:
    """The application around a started worker."""
    routes = [
        Route("/", _page, methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
        Route("/metrics", _metrics, methods=["GET"]),
        Route("/v1/models", _models, methods=["GET"]),
        Route("/v1/models/{name:path}", _model, methods=["GET"]),
        Route("/v1/completions", _completions, methods=["POST"]),
        Route("/v1/chat/completions", _chat_completions, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, Exception: _bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.service = service
    return _observed(app, service)


def _observed(app: ASGIApp, service: Service) -> ASGIApp:
    """Counts and logs every HTTP request by route and status; bodies, headers and query strings are not logged."""

    async def observed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        started, status = time.perf_counter(), 499

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, sending)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD") else "other"
            service.metrics.requests.labels(route, method, str(status)).inc()
            log.info("%s %s %d %.3fs", method, route, status, time.perf_counter() - started)

    return observed


def _service(request: Request) -> Service:
    return request.app.state.service


async def _page(request: Request) -> Response:
    page = importlib.resources.files("modelwright.serve") / "static" / "chat.html"
    headers = {"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(page.read_text(encoding="utf-8"), headers=headers)


async def _health(request: Request) -> Response:
    service = _service(request)
    state = "failed" if service.worker.failed else "draining" if service.is_draining else "ok"
    body = {"status": state, "model": service.model_name, "open_answers": service.worker.num_open}
    return JSONResponse(body, status_code=200 if state == "ok" else 503)


async def _metrics(request: Request) -> Response:
    return Response(_service(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _models(request: Request) -> Response:
    service = _service(request)
    _authorise(request, service)
    return JSONResponse({"object": "list", "data": [_describe(service)]})


async def _model(request: Request) -> Response:
    service = _service(request)
    _authorise(request, service)
    _require_model(service, request.path_params["name"])
    return JSONResponse(_describe(service))


def _describe(service: Service) -> dict[str, Any]:
    """An entry of /v1/models; `root` (as vLLM has it), `stage` and `digest` say which model it is, `description`
    what to expect of it.
    """
    source = service.source
    origin = {"root": str(source.folder), "stage": source.stage, "digest": source.digest} if source else {}
    return origin | {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "modelwright",
        "max_model_len": service.worker.engine.max_seq_len,
        "description": expectation(service.worker.engine.num_parameters),
    }


async def _completions(request: Request) -> Response:
    service = _service(request)
    body = await _admit(request, service, num_prompts=service.config.max_completions)
    requested, prompts = await _read(_read_completion, body, service)
    generation = start(
        requested,
        prompts,
        worker=service.worker,
        codec=service.codec,
        model=service.model_name,
        kind="cmpl",
        max_tokens=requested.max_tokens,
        default_max_tokens=COMPLETION_DEFAULT_TOKENS,
        num_logprobs=requested.logprobs or 0,
        max_choices=service.config.max_completions,
    )
    return await _respond(request, generation, completions)


async def _chat_completions(request: Request) -> Response:
    service = _service(request)
    body = await _admit(request, service, num_prompts=1)
    requested, prompt = await _read(_read_chat, body, service)
    generation = start(
        requested,
        [prompt],
        worker=service.worker,
        codec=service.codec,
        model=service.model_name,
        kind="chatcmpl",
        max_tokens=requested.max_completion_tokens or requested.max_tokens,
        default_max_tokens=service.worker.engine.max_seq_len,
        num_logprobs=requested.top_logprobs or 0,
        max_choices=service.config.max_completions,
    )
    return await _respond(request, generation, chat)


def _read_completion(body: bytes, service: Service) -> tuple[CompletionRequest, list[list[int]]]:
    """A request and the token ids of its prompts."""
    requested = parse_request(CompletionRequest, body, service.limits)
    _require_model(service, requested.model)
    prompts = [service.codec.encode(p) if isinstance(p, str) else _known_ids(p, service) for p in requested.prompts]
    if not prompts or not all(prompts):
        raise ApiError(400, "The prompt is empty; give at least one token.", param="prompt", code="invalid_value")
    return requested, prompts


def _read_chat(body: bytes, service: Service) -> tuple[ChatRequest, list[int]]:
    """A request and the token ids of its conversation."""
    requested = parse_request(ChatRequest, body, service.limits)
    _require_model(service, requested.model)
    if requested.top_logprobs and not requested.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs", code="invalid_value")
    return requested, service.codec.encode_chat([message.plain() for message in requested.messages])


async def _read(read: Callable[[bytes, Service], T], body: bytes, service: Service) -> T:
    """`read`, in another thread if the body is large, so that streams continue meanwhile."""
    if len(body) <= INLINE_BODY_BYTES:
        return read(body, service)
    result = await asyncio.to_thread(read, body, service)
    _require_open(service)
    return result


async def _admit(request: Request, service: Service, *, num_prompts: int) -> bytes:
    """Checks that all generation requests pass first: key, capacity, body. Raises `ApiError`."""
    _authorise(request, service)
    _require_open(service)
    service.worker.require_room(1)
    return await _read_body(request, service, num_prompts)


def _require_open(service: Service) -> None:
    if service.is_draining:
        raise shutting_down("The server is shutting down; try another one or try again later.", RETRY_AFTER_S)


def _authorise(request: Request, service: Service) -> None:
    if not service.api_key:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    matches = hmac.compare_digest(key.strip().encode(), service.api_key.encode())
    if scheme.lower() != "bearer" or not matches:
        raise ApiError(401, "Missing or wrong API key.", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def _read_body(request: Request, service: Service, num_prompts: int) -> bytes:
    """The body, up to the size limit."""
    config, most = service.config, service.limits.body_bytes(num_prompts)
    length = request.headers.get("content-length", "0")
    is_too_large = length.isdigit() and int(length) > most
    body = bytearray()
    try:
        async with asyncio.timeout(config.body_timeout_s):
            parts = request.stream()
            while not is_too_large and (part := await anext(parts, None)) is not None:
                body += part
                is_too_large = len(body) > most
            if is_too_large:
                await _discard(parts)
                raise service.limits.body_too_large(num_prompts)
    except TimeoutError:
        if is_too_large:
            raise service.limits.body_too_large(num_prompts) from None
        raise ApiError(408, f"The body did not arrive within {config.body_timeout_s:g} s.", code="timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "The client left before the body had arrived.") from None
    return bytes(body)


async def _discard(parts: AsyncIterator[bytes]) -> None:
    """Read the rest of a rejected body, so that the client receives the answer and not a broken connection; slowly,
    because every read takes time from the streams.
    """
    async for _ in parts:
        await asyncio.sleep(DISCARD_PAUSE_S)


def _require_model(service: Service, name: str) -> None:
    if name != service.model_name:
        text = f"The model {name!r} does not exist; this server has {service.model_name!r}."
        raise ApiError(404, text, param="model", code="model_not_found")


def _known_ids(ids: list[int], service: Service) -> list[int]:
    size = service.worker.engine.vocab_size
    if any(not 0 <= token < size for token in ids):
        raise ApiError(400, f"Token ids must be between 0 and {size - 1}.", param="prompt", code="invalid_value")
    return ids


async def _respond(request: Request, generation: Generation, form: Any) -> Response:
    if generation.request.stream:
        events = _events(generation, form)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    await _unless_disconnected(request, generation)
    return JSONResponse(form.full(generation))


async def _unless_disconnected(request: Request, generation: Generation) -> None:
    """Wait for the answers; abort them if the client disconnects."""
    working = asyncio.ensure_future(generation.complete())
    leaving = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client left before the answer was ready.", code="client_closed_request")
        working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        generation.stream.close()


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _events(generation: Generation, form: Any) -> AsyncIterator[bytes]:
    """Server-sent events; an error after the start is an event too, because the status has already been sent."""
    extra = {"usage": None} if generation.request.wants_usage_chunk else {}
    try:
        for body in form.opening(generation):
            yield _event(body | extra)
        async for index, piece in generation.pieces():
            if piece.text or piece.tokens or piece.finish_reason:
                yield _event(form.chunk(generation, index, piece) | extra)
        if generation.request.wants_usage_chunk:
            yield _event(form.usage_chunk(generation))
    except ApiError as error:
        yield _event(error.body())
    finally:
        generation.stream.close()
    yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n\n"


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    allowed = (error.headers or {}).get("Allow", "")
    reasons = {
        404: f"There is nothing at {request.url.path[:80]}. This server has {_addresses(request.app.routes)}.",
        405: f"Method {request.method} is not allowed here; use {allowed}.",
    }
    message = reasons.get(error.status_code, str(error.detail))
    return JSONResponse(error_body(error.status_code, message), status_code=error.status_code, headers=error.headers)


def _addresses(routes: Sequence[BaseRoute]) -> str:
    """`GET /health, POST /v1/completions, ...`"""
    known = [(route, methods) for route in routes if isinstance(route, Route) and (methods := route.methods)]
    return ", ".join(f"{min(methods - {'HEAD'})} {route.path.replace(':path', '')}" for route, methods in known)


async def _bug(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(500, "The server made an error; see its log."), status_code=500)
