"""Runs the server in a thread (`ServerThread`), or as the whole process until SIGTERM (`run_server`)."""

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from modelwright.core.errors import ConfigError
from modelwright.serve.account.logs import log_to_stderr
from modelwright.serve.application import NOTHING_KEPT, Application
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.serve.connections import ACCEPTS_PER_ROUND, ConnectionTable, connection_limits
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.engines.client import EngineClient, discarded_on_error
from modelwright.serve.load import ModelSource
from modelwright.serve.reload import Locate
from modelwright.serve.service import Service
from modelwright.serve.tokenizer import ServedTokenizer

_CLOSE_TIMEOUT_S = 2
_LISTEN_BACKLOG = 256


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
        with discarded_on_error(client):
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
            self._socket = _bind(config)
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
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
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
        self._socket.listen(_LISTEN_BACKLOG)
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
        with _signals(server) as received:
            server.start()
            announce(f"Serving {model_name} at {server.url} (chat page: {server.url}/, API: {server.url}/v1)")
            announce(f"Model: {source.describe()}")
            while not server.join(0.5):
                pass
        return received[0] if received else 0


@contextlib.contextmanager
def _signals(server: ServerThread) -> Iterator[list[int]]:
    """SIGTERM and SIGINT drain, the second aborts, SIGHUP reloads. Yields the list of received signals."""
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        server.stop_soon(at_once=len(received) > 1)

    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: lambda *_: server.reload_soon()}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bind(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # without the protocol asyncio leaves Nagle's algorithm on, and each answer after a connection's first waits 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port: cannot listen on {config.host}:{config.port} ({error.strerror}); choose another port, "
            "or 0 for a free one"
        ) from None
    listener.listen(_LISTEN_BACKLOG)
    return listener
