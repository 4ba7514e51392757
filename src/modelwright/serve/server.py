"""Runs the server in a thread (`ServerThread`), or as the whole process until SIGTERM (`run_server`). Its connections
and their limits are in `connections.py`.

A server without a socket: the model, its observers, start and shutdown, and the ASGI application with a log line for
each request and errors in OpenAI's form.

`run_server` runs it with a socket, `examples/deploy/ray_serve.py` runs it behind Ray Serve.
"""

import asyncio
import contextlib
import gc
import secrets
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from modelwright.core.config import ConfigError
from modelwright.serve.ab.controller import Experiments
from modelwright.serve.account.monitoring import CLIENT_ID, ID_HEADER, ID_SCOPE, Metrics, log_to_stderr, with_fields
from modelwright.serve.account.observers import RequestLog, Tracing, tracing_to
from modelwright.serve.api.operations import EXTRAS, all_operations
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.serve.connections import ACCEPTS_PER_ROUND, Connection, ConnectionTable, connection_limits
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.engines.client import EngineClient
from modelwright.serve.errors import ApiError, error_body, log, shutting_down
from modelwright.serve.keys import key_ring
from modelwright.serve.load import ModelSource, ServedTokenizer
from modelwright.serve.reload import Locate, Reloader, same_place
from modelwright.serve.served_model import ServedModel, serve_model
from modelwright.serve.service import CLIENT_LEFT, IGNORED_HEADER, VERSION_HEADER, Lease, Service

try:
    import uvloop
except ImportError:  # it has no packages for Windows and PyPy
    uvloop = None

