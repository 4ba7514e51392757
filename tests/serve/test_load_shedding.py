"""Refusals before a request is routed: equal to those of the whole stack, in the same order, and cheap to the rest."""

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from modelwright.serve import server as server_module
from modelwright.serve.account.monitoring import ROOT
from modelwright.serve.api import parsing
from modelwright.serve.served_model import LOOP_WAITS
from modelwright.serve.server import ServerThread
from serve.patience import held, wait_until
from serve.test_connections import connect
from serve.test_keys import write_keys

pytestmark = pytest.mark.usefixtures("stack")

ENGINE_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/score", "/v1/rerank")
BODY = {"model": "tiny", "prompt": "a", "max_tokens": 2, "ignore_eos": True, "temperature": 0}
ID = "x-request-id"


def post(url: str, key: str = "", *, path: str = ENGINE_ROUTES[0], **options) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{url}{path}", json=BODY | options, headers=headers | {ID: "fixed"}, timeout=120)


@contextmanager
def full(server: ServerThread, key: str = "") -> Iterator[None]:
    """The one place of the engine and the one of the queue are taken."""
    with ThreadPoolExecutor() as pool:
        with held(server):
            running = [pool.submit(post, server.url, key) for _ in range(2)]
            wait_until(lambda: server.service.worker.num_open == 2)
            yield
        assert [future.result().status_code for future in running] == [200, 200]


