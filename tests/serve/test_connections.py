"""Connections that ask for nothing: they are closed in time and lock out nobody, whatever the limit of open files."""

import asyncio
import contextlib
import errno
import http.client
import json
import os
import re
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from modelwright.serve import connections
from modelwright.serve.config import ServeConfig
from modelwright.serve.connections import MIN_CONNECTIONS, connection_limits
from modelwright.serve.engines.process import EngineLink
from modelwright.serve.server import ServerThread
from refusals import config_error
from serve.patience import held, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("stack")]

HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"

SERVER = """
import logging, pathlib, resource, sys
if sys.argv[3] == "plain":
    sys.modules["uvloop"] = sys.modules["httptools"] = None
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from modelwright.serve.config import ServeConfig
from modelwright.serve.load import ModelSource
from modelwright.serve.server import run_server
logging.basicConfig(level="INFO", stream=sys.stderr)
source = ModelSource(name="tiny", folder=pathlib.Path(sys.argv[1]))
config = ServeConfig(port=0, header_timeout_s=float(sys.argv[2]))
run_server(source, config, model_name="tiny", announce=lambda line: print(line, flush=True))
"""


def connect(url: str, first: bytes = b"") -> socket.socket:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)
    connection.sendall(first)
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(65_536)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_small_parts_of_an_answer_are_sent_at_once(slow_server):
    """Nagle's algorithm would keep the second one until the client has acknowledged the first."""
    server = slow_server()
    with connect(server.url, HALF_HEAD):
        wait_until(lambda: len(server._connections) == 1)
        (accepted,) = server._connections._connections
        peer = accepted._transport.get_extra_info("socket")
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def health(url: str) -> float:
    """Seconds until a new connection's `/health` has answered."""
    started = time.monotonic()
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    return time.monotonic() - started


@contextlib.contextmanager
def small_server(folder: Path, header_timeout_s: float, stack: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server that may open 128 files, as a process."""
    command = [sys.executable, "-c", SERVER, str(folder), str(header_timeout_s), stack]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://\S+:\d+", process.stdout.readline())
            assert match
            yield match.group(), process
        finally:
            process.kill()


@pytest.mark.slow
def test_idle_sockets_and_half_sent_headers_lock_out_nobody(model_folder: Path, stack: str):
    header_timeout_s = 5.0
    with small_server(model_folder, header_timeout_s, stack) as (url, process), contextlib.ExitStack() as open_sockets:
        health(url)
        waits = []
        sockets = []
        for first in (b"", b"", HALF_HEAD, HALF_HEAD):
            sockets += [open_sockets.enter_context(connect(url, first)) for _ in range(100)]
            waits.append(health(url))
        last = time.monotonic()
        while not all(map(is_closed, sockets)):
            assert time.monotonic() - last < header_timeout_s + 10, "sockets stay open"
            waits.append(health(url))
            time.sleep(0.1)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert max(waits) < header_timeout_s, "an answer waited for sockets to time out"
    assert "Traceback" not in errors
    assert "out of system resource" not in errors


def test_the_stack_is_the_one_that_was_asked_for(slow_server, stack):
    server = slow_server()
    with connect(server.url, HALF_HEAD):
        wait_until(lambda: len(server._connections) == 1)
        (accepted,) = server._connections._connections
        names = type(server._loop).__module__.split(".")[0], type(accepted._http).__name__
    assert names == {"fast": ("uvloop", "BoundedHttpTools"), "plain": ("asyncio", "H11Protocol")}[stack]


def read_all(connection: socket.socket) -> bytes:
    """What arrives until the other side closes or resets the connection."""
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionError):
        parts += iter(lambda: connection.recv(65_536), b"")
    return b"".join(parts)


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "a header": (HEALTH + b"X-Long: ", b"a" * 1000),
    "headers": (HEALTH, b"X-Short: a\r\n" * 100),
    "a name": (HEALTH, b"a" * 1000),
    "an address": (b"GET /", b"a" * 1000),
    "a second head": (HEALTH + b"\r\n" + HEALTH + b"X-Long: ", b"a" * 1000),
    "a trailer": (CHUNKED + b"1\r\n{\r\n0\r\nX-Long: ", b"a" * 1000),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"X-Short: a\r\n" * 100),
    "an extension of a chunk": (CHUNKED + b"1;", b"a" * 1000),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_is_no_body_is_bounded(slow_server, kind):
    """One answer 400 and a closed connection, long before a time limit."""
    server, (begin, more) = slow_server(header_timeout_s=100, body_timeout_s=100), ENDLESS[kind]
    with connect(server.url, begin) as connection:
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not select.select([connection], [], [], 0.002)[0] or (kind == "a second head" and sent < 100_000):
                connection.sendall(more)
                sent += len(more)
                assert sent < 1_000_000, "it is read without an end"
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 400 ") == 1 or (not answer and sent > connections.HEAD_BYTES)
    assert answer.count(b"HTTP/1.1 ") == 1 + (kind == "a second head")
    assert health(server.url) < 30


def test_a_long_head_in_one_part_of_which_all_arrives_at_once_is_bounded(slow_server):
    server = slow_server()
    with connect(server.url, HALF_HEAD + b"a" * 2**20) as connection:
        assert read_all(connection).count(b"HTTP/1.1 ") <= 1
    with connect(server.url, HALF_HEAD + b"a" * 8000 + b"\r\n\r\n") as connection:
        assert b" 200 OK" in connection.recv(65_536)


@pytest.mark.parametrize("upgrade", [b"Upgrade: h2c", b"upgrade:websocket"])
def test_an_offer_of_another_protocol_is_ignored(slow_server, upgrade):
    """Java's client offers HTTP/2 with every request, and httptools reads no body after the offer."""
    server = slow_server()
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).encode()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\n" + upgrade
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%b\r\nContent-Length: %d\r\n\r\n" % (offer, len(body))
    with connect(server.url) as connection:
        for part in (head + body, head, body, head[:40], head[40:] + body):
            connection.sendall(part)
            if part.endswith(body):
                assert connection.recv(65_536).startswith(b"HTTP/1.1 200 OK")
    # the second request of a connection: an answer or a refusal, but not a request without its body
    with connect(server.url, HEALTH + b"\r\n") as connection:
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(head + body)
        answer = connection.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 200 OK") or (answer.count(b" 400 ") == 1 and not read_all(connection))