NOTHING_KEPT = RequestsConfig()
CUT_OFF_TIMEOUT_S = 2
"""Time for answers that were cut off to send the error to their clients."""
LAG_PERIOD_S = 0.02
"""Time between two measurements of the event loop's lag, which take 0.6% of a core, measured in an idle loop."""
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
        self._lag_timer: asyncio.TimerHandle | None = None
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
        shed = {route.path: route for route, one in zip(routes, operations, strict=True) if one.needs_engine}
        inner = _load_shedding(app, service, shed)
        if service.config.cors_origins:
            # any header is allowed, because OpenAI's client sends a dozen extra ones (`x-stainless-*`); cookies are not
            inner = CORSMiddleware(
                inner,
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
        self._measure_lag(time.monotonic())

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
        if self._lag_timer:
            self._lag_timer.cancel()
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

    def _measure_lag(self, due: float) -> None:
        """Measures the lag of the event loop, by which servers of Node refuse requests, too (toobusy-js)."""
        # a callback, because a task would note the lag only after the requests that arrived meanwhile
        now = time.monotonic()
        self.service.loop_lag_s = max(0.0, now - due)
        loop = asyncio.get_running_loop()
        self._lag_timer = loop.call_later(LAG_PERIOD_S, self._measure_lag, now + LAG_PERIOD_S)

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


def _load_shedding(app: ASGIApp, service: Service, routes: Mapping[str, Route]) -> ASGIApp:
    """Wraps an application so that a request to the engines which has no key or finds no room is refused before it is
    routed, as Envoy sheds load: a quarter of the time of a refusal was Starlette's. The routes check the same again.
    routes: those of such requests, by path.
    """

    async def shedding(scope: Scope, receive: Receive, send: Send) -> None:
        route = routes.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        if route is not None:
            request = Request(scope)
            try:
                service.caller(request, "infer")
                Lease(service, service.model).require_room()
            except ApiError as error:
                scope["route"] = route  # what counts and logs the request reads it here
                response = await _error_response(request, error)
                await response(scope, receive, send)
                return
        await app(scope, receive, send)

    return shedding


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


CLOSE_TIMEOUT_S = 2
LISTEN_BACKLOG = 2048
"""uvicorn's default. With 256, connections that arrived while the event loop was behind found no place, and clients try
again only after a second."""
OUT_OF_FILES_PAUSE_S = 1.0
"""Pause of accepting connections when this process may open no more files."""

new_event_loop = uvloop.new_event_loop if uvloop else asyncio.new_event_loop
"""Event loop of a server; what uvloop saves is in docs/log/serving.md."""


class ServerThread:
    """A server with its event loop in a thread.

    Use it as a context manager, whose exit drains and stops. `url` is known at once, because the constructor binds the
    port; connections wait until the server has started.
    """

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
        """client: engines that have not been started; locate: finds the models of reloads, by default in folders."""
        try:
            # checked here, because uvicorn would fail only in the thread
            if config.tls_certificate:
                try:
                    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                    context.load_cert_chain(config.tls_certificate, config.tls_key)
                except (OSError, ssl.SSLError) as error:
                    text = f"{config.tls_certificate}, {config.tls_key} cannot be used ({error.strerror or error})"
                    raise ConfigError(f"tls_certificate, tls_key: {text}") from None
            self.application = Application(
                client, tokenizer, config, model_name=model_name, requests=requests, source=source, locate=locate
            )
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            # without the protocol asyncio leaves Nagle's algorithm on, and each answer after a connection's first waits
            # 40 ms
            self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                self._socket.bind((config.host, config.port))
            except OSError as error:
                self._socket.close()
                text = f"port: cannot listen on {config.host}:{config.port} ({error.strerror}); choose another port, "
                raise ConfigError(f"{text}or 0 for a free one") from None
            self._socket.listen(LISTEN_BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            client.discard()  # no process may outlive a server that was never built
            raise
        host, port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if config.tls_certificate else 'http'}://{shown}:{port}"
        self._reloading: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._drain = asyncio.Event()
        self._loop = new_event_loop()
        self._connections = ConnectionTable(connection_limits(config), config, self.application.metrics)
        self._opening: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def service(self) -> Service:
        return self.application.service

    def start(self) -> "ServerThread":
        """Starts the server and waits until it answers requests."""
        self._thread.start()
        self._ready.wait()
        return self

    def stop(self) -> None:
        """Drains and stops: new requests are rejected, running ones get `drain_timeout_s`. Safe from any thread."""
        self.stop_soon()
        self._thread.join()

    def reload_soon(self) -> None:
        """Starts a reload from the origin of the model, and logs its outcome. Safe from any thread."""

        def begin() -> None:  # keeps the task alive: the event loop has only weak references to tasks
            self._reloading = self._loop.create_task(self.application.reloader.reload_and_log())

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(begin)

    def stop_soon(self, *, at_once: bool = False) -> None:
        """Starts draining without waiting; `at_once` aborts running answers."""

        def begin() -> None:
            (self.application.cut_off if at_once else self.application.begin_drain)()
            self._drain.set()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(begin)

    def join(self, timeout_s: float) -> bool:
        """Waits for the server to end. Returns true if it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> "ServerThread":
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            self._ready.set()  # `start` must not wait forever for a server that failed

    async def _serve(self) -> None:
        config = self.service.config
        await self.application.start()
        settings = uvicorn.Config(
            self.application.asgi(),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",  # the application is started and closed here
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            ws="none",
            ssl_certfile=config.tls_certificate or None,
            ssl_keyfile=config.tls_key or None,
        )
        server = uvicorn.Server(settings)
        serving = asyncio.create_task(server.serve(sockets=[]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._loop.add_reader(self._socket, self._accept, settings, server.server_state)
        self._ready.set()
        watching = asyncio.create_task(self._connections.watch())
        draining = asyncio.create_task(self._drain.wait())
        await asyncio.wait({serving, draining}, return_when=asyncio.FIRST_COMPLETED)
        # uvicorn runs until the answers are finished, because it closes connections when it ends
        await self.application.finish_answers()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        server.should_exit = True
        await serving
        draining.cancel()
        watching.cancel()
        await self.application.close()

    def _accept(self, settings: uvicorn.Config, state: ServerState) -> None:
        """Accepts up to `ACCEPTS_PER_ROUND` of the connections that wait."""

        async def connect(accepted: socket.socket) -> None:
            with contextlib.suppress(OSError):  # the client has left, or its handshake of TLS has failed
                opened = partial(Connection, self._connections, settings, state)
                await self._loop.connect_accepted_socket(opened, accepted, ssl=settings.ssl)

        # not by uvicorn, because asyncio accepts the whole backlog in one round of the event loop, and uvloop even
        # connections that arrive meanwhile
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("no connections are accepted for %gs: %s", OUT_OF_FILES_PAUSE_S, error.strerror)
                self._loop.remove_reader(self._socket)
                self._loop.call_later(
                    OUT_OF_FILES_PAUSE_S, self._loop.add_reader, self._socket, self._accept, settings, state
                )
                return
            accepted.setblocking(False)
            task = self._loop.create_task(connect(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)


def run_server(
    source: ModelSource,
    config: ServeConfig,
    *,
    model_name: str,
    requests: RequestsConfig = NOTHING_KEPT,
    announce: Callable[[str], None] = print,
    locate: Locate | None = None,
) -> int:
    """Serves the model in `source.folder` until SIGTERM or Ctrl-C, then drains and returns the signal's number (0 if
    the server ended without a signal). A second signal aborts running answers. SIGHUP reloads the model. locate: finds
    the models of reloads, by default in folders.

    Call it from the main thread. `announce` receives a line with the address once the server is ready, and a line with
    the model's origin. Raises `ConfigError` if the port is taken, `ModelError` if the folder cannot be loaded.
    """
    with log_to_stderr(config.log_format):
        server = ServerThread(
            *load_engines(source, config),
            config,
            model_name=model_name,
            requests=requests,
            source=source,
            locate=locate,
        )
        gc.collect()
        gc.freeze()  # collections while requests are parsed block all answers, and most objects of this point stay
        received: list[int] = []

        def stop(number: int, frame: FrameType | None) -> None:
            received.append(number)
            server.stop_soon(at_once=len(received) > 1)

        handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: lambda *_: server.reload_soon()}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            server.start()
            announce(f"Serving {model_name} at {server.url} (chat page: {server.url}/, API: {server.url}/v1)")
            announce(f"Model: {source.describe()}")
            while not server.join(0.5):
                pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return received[0] if received else 0
