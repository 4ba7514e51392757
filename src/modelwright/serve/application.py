"""A server without a socket: the model, its observers, start and shutdown, and the ASGI application with a log line for
each request and errors in OpenAI's form.

`server` runs it with a socket; `examples/deploy/ray_serve.py` runs it behind Ray Serve.
"""

import asyncio
import contextlib
import secrets
import time
from dataclasses import replace
from functools import partial

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelwright.core.config import ConfigError
from modelwright.serve.ab.controller import Experiments
from modelwright.serve.account.monitoring import CLIENT_ID, ID_HEADER, ID_SCOPE, Metrics, with_fields
from modelwright.serve.account.observers import RequestLog, Tracing, tracing_to
from modelwright.serve.api.operations import EXTRAS, all_operations
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.engines.client import EngineClient
from modelwright.serve.errors import ApiError, error_body, log, shutting_down
from modelwright.serve.keys import key_ring
from modelwright.serve.load import ModelSource, ServedTokenizer
from modelwright.serve.reload import Locate, Reloader, same_place
from modelwright.serve.served_model import ServedModel, serve_model
from modelwright.serve.service import CLIENT_LEFT, IGNORED_HEADER, VERSION_HEADER, Service

NOTHING_KEPT = RequestsConfig()
CUT_OFF_TIMEOUT_S = 2
"""Time for answers that were cut off to send the error to their clients."""
EXPOSED_HEADERS = (ID_HEADER, VERSION_HEADER, IGNORED_HEADER, "Retry-After", "WWW-Authenticate")
"""Response headers that scripts of other origins may read; browsers hide all others."""