@pytest.mark.parametrize("first", [b"\x16\x03\x01\x02\x00\x01", b"hello\n\n", b"GET /\r\n\r\n"])
def test_what_is_not_http_is_refused_at_once(slow_server, first):
    server = slow_server(header_timeout_s=100)
    with connect(server.url, first) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_lines_may_end_without_a_return(slow_server):
    with connect(slow_server().url, b"GET /health HTTP/1.1\nHost: x\n\n") as connection:
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 OK")


def test_requests_that_are_sent_at_once_are_answered_in_order_and_few_are_parsed(slow_server, stack):
    """Each parsed request takes two kilobytes, so those that wait must not all be parsed."""
    server = slow_server()
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    most = 0
    with connect(server.url) as connection:
        with held(server):
            connection.sendall(head + body + (HEALTH + b"\r\n") * 2000)
            wait_until(lambda: server.service.worker.num_open == 1)
            (accepted,) = server._connections._connections
            time.sleep(0.2)
            most = len(accepted._http.pipeline) if stack == "fast" else 0
        answers, end = b"", time.monotonic() + 60
        while answers.count(b"HTTP/1.1 200 OK") < 2001:
            answers += connection.recv(65_536)
            assert time.monotonic() < end
    assert answers.index(b'"text_completion"') < answers.index(b'"status"')
    assert most < 200


def test_requests_behind_an_open_answer_have_a_bound(slow_server, monkeypatch, stack):
    """Each request that ends lets the transport read on, so a pause of reading alone would bound nothing."""
    monkeypatch.setattr(connections, "UNPARSED_BYTES", 20_000)
    server = slow_server()
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with held(server), connect(server.url, post) as connection:
        wait_until(lambda: server.service.worker.num_open == 1)
        connection.sendall((HEALTH + b"\r\n") * 2000)
        if stack == "fast":
            wait_until(lambda: is_closed(connection))
            wait_until(lambda: server.service.worker.num_open == 0)
        else:
            time.sleep(0.3)
            assert not is_closed(connection)


