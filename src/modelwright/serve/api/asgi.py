"""The ASGI application: routes, a log line for each request, and errors in OpenAI's form."""

import logging
import time
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelwright.serve.ab.controller import Experiments
from modelwright.serve.account.logs import ID_HEADER, ID_SCOPE, request_id, with_fields
from modelwright.serve.account.tracing import Tracing
from modelwright.serve.api.operations import all_operations
from modelwright.serve.errors import ApiError, error_body
from modelwright.serve.reload import Reloader
from modelwright.serve.service import VERSION_HEADER, Service

log = logging.getLogger("modelwright.serve")

EXPOSED_HEADERS = (ID_HEADER, VERSION_HEADER, "Retry-After", "WWW-Authenticate")
"""Response headers that scripts of other origins may read; browsers hide all others."""


def build_app(
    service: Service, reloader: Reloader, experiments: Experiments | None, tracing: Tracing | None
) -> ASGIApp:
    """Builds the application around a started worker. experiments, tracing: None for a server without them."""
    operations = all_operations()
    routes = [_TracedRoute(one.path, one.handler, methods=[one.method]) for one in operations]
    handlers: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, Exception: _bug}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.service = service
    app.state.reloader = reloader
    app.state.experiments = experiments
    app.state.operations = operations
    inner: ASGIApp = app
    if service.config.cors_origins:
        # any header is allowed, because OpenAI's client sends a dozen extra ones (`x-stainless-*`); cookies are not
        inner = CORSMiddleware(
            app,
            allow_origins=service.config.cors_origins,
            allow_methods=sorted({operation.method for operation in operations}),
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return _observed(tracing.around(inner) if tracing else inner, service)


class _TracedRoute(Route):
    """A route that adds itself to the scope of its requests. Older versions of Starlette add only the endpoint."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, matched = super().matches(scope)
        return match, matched if match == Match.NONE else {**matched, "route": self}


def _observed(app: ASGIApp, service: Service) -> ASGIApp:
    """Counts and logs every HTTP request by route and status. Bodies, headers and query strings are not logged."""

    async def observed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        started, status = time.perf_counter(), 499  # nginx's status for a client that left before any reply
        scope[ID_SCOPE] = name = request_id(Headers(scope=scope))

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = name
            await send(message)

        try:
            await app(scope, receive, sending)
        finally:
            # the route's pattern and a few methods, because each label value is a time series in Prometheus
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD") else "other"
            service.metrics.http.requests.labels(route, method, str(status)).inc()
            seconds = round(time.perf_counter() - started, 6)
            fields = with_fields(request_id=name, method=method, route=route, status=status, duration_s=seconds)
            log.info("%s %s %d %.3fs %s", method, route, status, seconds, name, extra=fields)

    return observed


# Handlers of errors are coroutines, because Starlette runs plain functions in another thread.
async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _bug(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(500, "The server made an error; see its log."), status_code=500)


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = str(error.detail)
    if error.status_code == 404:
        routes = [(route, route.methods) for route in request.app.routes if isinstance(route, Route) and route.methods]
        known = [f"{min(methods - {'HEAD'})} {route.path.replace(':path', '')}" for route, methods in routes]
        message = f"There is nothing at {request.url.path[:80]}. This server has {', '.join(known)}."
    elif error.status_code == 405:
        message = f"Method {request.method} is not allowed here; use {(error.headers or {}).get('Allow', '')}."
    return JSONResponse(error_body(error.status_code, message), status_code=error.status_code, headers=error.headers)
