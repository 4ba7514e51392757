"""Runs the server in a thread (`ServerThread`), or as the whole process until SIGTERM (`run_server`), with limits on
connections: their number, the time for a request to arrive, and the time for an answer to be read.

uvicorn itself limits only the pause between two requests, so each connection's protocol is wrapped. When there is no
room, a new connection replaces the one that has waited longest for a complete request, as nginx reuses idle
connections, so that idle clients cannot lock out active ones.

A server without a socket: the model, its observers, start and shutdown, and the ASGI application with a log line for
each request and errors in OpenAI's form.

`run_server` runs it with a socket, `examples/deploy/ray_serve.py` runs it behind Ray Serve.
"""

import asyncio
import contextlib
import gc
import ipaddress
import json
import os
import resource
import secrets
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from modelwright.core.config import ConfigError
from modelwright.serve.ab.controller import Experiments
from modelwright.serve.account.monitoring import CLIENT_ID, ID_HEADER, ID_SCOPE, Metrics, log_to_stderr, with_fields
from modelwright.serve.account.observers import RequestLog, Tracing, tracing_to
from modelwright.serve.api.operations import EXTRAS, all_operations
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.engines.client import EngineClient
from modelwright.serve.errors import RETRY_AFTER_S, ApiError, error_body, log, shutting_down
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


ACCEPTS_PER_ROUND = 8
"""Connections that the event loop accepts in one round. They take their descriptors before any of our code runs, and up
to four rounds pass until a replaced connection has released its descriptor."""
SPARE_DESCRIPTORS = 4 * ACCEPTS_PER_ROUND + 16
"""File descriptors that are not for connections: those of accepted ones that are not counted yet, and those of files.
"""
IDLE_CONNECTIONS = 1024
"""Connections in addition to those of answers that may run and wait at once."""
MIN_CONNECTIONS = 8
"""Fewest connections with which a server starts."""
LEAVING_POLL_S = 0.2
"""Seconds between two checks of a client that has closed its sending side."""
PROBE_AFTER_S = 2.0
"""Seconds before a client that has closed its sending side is probed. Programs that close their side after a request
and then read to the end (`nc -N`) would show the probe, so answers that take less time come without one."""
CLOSE_TIMEOUT_S = 2
LISTEN_BACKLOG = 256
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Interim response that clients skip (RFC 9110, section 15.2). A closed socket answers it with a reset."""


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
        except BaseException:
            client.discard()  # no process may outlive a server that was never built
            raise
        host, port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if config.tls_certificate else 'http'}://{shown}:{port}"
        self._reloading: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._drain = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._connections = ConnectionTable(connection_limits(config), config, self.application.metrics)
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
            http=self._connections.open,  # type: ignore[arg-type]
            ws="none",
            # asyncio accepts up to the backlog in one round of the event loop
            backlog=ACCEPTS_PER_ROUND,
            ssl_certfile=config.tls_certificate or None,
            ssl_keyfile=config.tls_key or None,
        )
        server = uvicorn.Server(settings)
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        # again, because asyncio has set the backlog to the number of connections that it accepts in one round
        self._socket.listen(LISTEN_BACKLOG)
        self._ready.set()
        watching = asyncio.create_task(self._connections.watch())
        draining = asyncio.create_task(self._drain.wait())
        await asyncio.wait({serving, draining}, return_when=asyncio.FIRST_COMPLETED)
        # uvicorn runs until the answers are finished, because it closes connections when it ends
        await self.application.finish_answers()
        server.should_exit = True
        await serving
        draining.cancel()
        watching.cancel()
        await self.application.close()


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


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on simultaneous connections. `total`: all of them; `per_address`: those of one client address."""

    total: int
    per_address: int