def test_few_connections_are_accepted_in_one_round(slow_server, monkeypatch):
    """200 arrive while the event loop is busy. They would take 200 descriptors before any of them is counted."""
    few_connections(monkeypatch, total=4, per_address=4)
    server = slow_server()
    health(server.url)
    counts: list[int] = []
    released = threading.Event()

    def count() -> None:
        counts.append(len(os.listdir("/dev/fd")))
        server._loop.call_soon(count)

    def block() -> None:
        released.wait()
        server._loop.call_soon(count)

    with contextlib.ExitStack() as open_sockets:
        server._loop.call_soon_threadsafe(block)
        clients = [open_sockets.enter_context(connect(server.url)) for _ in range(200)]
        before = len(os.listdir("/dev/fd"))
        released.set()
        wait_until(lambda: sum(map(is_closed, clients)) >= 196)
    assert max(counts) - before <= 4 + connections.SPARE_DESCRIPTORS


def test_a_process_without_free_descriptors_accepts_again_later(slow_server, monkeypatch, caplog):
    monkeypatch.setattr("modelwright.serve.server.OUT_OF_FILES_PAUSE_S", 0.2)
    server = slow_server()
    listening = server._socket

    class Full:
        """A socket whose first connection finds no free descriptor."""

        def accept(self) -> tuple[socket.socket, object]:
            server._socket = listening
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self) -> int:
            return listening.fileno()

    server._socket = Full()  # type: ignore[assignment]
    assert health(server.url) >= 0.2
    assert "no connections are accepted for 0.2s: Too many open files" in caplog.text


def test_a_reply_is_one_part_and_so_is_the_end_of_a_stream(slow_server, monkeypatch):
    sent: list[bytes] = []

    class Recorded(connections._RoundTransport):
        def _flush(self) -> None:
            sent.append(b"".join(self._parts))
            super()._flush()

    monkeypatch.setattr(connections, "_RoundTransport", Recorded)
    server = slow_server()
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    (reply,) = [part for part in sent if part]
    assert b"200 OK" in reply
    assert reply.endswith(b"}")
    sent.clear()
    httpx.post(f"{server.url}/v1/completions", json=body | {"stream": True})
    last = [part for part in sent if part][-1]
    assert last.count(b"data: ") >= 2
    assert last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_headers_that_come_byte_by_byte_run_out_of_time(slow_server):
    server = slow_server(header_timeout_s=0.5)
    with connect(server.url, HALF_HEAD) as slow, connect(server.url) as silent:
        sent = 0
        while not is_closed(slow):
            assert (sent := sent + 1) < 500, "dribbling headers keep the connection open"
            with contextlib.suppress(OSError):
                slow.send(b"a")
            time.sleep(0.05)
        wait_until(lambda: is_closed(silent))
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'modelwright_closed_connections_total{reason="header_timeout"} 2.0' in metrics


def test_a_long_answer_is_no_idle_connection(slow_server):
    server = slow_server(header_timeout_s=0.2)
    with held(server):
        body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        waiting = connect(server.url, head + body)
        wait_until(lambda: server.service.worker.num_open == 1)
        time.sleep(1)
        assert server.service.worker.num_open == 1
    with waiting:
        assert b"200 OK" in waiting.recv(65_536)


def test_an_answer_that_nobody_reads_is_dropped(slow_server):
    server = slow_server(send_timeout_s=0.4)
    with connect(server.url) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(0.2)
        page = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        reason = 'modelwright_closed_connections_total{reason="send_timeout"} 1.0'
        end = time.monotonic() + 60
        while reason not in httpx.get(f"{server.url}/metrics").text:
            assert time.monotonic() < end
            with contextlib.suppress(OSError):
                deaf.sendall(page * 100)


def few_connections(monkeypatch: pytest.MonkeyPatch, total: int, per_address: int) -> None:
    limits = connections.ConnectionLimits(total=total, per_address=per_address)
    monkeypatch.setattr("modelwright.serve.server.connection_limits", lambda config: limits)


@pytest.mark.parametrize("first", [b"", HALF_HEAD, HALF_BODY], ids=["silent", "half a head", "half a body"])
def test_a_new_connection_replaces_the_one_that_waited_longest(slow_server, monkeypatch, first):
    few_connections(monkeypatch, total=4, per_address=3)
    server = slow_server()
    with contextlib.ExitStack() as open_sockets:
        sockets = []
        for number in range(3):
            sockets.append(open_sockets.enter_context(connect(server.url, first)))
            wait_until(lambda expected=number + 1: len(server._connections) == expected)
        health(server.url)
        wait_until(lambda: is_closed(sockets[0]))
        assert not is_closed(sockets[2])


