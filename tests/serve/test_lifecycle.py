"""Overload, disconnects, draining, keys, and what the log may hold."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from modelwright.compress.int8 import Int8WeightsConfig, quantize_model, save_int8
from modelwright.serve.config import ServeConfig
from modelwright.serve.server import ServerThread
from refusals import config_error
from serve.conftest import make_model
from serve.patience import held, wait_until

LONG = {"model": "tiny", "prompt": "the quick", "max_tokens": 1800, "temperature": 0}


def post(url: str, **options) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=LONG | options, timeout=120)


def test_full_queue_is_429_with_retry_after(slow_server):
    server = slow_server(max_queued=1)
    refusals = 'modelwright_http_requests_total{method="POST",route="/v1/completions",status="429"} '

    def retried() -> bool:
        with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=8) as client:
            return bool(client.completions.create(model="tiny", prompt="a", max_tokens=1).choices)

    with ThreadPoolExecutor() as pool:
        with held(server):
            running = [pool.submit(post, server.url, max_tokens=5) for _ in range(2)]
            wait_until(lambda: server.service.worker.num_open == 2)
            refused = post(server.url, max_tokens=1)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert "queue is full" in error["message"]
            later = pool.submit(retried)
            wait_until(lambda: refusals + "2.0" in httpx.get(f"{server.url}/metrics").text)
        assert later.result()
        assert [future.result().status_code for future in running] == [200, 200]


def test_a_request_that_would_wait_too_long_is_refused_at_once(slow_server):
    server = slow_server(max_wait_s=0.5)
    worker = server.service.worker
    worker.typical_answer_s = 0.2
    with ThreadPoolExecutor() as pool:
        with held(server):
            running = [pool.submit(post, server.url, max_tokens=5) for _ in range(2)]
            wait_until(lambda: worker.num_open == 2)
            worker.typical_answer_s = 1.0  # so the third answer would begin in two seconds
            refused = post(server.url, max_tokens=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "would begin in 2 s" in refused.json()["error"]["message"]
            assert 2 <= int(refused.headers["retry-after"]) <= 3
            worker.typical_answer_s = 0.2
            running.append(pool.submit(post, server.url, max_tokens=5))
            wait_until(lambda: worker.num_open == 3)
        assert [future.result().status_code for future in running] == [200, 200, 200]
    assert post(server.url, max_tokens=1, n=2).status_code == 200, "nothing is before it"


def test_the_pace_is_that_of_the_answers_that_ended_while_others_waited(slow_server):
    server = slow_server(max_running=2)
    worker = server.service.worker
    worker.typical_answer_s = 3.0
    assert worker.pace_s == 1.5, "half of an answer for each of two places"
    with ThreadPoolExecutor() as pool:
        with held(server):
            running = [pool.submit(post, server.url, max_tokens=5) for _ in range(4)]
            wait_until(lambda: worker.num_open == 4)
        assert [future.result().status_code for future in running] == [200] * 4
    wait_until(lambda: worker.num_open == 0)
    assert worker.pace_s == worker.typical_answer_s / 2, "what ended while a place was free says nothing"
    now = time.monotonic()
    for last, pace_s in ((2.0, 1.0), (6.0, 2.0)):  # the second: an engine that has stopped ends no more answers
        worker._ends.extend([now - last - 2.0] * 2 + [now - last] * 2)
        assert worker.pace_s == pytest.approx(pace_s, rel=0.1)
        worker._ends.clear()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("stack")
def test_a_client_that_leaves_frees_its_place(slow_server, stream):
    server = slow_server()
    with held(server, after=20):
        if stream:
            url, body = f"{server.url}/v1/completions", LONG | {"stream": True}
            with httpx.stream("POST", url, json=body, timeout=120) as response:
                assert next(response.iter_lines()).startswith("data: ")
        else:
            body = json.dumps(LONG).encode()
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
                wait_until(lambda: server.service.worker.num_open == 1)
        wait_until(lambda: server.service.worker.num_open == 0)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'modelwright_generations_total{reason="aborted"} 1.0' in metrics
    assert post(server.url, max_tokens=2).status_code == 200
    stats = server.service.worker.client.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.usefixtures("stack")
def test_drain_finishes_running_answers_and_refuses_new_ones(slow_server):
    server = slow_server(drain_timeout_s=200)
    with ThreadPoolExecutor() as pool:
        with held(server, after=20):
            running = pool.submit(post, server.url, max_tokens=100)
            wait_until(lambda: server.service.worker.num_open == 1)
            server.stop_soon()
            wait_until(lambda: server.service.is_draining)
            refused = post(server.url, max_tokens=1)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert httpx.get(f"{server.url}/health").json()["status"] == "draining"
            assert not running.done()
        answer = running.result()
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 100
    assert server.join(120)


@pytest.mark.usefixtures("stack")
def test_drain_is_bounded_in_time(slow_server):
    server = slow_server(drain_timeout_s=0.2, max_running=4)

    def read() -> list[str]:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=120
        ) as response:
            return [line for line in response.iter_lines() if line]

    with ThreadPoolExecutor() as pool, held(server, after=20):
        events = pool.submit(read)
        wait_until(lambda: server.service.worker.num_open == 1)
        server.stop_soon()
        assert server.join(120), "an answer that never ends must not keep the server"
        assert "shutting down" in events.result()[-2]


def reload_by_signal(process: subprocess.Popen, url: str, folder: Path) -> None:
    """Put other weights in the folder, as a training stage does, and let the server reload them."""

    def version() -> str:
        return httpx.get(f"{url}/readyz", timeout=60).json()["version"]

    before, other = version(), folder.parent / "other"
    save_int8(quantize_model(make_model(320, seed=8), Int8WeightsConfig()), other)
    os.replace(other / "model.safetensors", folder / "model.safetensors")
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: version() != before)


@pytest.mark.slow
def test_sigterm_drains_and_exits_with_zero(model_folder, stack):
    program = (
        "import logging, pathlib, sys\n"
        "if sys.argv[2] == 'plain':\n"
        "    sys.modules['uvloop'] = sys.modules['httptools'] = None\n"
        "from modelwright.serve.config import ServeConfig\n"
        "from modelwright.serve.load import ModelSource\n"
        "from modelwright.serve.server import run_server\n"
        "logging.basicConfig(level='INFO', stream=sys.stderr)\n"
        "source = ModelSource(name='tiny', folder=pathlib.Path(sys.argv[1]))\n"
        "run_server(source, ServeConfig(port=0, api_key_env='KEY'), model_name='tiny',\n"
        "           announce=lambda line: print(line, flush=True))\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KEY": "hush-hush"}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(model_folder), stack],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+:\d+", line)
            assert found, line
            reload_by_signal(process, found.group(), model_folder)
            with OpenAI(base_url=f"{found.group()}/v1", api_key="hush-hush", max_retries=0) as client:
                chunks = client.completions.create(model="tiny", prompt="private words", max_tokens=250, stream=True)
                first = next(iter(chunks))
                process.send_signal(signal.SIGTERM)
                rest = list(chunks)
                assert first.choices
                assert rest[-1].choices[0].finish_reason in ("length", "stop")
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "POST /v1/completions 200" in errors
    assert "hush" not in errors
    assert "private" not in errors
    assert "Traceback" not in errors


def test_api_key_is_required_and_never_logged(slow_server, monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", "s3cret-value")
    caplog.set_level(logging.DEBUG)
    server = slow_server(api_key_env="MY_KEY")
    with OpenAI(base_url=f"{server.url}/v1", api_key="wrong-key", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        with pytest.raises(openai.AuthenticationError):
            client.completions.create(model="tiny", prompt="a")
    with OpenAI(base_url=f"{server.url}/v1", api_key="s3cret-value", max_retries=0) as client:
        assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices
    assert httpx.post(f"{server.url}/v1/completions", json=LONG).status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("modelwright"))
    assert "/v1/completions 401" in ours
    assert "s3cret" not in ours
    assert "wrong-key" not in ours
    assert "s3cret" not in repr(server.service)


def test_missing_key_and_taken_port_say_what_to_do(server: ServerThread):
    taken = int(server.url.rsplit(":", 1)[1])
    arguments = (server.service.worker.client, server.service.model.tokenizer)
    with config_error("port", match="choose another port"):
        ServerThread(*arguments, ServeConfig(port=taken), model_name="tiny")
    with config_error("api_key_env", match="NO_SUCH_KEY is not set"):
        ServerThread(*arguments, ServeConfig(port=0, api_key_env="NO_SUCH_KEY"), model_name="tiny")


@pytest.mark.usefixtures("stack")
def test_slow_body_times_out(slow_server):
    server = slow_server(body_timeout_s=0.2)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in connection.recv(4096)


def test_an_engine_that_fails_is_reported(slow_server, monkeypatch, caplog):
    server = slow_server()

    def broken():
        raise RuntimeError("no more electrons")

    monkeypatch.setattr(server.service.worker.client.engine, "step", broken)
    assert post(server.url).status_code == 500
    assert httpx.get(f"{server.url}/health").status_code == 503
    assert post(server.url).json()["error"]["code"] == "engine_failed"
    assert "no more electrons" in caplog.text


def test_the_event_loop_stays_responsive(slow_server):
    server = slow_server(max_running=8)

    async def measure() -> tuple[float, float]:
        """Seconds that nine of ten requests take at most during eight answers, and of the answers."""
        async with httpx.AsyncClient(timeout=120) as client:
            started = time.monotonic()
            work = [
                asyncio.create_task(client.post(f"{server.url}/v1/completions", json=LONG | {"max_tokens": 250}))
                for _ in range(8)
            ]
            times: list[float] = []
            while not all(task.done() for task in work):
                asked = time.monotonic()
                await client.get(f"{server.url}/health")
                times.append(time.monotonic() - asked)
                await asyncio.sleep(0.01)
            assert all(task.result().status_code == 200 for task in work)
            return sorted(times)[9 * (len(times) - 1) // 10], time.monotonic() - started

    most_s, whole_s = asyncio.run(measure())
    assert most_s < whole_s / 2
