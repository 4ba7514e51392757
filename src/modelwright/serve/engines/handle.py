"""The gateway's side of one engine process: how it is started, and its connection in the event loop."""

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
"""For loading a model and measuring what is fastest."""

SILENCE_S = 2.5
"""An engine that says nothing for so long, ten heartbeats, has hung ..."""

SILENCE_STEPS = 10.0
"""... unless its steps are long: so many of the longest step, if that is more."""

WATCH_PERIOD_S = 0.1
EXIT_TIMEOUT_S = 5.0


@dataclass
class EngineHandle:
    """A process whose engine is ready. `full_step_s`: seconds of a step with as many prompt tokens as one may have."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    report: EngineReport
    full_step_s: float

    @property
    def silence_s(self) -> float:
        """For how long it may say nothing."""
        return max(SILENCE_S, SILENCE_STEPS * self.full_step_s)

    @classmethod
    def launch(
        cls, setup: EngineSetup, on_start: Callable[[subprocess.Popen[bytes]], None] = lambda process: None
    ) -> Self:
        """Start a process and wait until its engine is ready. on_start: gets the process before that, to be able to
        end it. Raises `ModelError` if the engine does not become ready, `ConfigError` if that is for a setting.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "modelwright.serve.engines.process", str(theirs.fileno())]
        with theirs:  # a session of its own: Ctrl-C reaches the gateway only, which drains first
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        on_start(process)
        try:
            channel = BlockingChannel(ours)
            channel.send(asdict(setup))
            message = channel.receive_one(START_TIMEOUT_S)
            if "failed" in message:
                raise (ConfigError if message["is_setting"] else ModelError)(message["failed"])
        except (EOFError, OSError) as error:  # TimeoutError is an OSError
            _end(process, ours)
            what = f"within {START_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else "at all; see its messages"
            raise ModelError(f"{setup.folder}: an engine process did not start {what}") from None
        except BaseException:
            _end(process, ours)
            raise
        fields = message["report"]
        report = EngineReport(**{**fields, "info": EngineInfo(**fields["info"])})
        return cls(process, ours, report, message["full_step_s"])

    def end(self) -> None:
        """End the process: by itself if it can, else by force."""
        _end(self.process, self.connection)


def relaunch(
    setup: EngineSetup, expected: Callable[[], EngineReport], on_start: Callable[[subprocess.Popen[bytes]], None]
) -> EngineHandle | None:
    """Start a process in the place of one that was lost; None, with the reason in the log, if that is not possible or
    it has not what it should have. expected: the report of the others, which may change meanwhile.
    """
    try:
        handle = EngineHandle.launch(setup, on_start)
    except ModelwrightError as error:
        log.error("an engine could not be started again: %s", error)
        return None
    except Exception:  # whoever gives up would never have an engine again
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
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        for message in self._decoder.feed(data):
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    def send(self, message: Mapping[str, Any]) -> None:
        """Nothing is sent to an engine that is gone: `watch` ends next, and its answers move to another one."""
        if not self._transport.is_closing():
            self._transport.write(encode(message))

    def close(self) -> None:
        self._transport.abort()

    async def watch(self, silence_s: float) -> EngineEnd:
        """Wait until the engine has died or has been silent for too long; returns which."""
        while not self._ended.is_set():
            before = self._loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), WATCH_PERIOD_S)
            now = self._loop.time()
            self._heard_at += max(0.0, now - before - WATCH_PERIOD_S)  # while this loop was held up, it heard nobody
            if now - self._heard_at > silence_s:
                return "wedged"
        return "died"
