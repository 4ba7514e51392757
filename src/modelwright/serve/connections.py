"""The connections of a server, with limits on their number, on the time for a request to arrive and on the time for an
answer to be read.

uvicorn itself limits only the pause between two requests, so each connection's protocol is wrapped. When there is no
room, a new connection replaces the one that has waited longest for a complete request, as nginx reuses idle
connections, so that idle clients cannot lock out active ones. One whose client has sent what is not read yet stays.

httptools parses requests where it is installed, in less time than h11, and h11 what httptools or uvicorn's protocol on
it handles wrongly: HTTP/1.0, upgrades, and whatever does not begin like a request of HTTP/1.1.
"""

import asyncio
import contextlib
import fcntl
import heapq
import ipaddress
import json
import os
import re
import resource
import socket
import termios
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from modelwright.core.config import ConfigError
from modelwright.serve.account.monitoring import Metrics
from modelwright.serve.config import ServeConfig
from modelwright.serve.errors import RETRY_AFTER_S, error_body, log

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # an optional part of the extra `serve`, since not every platform has a package of it
    HttpToolsProtocol = None

ACCEPTS_PER_ROUND = 8
"""Connections that the event loop accepts in one round. They take their descriptors before any of our code runs, and up
to four rounds pass until a replaced connection has released its descriptor."""
SPARE_DESCRIPTORS = 4 * ACCEPTS_PER_ROUND + 16
"""File descriptors that are not for connections: those of accepted ones that are not counted yet, and those of files.
"""
IDLE_CONNECTIONS = 1024
"""Connections in addition to those of answers that may run and wait at once."""
NUM_REPLACEABLE = 8
"""Connections that a new one looks at, from the longest wait on, for one that it can replace. Where so many have sent
what is not read yet, the event loop is behind, and the new one is refused instead of a request being lost."""
MIN_CONNECTIONS = 8
"""Fewest connections with which a server starts."""
LEAVING_POLL_S = 0.2
"""Seconds between two checks of a client that has closed its sending side."""
PROBE_AFTER_S = 2.0
"""Seconds before a client that has closed its sending side is probed. Programs that close their side after a request
and then read to the end (`nc -N`) would show the probe, so answers that take less time come without one."""
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Interim response that clients skip (RFC 9110, section 15.2). A closed socket answers it with a reset."""
HEAD_BYTES = 16_384
"""Most bytes of a request's head, of the trailer of its body, or of an extension of a chunk: h11's own limit."""
FEED_BYTES = 4096
"""Bytes that httptools parses at once. It builds all requests in them before the first is answered: 200 of the
shortest."""
UNPARSED_BYTES = 2**20
"""Most bytes of further requests that a client may send before it has the answer to the first."""
END_OF_HEAD = re.compile(rb"\n\r?\n")
BEGINS = re.compile(rb"[A-Z]")
"""What is nothing of HTTP, such as TLS, has its refusal at once."""
FIRST_LINE = re.compile(rb"[A-Z]+ [!-~]+ HTTP/1\.1\r\n")
"""Requests that httptools parses. uvicorn's protocol on it answers HTTP/1.0 in chunks, which that version lacks."""
UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE)
"""httptools reads no body after this header, which a server may ignore and Java's client sends with every request."""


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
    """All connections of a server. `watch` enforces the time limits."""

    def __init__(self, limits: ConnectionLimits, config: ServeConfig, metrics: Metrics) -> None:
        self._limits = limits
        self._header_timeout_s, self._send_timeout_s = config.header_timeout_s, config.send_timeout_s
        self._metrics = metrics
        self._connections: set[Connection] = set()
        self._num_of_address = Counter[str]()

    def __len__(self) -> int:
        return len(self._connections)

    def admit(self, connection: "Connection") -> bool:
        """Adds a connection, if necessary in place of another one. Returns false if none can be replaced."""
        has_its_share = self._num_of_address[connection.address] >= self._limits.per_address
        if has_its_share or len(self) >= self._limits.total:
            others = (one for one in self._connections if not has_its_share or one.address == connection.address)
            # never one that is being answered
            waiting = (one for one in others if one.awaits_request())
            longest = heapq.nsmallest(NUM_REPLACEABLE, waiting, key=lambda one: one.waiting_since)
            replaced = next((one for one in longest if not one.has_unread_bytes()), None)
            if not replaced:
                self._metrics.closed_connections.labels("refused").inc()
                return False
            self._close(replaced, "replaced")
        self._connections.add(connection)
        self._num_of_address[connection.address] += 1
        self._metrics.connections.set(len(self))
        return True

    def remove(self, connection: "Connection") -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._num_of_address[connection.address] -= 1
            if not self._num_of_address[connection.address]:
                del self._num_of_address[connection.address]
            self._metrics.connections.set(len(self))

    async def watch(self) -> None:
        """Closes connections that exceed a time limit. Runs until canceled."""
        while True:
            await asyncio.sleep(min(1.0, self._header_timeout_s / 4, self._send_timeout_s / 4))
            now = time.monotonic()
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


