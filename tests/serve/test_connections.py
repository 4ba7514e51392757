"""Connections that ask for nothing: they are closed in time and lock out nobody, whatever the limit of open files."""

import asyncio
import contextlib
import http.client
import json
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from modelwright.serve import server as server_module
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.process import EngineLink
from modelwright.serve.server import MIN_CONNECTIONS, ServerThread, connection_limits
from refusals import config_error
from serve.patience import held, wait_until

pytestmark = pytest.mark.slow

HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"

SERVER = """
import logging, pathlib, resource, sys
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
def small_server(folder: Path, header_timeout_s: float) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server that may open 128 files, as a process."""
    command = [sys.executable, "-c", SERVER, str(folder), str(header_timeout_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://\S+:\d+", process.stdout.readline())
            assert match
            yield match.group(), process
        finally:
            process.kill()


@pytest.mark.slow
def test_idle_sockets_and_half_sent_headers_lock_out_nobody(model_folder: Path):
    header_timeout_s = 5.0
    with small_server(model_folder, header_timeout_s) as (url, process), contextlib.ExitStack() as open_sockets:
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
    limits = server_module.ConnectionLimits(total=total, per_address=per_address)
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
    with connect(server.url, head + body) as connection:
        with held(server, after=3):
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
    monkeypatch.setattr(server_module, "PROBE_AFTER_S", 0.0)
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
    with connect(server.url, head + body) as connection:
        with held(server):
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
        http = server_module._OpenTransport(transport)
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