def test_a_request_that_is_not_read_yet_is_not_lost_to_a_newer_connection(slow_server, monkeypatch):
    """All arrive while the event loop is busy, so the server admits them before it reads from any."""
    few_connections(monkeypatch, total=2, per_address=2)
    server = slow_server()
    health(server.url)
    released = threading.Event()
    server._loop.call_soon_threadsafe(released.wait)
    with contextlib.ExitStack() as open_sockets:
        clients = [
            open_sockets.enter_context(connect(server.url, HEALTH + b"Connection: close\r\n\r\n")) for _ in range(6)
        ]
        released.set()
        answers = [client.recv(65_536)[:12] for client in clients]
    assert answers[:2] == [b"HTTP/1.1 200"] * 2
    assert set(answers[2:]) <= {b"HTTP/1.1 200", b"HTTP/1.1 503"}


def test_a_server_whose_connections_are_all_busy_refuses_with_503(slow_server, monkeypatch):
    few_connections(monkeypatch, total=2, per_address=2)
    server = slow_server()
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with held(server):
        busy = [connect(server.url, head + body) for _ in range(2)]
        wait_until(lambda: server.service.worker.num_open == 2)
        with connect(server.url) as refused:
            answer = refused.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After" in answer
    for connection in busy:
        with connection:
            assert b"200 OK" in connection.recv(65_536)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_ends_its_side_after_a_whole_request_gets_the_answer(slow_server, stream, version):
    server = slow_server()
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 30, "temperature": 0, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with connect(server.url) as connection:
        with held(server, after=3):
            connection.sendall(head + body)
            wait_until(lambda: server.service.worker.num_open == 1)
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.5)
            assert server.service.worker.num_open == 1
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert b" 200 OK" in answer
    assert b'"finish_reason":"length"' in answer
    assert answer.endswith(
        b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream and version == "1.1" else b"\n\n" if stream else b"}"
    )


def test_interim_responses_to_a_half_closed_client_are_skipped_by_clients(slow_server, monkeypatch):
    monkeypatch.setattr(connections, "PROBE_AFTER_S", 0.0)
    server = slow_server()
    parts = urlsplit(server.url)
    client = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    with held(server):
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "ignore_eos": True}
        client.request("POST", "/v1/completions", json.dumps(body))
        wait_until(lambda: server.service.worker.num_open == 1)
        client.sock.shutdown(socket.SHUT_WR)
        time.sleep(0.3)
    response = client.getresponse()
    assert (response.status, json.load(response)["usage"]["completion_tokens"]) == (200, 2)
    client.close()


def test_a_half_closed_client_sees_nothing_but_its_answer(slow_server):
    server = slow_server()
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with connect(server.url) as connection:
        with held(server):
            connection.sendall(head + body)
            wait_until(lambda: server.service.worker.num_open == 1)
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.5)
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_writes_to_lost_connections_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Twenty pieces of answers in the round of the event loop in which the connection is lost."""

    async def lose() -> None:
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        link = EngineLink(lambda message: None)
        link.connection_made(transport)
        http = connections._RoundTransport(transport)
        theirs.close()
        for _ in range(20):
            link.send({"abort": ["1"]})
            http.write(b"data: x")
        await asyncio.sleep(0)

    asyncio.run(lose())
    assert "raised exception" not in caplog.text


def test_too_few_open_files_are_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (MIN_CONNECTIONS, MIN_CONNECTIONS))
    with config_error("serve"):
        connection_limits(ServeConfig())
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    limits = connection_limits(ServeConfig())
    assert limits.per_address < limits.total
    assert limits.total > ServeConfig().max_queued + ServeConfig().engine.max_num_seqs


def test_body_limits_are_those_that_are_documented(server: ServerThread):
    documented = "24,576 at 512 tokens", "55,296 at 512 tokens and 16 prompts"
    limits = replace(server.service.model.limits, max_body_bytes=ServeConfig().max_body_bytes)
    assert [f"{limits.body_bytes(1):,}", f"{limits.body_bytes(16):,}"] == [text.split()[0] for text in documented]
    text = " ".join((Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8").split())
    assert all(part in text for part in documented)
