"""The gateway's side of one engine process: its start, and its connection in the event loop."""

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, cast

from modelwright.core.errors import ConfigError, ModelError, ModelwrightError
from modelwright.serve.engines.client import EngineEnd, EngineInfo
from modelwright.serve.engines.process import BlockingChannel, EngineReport, EngineSetup, LineDecoder, encode

log = logging.getLogger("modelwright.serve")

START_TIMEOUT_S = 600.0
"""Time for loading the model and measuring the fastest kernels."""
SILENCE_S = 2.5
"""Time without a message, ten heartbeats, after which an engine counts as hung ..."""
SILENCE_STEPS = 10.0
"""... or this many of its longest steps, if that takes longer."""

WATCH_PERIOD_S = 0.1
EXIT_TIMEOUT_S = 5.0


@dataclass
class EngineHandle:
    """A process whose engine is ready. `full_step_s`: seconds of a step with the most prompt tokens."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    report: EngineReport
    full_step_s: float

    @classmethod
    def launch(
        cls, setup: EngineSetup, on_start: Callable[[subprocess.Popen[bytes]], None] = lambda process: None
    ) -> Self:
        """Starts a process and waits until its engine is ready. on_start: called with the process before the wait, so
        that another thread can end it. Raises `ModelError` if the engine does not become ready, `ConfigError` if a
        setting is the reason.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "modelwright.serve.engines.process", str(theirs.fileno())]
        # Our copy of the other end is closed at once, so that the end of the process closes the connection. The process
        # gets a new session, so that Ctrl-C reaches only the gateway, which drains first.
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        on_start(process)
        try:
            channel = BlockingChannel(ours)
            channel.send(asdict(setup))
            message = channel.receive_one(START_TIMEOUT_S)
            if "failed" in message:
                raise (ConfigError if message["is_setting"] else ModelError)(message["failed"])
        except BaseException as error:
            _end(process, ours)
            if not isinstance(error, (EOFError, OSError)):  # TimeoutError is an OSError
                raise
            what = f"within {START_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else "at all; see its messages"
            raise ModelError(f"{setup.folder}: an engine process did not start {what}") from None
        fields = message["report"]
        report = EngineReport(**{**fields, "info": EngineInfo(**fields["info"])})
        return cls(process, ours, report, message["full_step_s"])

    def end(self) -> None:
        """Waits for the process to end after its socket is closed, and kills it if it does not."""
        _end(self.process, self.connection)


def relaunch(
    setup: EngineSetup, expected: Callable[[], EngineReport], on_start: Callable[[subprocess.Popen[bytes]], None]
) -> EngineHandle | None:
    """Starts a process that replaces a lost one. Returns None, with the reason in the log, if it cannot be started or
    if its report differs. expected: report of the other engines, which may change meanwhile.
    """
    try:
        handle = EngineHandle.launch(setup, on_start)
    except ModelwrightError as error:
        log.error("an engine could not be started again: %s", error)
        return None
    except Exception:  # an exception would end the task that restarts this engine
        log.exception("an engine could not be started again")
        return None
    if handle.report != expected():
        text = "an engine was started again with %s instead of %s: the files have changed; reload the model"
        log.error(text, handle.report, expected())
        handle.end()
        return None
    return handle


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_TIMEOUT_S)
        return
    process.kill()
    process.wait()


class EngineLink(asyncio.Protocol):
    """The connection to a ready engine inside the event loop."""

    def __init__(self, receive: Callable[[dict[str, Any]], None]) -> None:
        self._receive = receive
        self._decoder = LineDecoder()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport
        self._heard_at = self._loop.time()
        self._ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transports are not a subclass

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        for message in self._decoder.feed(data):
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, or drops it if the engine is gone: `watch` ends next, and its answers move."""
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def close(self) -> None:
        self._transport.abort()

    async def watch(self, silence_s: float) -> EngineEnd:
        """Waits until the engine has died or has been silent for `silence_s`, and returns which."""
        while not self._ended.is_set():
            before = self._loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), WATCH_PERIOD_S)
            now = self._loop.time()
            # time in which this loop was blocked does not count, because it could not receive anything
            self._heard_at += max(0.0, now - before - WATCH_PERIOD_S)
            if now - self._heard_at > silence_s:
                return "wedged"
        return "died"