def connection_limits(config: ServeConfig) -> ConnectionLimits:
    """Returns limits that leave this process enough file descriptors. Raises `ConfigError` if it may open too few."""
    answers = config.engines * config.engine.max_num_seqs + config.max_queued
    total = answers + IDLE_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        # this process has model files, engines and databases open already
        total = min(total, soft - len(os.listdir("/dev/fd")) - SPARE_DESCRIPTORS)
    if total < MIN_CONNECTIONS:
        raise ConfigError(
            f"serve: this process may open {soft} files, too few for a server; raise the limit (ulimit -n 1024)"
        )
    if total < answers:
        text = "%d connections fit into the %d files that may be open (ulimit -n), but up to %d answers may need one"
        log.warning(text, total, soft, answers)
    # one address cannot take all connections, but a proxy in front of the server needs most of them
    return ConnectionLimits(total=total, per_address=total - total // 4)


class ConnectionTable:
    """All connections of a server. `open` creates a connection's protocol, `watch` enforces the time limits."""

    def __init__(self, limits: ConnectionLimits, config: ServeConfig, metrics: Metrics) -> None:
        self._limits = limits
        self._header_timeout_s, self._send_timeout_s = config.header_timeout_s, config.send_timeout_s
        self._metrics = metrics
        self._connections: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._connections)

    def open(self, *, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> asyncio.Protocol:
        """Creates the protocol of an accepted connection. Called by uvicorn."""
        return Connection(self, H11Protocol(config, server_state, app_state, _loop))

    def admit(self, connection: "Connection") -> bool:
        """Adds a connection, if necessary in place of another one. Returns false if all others are being answered."""
        same_address = [other for other in self._connections if other.address == connection.address]
        full = same_address if len(same_address) >= self._limits.per_address else []
        full = full or (self._connections if len(self) >= self._limits.total else [])
        if full:
            # never one that is being answered
            replaceable = [other for other in full if other.awaits_request()]
            if not replaceable:
                self._metrics.closed_connections.labels("refused").inc()
                return False
            self._close(min(replaceable, key=lambda other: other.waiting_since), "replaced")
        self._connections.add(connection)
        self._metrics.connections.set(len(self))
        return True

    def remove(self, connection: "Connection") -> None:
        self._connections.discard(connection)
        self._metrics.connections.set(len(self))

    async def watch(self) -> None:
        """Closes connections that exceed a time limit. Runs until canceled."""
        while True:
            await asyncio.sleep(min(1.0, self._header_timeout_s / 4, self._send_timeout_s / 4))
            now = asyncio.get_running_loop().time()
            for connection in list(self._connections):
                connection.note_progress(now)
                if connection.is_between_requests() and now - connection.waiting_since > self._header_timeout_s:
                    self._close(connection, "header_timeout")
                elif 0 < connection.blocked_since < now - self._send_timeout_s:
                    self._close(connection, "send_timeout")

    def _close(self, connection: "Connection", reason: str) -> None:
        self._metrics.closed_connections.labels(reason).inc()
        self.remove(connection)  # at once, because `connection_lost` follows only in a later round of the event loop
        connection.abort()


class _OpenTransport:
    """A transport that drops writes once the connection is lost. A protocol learns of the loss only in the event loop's
    next round, and asyncio logs a warning for every write until then.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(asyncio.Protocol):
    """A connection: forwards events to uvicorn's protocol, and tracks the state of the client.

    The state of the current request is uvicorn's: `cycle` is None before the first request's headers have arrived.
    """

    def __init__(self, table: ConnectionTable, http: H11Protocol) -> None:
        self._table = table
        self._http = http
        self._transport: asyncio.Transport
        self._seen_cycle: object = None
        self._leaving: asyncio.Task[None] | None = None
        self._is_admitted = False
        self.address = ""
        self.waiting_since = 0.0
        """Time of the event loop at which the connection began to wait for its next request."""
        self.blocked_since = 0.0
        """Time of the event loop since which the client has not read what was sent; 0 if it reads."""

    def is_between_requests(self) -> bool:
        """Returns true unless the headers of an unanswered request have arrived."""
        return self._http.cycle is None or self._http.cycle.response_complete

    def awaits_request(self) -> bool:
        """Returns true unless a complete unanswered request has arrived."""
        return self.is_between_requests() or self._http.cycle.more_body

    def note_progress(self, now: float) -> None:
        """Restarts the clock of the wait for a request with every request."""
        # not with every byte, because a client can send headers one byte at a time
        if not self.is_between_requests() or self._http.cycle is not self._seen_cycle:
            self._seen_cycle, self.waiting_since = self._http.cycle, now

    def abort(self) -> None:
        """Closes without waiting for the client to read."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        peer = transport.get_extra_info("peername")
        if peer:
            # one client usually has a whole /64 of IPv6
            address = ipaddress.ip_address(peer[0])
            network = ipaddress.ip_network((address, 64), strict=False) if address.version == 6 else address
            self.address = str(network)
        self.waiting_since = asyncio.get_running_loop().time()
        self._is_admitted = self._table.admit(self)
        if self._is_admitted:
            self._http.connection_made(cast(asyncio.Transport, _OpenTransport(transport)))
        else:
            text = "The server has no free connection; try again later."
            body = json.dumps(error_body(503, text, code="overloaded")).encode()
            head = (
                "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
                f"Retry-After: {RETRY_AFTER_S}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            transport.write(head.encode() + body)
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._http.data_received(data)

    def eof_received(self) -> bool:
        """Keeps the connection for the answer if the client has closed its sending side after a complete request."""
        if self.awaits_request() or self._transport.get_extra_info("sslcontext"):
            return False  # TLS has no half-closed connections
        self._leaving = self._leaving or asyncio.get_running_loop().create_task(self._answer_and_close())
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        if self._leaving:
            self._leaving.cancel()
        if self._is_admitted:
            self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self.blocked_since = asyncio.get_running_loop().time()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self.blocked_since = 0.0
        self._http.resume_writing()

    async def _answer_and_close(self) -> None:
        """Waits until the answer is written, then closes; closes at once if the client has left."""
        # A client that has only closed its sending side and one that has closed its socket look the same until
        # something is sent to them: a closed socket resets the connection, which the socket's error then shows.
        cycle, is_probed = self._http.cycle, False
        loop = asyncio.get_running_loop()
        left_at = loop.time()
        while not cycle.response_complete:
            if not is_probed and (cycle.response_started or loop.time() - left_at > PROBE_AFTER_S):
                is_probed = True
                if cycle.scope["http_version"] != "1.1":
                    pass  # older versions have no interim responses
                elif cycle.response_started:
                    # only event streams stay open after their start, in which this is a comment
                    with contextlib.suppress(RuntimeError):
                        await cycle.send({"type": "http.response.body", "body": b":\n\n", "more_body": True})
                else:
                    self._transport.write(PROBE)
            await asyncio.sleep(LEAVING_POLL_S)
            if self._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.abort()
                return
        self._transport.close()