@pytest.fixture
def whole_stack(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Servers that are made from then on route every request before they refuse it."""
    return lambda: monkeypatch.setattr(server_module, "_load_shedding", lambda app, service, routes: app)


def shown(answer: httpx.Response) -> tuple[int, dict[str, str], object]:
    """Status, headers and JSON, without what differs from one call to the next."""
    headers = {name: value for name, value in answer.headers.items() if name != "date"}
    return answer.status_code, headers, answer.json()


def refusals(server: ServerThread, caplog: pytest.LogCaptureFixture) -> list[object]:
    """Every kind of refusal of every route to the engines, what they counted, and what they logged."""
    results: list[object] = []
    with full(server, "user"):
        for path in ENGINE_ROUTES:
            for key in ("", "wrong", "scrape", "user"):
                results.append((path, key, shown(post(server.url, key, path=path))))
        results += [shown(post(server.url, "user", path=path, model="absent")) for path in ENGINE_ROUTES]
        results += [shown(post(server.url, "rare")) for _ in range(2)]
        results.append(shown(httpx.get(f"{server.url}{ENGINE_ROUTES[0]}", headers={ID: "fixed"})))
        origin = {"Origin": "https://example.com", ID: "fixed", "Authorization": "Bearer user"}
        results.append(shown(httpx.post(f"{server.url}{ENGINE_ROUTES[0]}", json=BODY, headers=origin)))
        server.application.begin_drain()
        results.append(shown(post(server.url, "user")))
        results.append(shown(post(server.url)))
        server.service.is_draining = False
    scrape = {"Authorization": "Bearer scrape", ID: "fixed"}
    lines = httpx.get(f"{server.url}/metrics", headers=scrape).text.splitlines()
    results.append([line for line in lines if line.startswith("modelwright_http_requests_total")])
    fields = [vars(record)["modelwright_fields"] for record in caplog.records if "modelwright_fields" in vars(record)]
    return [*results, [{name: value for name, value in one.items() if name != "duration_s"} for one in fields]]


@pytest.mark.slow
def test_refusals_are_those_of_the_whole_stack(slow_server, whole_stack, tmp_path: Path, caplog, monkeypatch):
    monkeypatch.setattr("modelwright.serve.errors.jittered", lambda wait_s: 7)
    caplog.set_level(logging.INFO, logger=ROOT)
    keys = write_keys(tmp_path / "keys.yaml", user={}, rare={"requests_per_minute": 1}, scrape={"scopes": ["metrics"]})
    settings = {"max_queued": 1, "keys_file": keys, "cors_origins": ("https://example.com",)}
    early = refusals(slow_server(**settings), caplog)
    caplog.clear()
    whole_stack()
    late = refusals(slow_server(**settings), caplog)
    assert early == late
    statuses = [one[2][0] for one in early[: 4 * len(ENGINE_ROUTES)]]  # type: ignore[index]
    assert statuses == [401, 401, 403, 429] * len(ENGINE_ROUTES)


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    return int(head[9:12]), body


def request_bytes(body: Mapping[str, object] | bytes, *, is_chunked: bool = False) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(data)
    data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if is_chunked else data
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n%b" % (size, data)


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
def test_the_body_of_a_refused_request_is_not_the_next_request(slow_server, monkeypatch, is_chunked):
    """It is dropped as it arrives, and what it holds looks like requests."""
    server = slow_server(max_queued=1)
    num_read = 0
    read_body = parsing.read_body

    async def counted(*arguments, **options) -> bytes:
        nonlocal num_read
        num_read += 1
        return await read_body(*arguments, **options)

    monkeypatch.setattr(parsing, "read_body", counted)
    request = request_bytes(request_bytes(BODY) * 3000, is_chunked=is_chunked)
    with connect(server.url) as connection:
        with full(server):
            connection.sendall(request[:1000])
            assert read_answer(connection)[0] == 429, "the answer does not wait for the body"
            connection.sendall(request[1000:] + request_bytes(BODY))
            assert read_answer(connection)[0] == 429
        wait_until(lambda: server.service.worker.num_open == 0)
        connection.sendall(request_bytes(BODY))
        status, body = read_answer(connection)
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 2)
    assert num_read == 3, "those of the three answers"


def test_an_answer_goes_on_while_refusals_flood(slow_server):
    server = slow_server(max_queued=0)
    statuses: list[int] = []

    def flood() -> None:
        with connect(server.url) as connection:
            while server.service.worker.num_open:
                connection.sendall(request_bytes(BODY | {"prompt": "b"}) * 8)
                statuses.extend(read_answer(connection)[0] for _ in range(8))

    with ThreadPoolExecutor() as pool:
        with held(server, after=1):
            running = pool.submit(post, server.url, max_tokens=200)
            wait_until(lambda: server.service.worker.num_open == 1)
            floods = [pool.submit(flood) for _ in range(3)]
            wait_until(lambda: len(statuses) >= 24)
        answer = running.result()
        for one in floods:
            one.result()
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 200)
    assert 429 in statuses
    assert set(statuses) <= {200, 429}


def test_the_lag_of_the_event_loop_is_part_of_the_expected_wait(slow_server):
    server = slow_server(max_wait_s=1.0)
    application, lags = server.application, list[float]()

    def block() -> None:
        time.sleep(0.3)
        server._loop.call_later(0, lambda: lags.append(server.service.loop_lag_s))

    server._loop.call_soon_threadsafe(block)
    wait_until(lambda: bool(lags))
    assert lags[0] >= 0.3 - 2 * server_module.LAG_PERIOD_S

    def set_lag(seconds: float) -> None:
        assert application._lag_timer is not None
        application._lag_timer.cancel()
        server.service.loop_lag_s = seconds
        lags.append(seconds)

    server._loop.call_soon_threadsafe(set_lag, 2.0 / LOOP_WAITS)
    wait_until(lambda: lags[-1] == 2.0 / LOOP_WAITS)
    server.service.worker.typical_answer_s = 0.01
    with ThreadPoolExecutor() as pool:
        with held(server):
            running = [pool.submit(post, server.url)]  # accepted, because it waits for no other
            wait_until(lambda: server.service.worker.num_open == 1)
            refused = post(server.url)
            assert (refused.status_code, refused.headers["retry-after"]) in [(429, "1"), (429, "2")]
            assert "would begin in 2 s" in refused.json()["error"]["message"]
            server._loop.call_soon_threadsafe(set_lag, 0.0)
            wait_until(lambda: lags[-1] == 0.0)
            running.append(pool.submit(post, server.url))
            wait_until(lambda: server.service.worker.num_open == 2)
        assert [future.result().status_code for future in running] == [200, 200]