class _RoundTransport:
    """A transport that sends what is written in one round of the event loop at once: the head and the body of a reply,
    or the last events of a stream. A call of the system costs as much as all of our code for an event. It drops writes
    once the connection is lost: a protocol learns of the loss only in the loop's next round, and asyncio logs a warning
    for every write until then.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHttpTools(HttpToolsProtocol or object):  # type: ignore[misc]
    """uvicorn's protocol on httptools with the bounds that h11 has by itself: on the bytes of a head, and on the
    requests that a client sends before it has its answers.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._unparsed = bytearray()
        self._num_held = 0
        """Bytes parsed since the last end of a head or piece of a body: the parser keeps what they are part of."""
        self.answering: Any = None
        """Cycle of the request that is being answered, or was last; `cycle` is that of the newest request."""

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        # an exception in a callback becomes an answer 400; see `FIRST_LINE` and `UPGRADE`
        if version != "1.1" or self.parser.should_upgrade():
            raise ValueError("only the first request of a connection may do this")
        self._num_held = 0
        super().on_headers_complete()
        self.answering = self.answering if self.pipeline else self.cycle

    def on_body(self, body: bytes) -> None:
        self._num_held = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        self.answering = self.pipeline[-1][0] if self.pipeline else self.answering
        super().on_response_complete()
        if self._unparsed:
            self.flow.pause_reading()
            self.loop.call_soon(self._parse)

    def send_400_response(self, msg: str) -> None:
        if self.answering and self.answering.response_started and not self.answering.response_complete:
            self.transport.close()  # a second status line would look like a part of the answer that is being sent
        else:
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # which tells only the newest request
        if self.answering and not self.answering.response_complete:
            self.answering.disconnected = True
            self.answering.message_event.set()

    def _parse(self) -> None:
        while self._unparsed and not self.pipeline and not self.transport.is_closing():
            piece = bytes(self._unparsed[:FEED_BYTES])
            del self._unparsed[:FEED_BYTES]
            self._num_held += len(piece)
            super().data_received(piece)
            if self._num_held > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"A request may have {HEAD_BYTES} bytes before its body.")
        if len(self._unparsed) > UNPARSED_BYTES:
            self.transport.abort()
        elif self._unparsed:
            self.flow.pause_reading()


class Connection(asyncio.Protocol):
    """A connection: forwards events to uvicorn's protocol, and tracks the state of the client.

    The state of the current request is uvicorn's: it is None before the first request's headers have arrived.
    """

    def __init__(self, table: ConnectionTable, settings: uvicorn.Config, state: ServerState) -> None:
        self._table = table
        self._settings, self._state = settings, state
        self._first_head: bytes | None = b"" if HttpToolsProtocol else None
        """What has arrived of the first head; None once it is known which protocol parses it."""
        self._http: Any = (BoundedHttpTools if HttpToolsProtocol else H11Protocol)(settings, state, {})
        self._transport: _RoundTransport
        self._seen_cycle: object = None
        self._leaving: asyncio.Task[None] | None = None
        self._is_admitted = False
        self.address = ""
        self.waiting_since = 0.0
        """Monotonic time at which the connection began to wait for its next request."""
        self.blocked_since = 0.0
        """Monotonic time since which the client has not read what was sent; 0 if it reads."""

    @property
    def _cycle(self) -> Any:
        return getattr(self._http, "answering", self._http.cycle)

    def is_between_requests(self) -> bool:
        """Returns true unless the headers of an unanswered request have arrived."""
        return self._cycle is None or self._cycle.response_complete

    def awaits_request(self) -> bool:
        """Returns true unless a complete unanswered request has arrived."""
        return self.is_between_requests() or self._cycle.more_body

    def has_unread_bytes(self) -> bool:
        """Returns true if the client has sent what was not read yet, which may be a whole request."""
        num_bytes = bytearray(4)
        with contextlib.suppress(OSError, ValueError):  # it is closed
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.FIONREAD, num_bytes)
        return any(num_bytes)

    def note_progress(self, now: float) -> None:
        """Restarts the clock of the wait for a request with every request."""
        # not with every byte, because a client can send headers one byte at a time
        if not self.is_between_requests() or self._cycle is not self._seen_cycle:
            self._seen_cycle, self.waiting_since = self._cycle, now

    def abort(self) -> None:
        """Closes without waiting for the client to read."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = _RoundTransport(transport)
        peer = transport.get_extra_info("peername")
        if peer:
            # one client usually has a whole /64 of IPv6
            address = ipaddress.ip_address(peer[0])
            network = ipaddress.ip_network((address, 64), strict=False) if address.version == 6 else address
            self.address = str(network)
        self.waiting_since = time.monotonic()
        self._is_admitted = self._table.admit(self)
        if self._is_admitted:
            self._http.connection_made(self._transport)
        else:
            text = "The server has no free connection; try again later."
            body = json.dumps(error_body(503, text, code="overloaded")).encode()
            head = (
                "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
                f"Retry-After: {RETRY_AFTER_S}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            self._transport.write(head.encode() + body)
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._first_head is not None:
            self._first_head += data
            end = END_OF_HEAD.search(self._first_head)
            if not end and len(self._first_head) <= HEAD_BYTES and BEGINS.match(self._first_head):
                return
            data, self._first_head = self._first_head, None
            if not end or not FIRST_LINE.match(data) or UPGRADE.search(data, 0, end.start()):
                self._http.connection_lost(ConnectionAbortedError())  # it forgets the connection and keeps it open
                self._http = H11Protocol(self._settings, self._state, {})
                self._http.connection_made(self._transport)
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
        self.blocked_since = time.monotonic()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self.blocked_since = 0.0
        self._http.resume_writing()

    async def _answer_and_close(self) -> None:
        """Waits until the answer is written, then closes; closes at once if the client has left."""
        # A client that has only closed its sending side and one that has closed its socket look the same until
        # something is sent to them: a closed socket resets the connection, which the socket's error then shows.
        cycle, is_probed = self._cycle, False
        left_at = time.monotonic()
        while not cycle.response_complete:
            if not is_probed and (cycle.response_started or time.monotonic() - left_at > PROBE_AFTER_S):
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