class Application:
    """The server's parts and their lifecycle. All methods but the constructor belong to the event loop."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: ServedTokenizer,
        config: ServeConfig,
        *,
        model_name: str,
        requests: RequestsConfig = NOTHING_KEPT,
        source: ModelSource | None = None,
        locate: Locate | None = None,
    ) -> None:
        """client: engines that have not been started; locate: finds the models of reloads, by default in folders.
        Raises `ConfigError` for settings that cannot be used.
        """
        # settings are checked before a database is opened
        config.check_names(model_name)
        keys = key_ring(config)
        self.metrics = Metrics(model_name)
        served = serve_model(client, tokenizer, config, self.metrics, source)
        self.service = Service(config, model_name, served, self.metrics, keys)
        self._operations = all_operations(config.routes)
        for operation in self._operations:
            if operation.prepare:
                operation.prepare(self.service, operation.settings)
        if config.mcp and "mcp" not in self.service.extensions:
            raise ConfigError("mcp: tools on the chat page need the extra agents: pip install 'modelwright[agents]'")
        self.reloader = Reloader(self.service, locate or partial(same_place, source), self._load)
        self.tracing: Tracing | None = None
        if requests.traces:
            self.tracing = tracing_to(requests.traces, log_prompts=config.log_prompts)
        self._request_log = RequestLog(requests, self.metrics) if requests.log else None
        self._experiments: Experiments | None = None
        if requests.ab_state:
            self._experiments = Experiments(self.service, self.reloader, requests.ab_state)

    def asgi(self) -> ASGIApp:
        """Returns the routes. Call it after `start`."""
        operations, service = self._operations, self.service
        routes = [_TracedRoute(one.path, one.handler, methods=[one.method]) for one in operations]
        app = Starlette(
            routes=routes, exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _error_response)
        )
        app.state.service = service
        app.state.reloader = self.reloader
        app.state.experiments = self._experiments
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
        if self.tracing:
            inner = self.tracing.around(inner)

        async def observed(scope: Scope, receive: Receive, send: Send) -> None:
            """Counts and logs an HTTP request by route and status. Bodies, headers and query strings are not logged."""
            if scope["type"] != "http":
                await inner(scope, receive, send)
                return
            started, status = time.perf_counter(), CLIENT_LEFT
            client_id = Headers(scope=scope).get(ID_HEADER, "")
            # a new id where the header is missing or could forge a line of the log
            name = client_id if CLIENT_ID.fullmatch(client_id) else secrets.token_hex(8)
            scope[ID_SCOPE] = name

            async def sending(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                    MutableHeaders(scope=message)[ID_HEADER] = name
                await send(message)

            try:
                await inner(scope, receive, sending)
            finally:
                # the route's pattern and a few methods, because each label value is a time series in Prometheus
                route = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD") else "other"
                service.metrics.http_requests.labels(route, method, str(status)).inc()
                seconds = round(time.perf_counter() - started, 6)
                fields = with_fields(request_id=name, method=method, route=route, status=status, duration_s=seconds)
                log.info("%s %s %d %.3fs %s", method, route, status, seconds, name, extra=fields)

        return observed

    async def start(self) -> None:
        """Starts the engines and observers. Call it inside the running event loop, before requests arrive."""
        self.service.worker.client.start(self.service.worker)
        self.service.metrics.versions.show(self.service.model.fingerprint)
        for start in self.service.starting:
            await start()
        if self._request_log:
            self._request_log.start()
            self.service.observers.append(self._request_log)
        if self._experiments:
            # resumes a test, so it needs the running worker above
            await self._experiments.start()
            self.service.observers.append(self._experiments)
        if self.tracing:
            self.service.observers.append(self.tracing)

    def begin_drain(self) -> None:
        """Refuses new requests from now on."""
        self.service.is_draining = True
        if self.service.arms is not None:
            self.service.arms.request_arrived()  # aborts a copy of a request, which is not worth waiting for

    def cut_off(self) -> None:
        """Ends all running answers with an error."""
        self.begin_drain()
        for worker in self.service.workers:
            worker.abort_all(shutting_down("The server is shutting down."))

    async def finish_answers(self) -> None:
        """Waits for running answers up to `drain_timeout_s`, and cuts off the rest."""
        if not await self._wait_idle(self.service.config.drain_timeout_s):
            log.warning("running answers were cut off after %gs", self.service.config.drain_timeout_s)
            self.cut_off()
            await self._wait_idle(CUT_OFF_TIMEOUT_S)

    async def close(self) -> None:
        """Stops the engines and writes all queued records."""
        # observers last, because the ends of answers are reported to them
        await self.reloader.close()
        for close in self.service.closing:
            await close()
        await self.service.worker.client.stop()
        if self._experiments:
            await self._experiments.close()
        if self._request_log:
            await asyncio.to_thread(self._request_log.close)
        if self.tracing:
            await self.tracing.close()

    async def _wait_idle(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(worker.idle.wait() for worker in self.service.workers))
                return True
        return False

    def _load(self, source: ModelSource, metrics: Metrics) -> ServedModel:
        """Loads a version with the adapters of the current one."""
        adapters = {name: str(adapter.folder) for name, adapter in self.service.model.adapters.items()}
        config = replace(self.service.config, adapters=adapters)
        client, tokenizer = load_engines(source, config)
        return serve_model(client, tokenizer, config, metrics, source)


class _TracedRoute(Route):
    """A route that adds itself to the scope of its requests. Older versions of Starlette add only the endpoint."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, matched = super().matches(scope)
        return match, matched if match == Match.NONE else {**matched, "route": self}


# a coroutine, because Starlette runs plain functions in another thread
async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)
    if not isinstance(error, HTTPException):
        return JSONResponse(error_body(500, "The server made an error; see its log."), status_code=500)
    message = str(error.detail)
    if error.status_code == 404:
        routes = [(route, route.methods) for route in request.app.routes if isinstance(route, Route) and route.methods]
        known = [f"{min(methods - {'HEAD'})} {route.path.replace(':path', '')}" for route, methods in routes]
        path = request.url.path
        extra = f" It needs the extra: pip install 'modelwright[{EXTRAS[path]}]'." if path in EXTRAS else ""
        message = f"There is nothing at {path[:80]}.{extra} This server has {', '.join(known)}."
    elif error.status_code == 405:
        message = f"Method {request.method} is not allowed here; use {(error.headers or {}).get('Allow', '')}."
    return JSONResponse(error_body(error.status_code, message), status_code=error.status_code, headers=error.headers)
