"""What one request may bring is bounded before anything is built per item, and large bodies stop nobody's stream."""

import http.client
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from modelwright.model.hf import save_model
from modelwright.pipeline.stages.serve import start_server
from modelwright.serve.api.chat import ChatRequest
from modelwright.serve.api.completions import CompletionRequest
from modelwright.serve.api.parsing import parse_request
from modelwright.serve.config import ServeConfig
from modelwright.serve.errors import ApiError
from modelwright.serve.limits import Limits
from modelwright.serve.server import ServerThread
from serve.conftest import make_model, make_tokenizer

LIMITS = Limits(context=100, max_choices=4, max_token_bytes=10, max_body_bytes=4_000_000)

TOO_MUCH = [
    (CompletionRequest, {"prompt": "a" * 1001}, "prompt", "at most 10 bytes"),
    (CompletionRequest, {"prompt": ["a", "a" * 1001]}, "prompt", "at most 10 bytes"),
    (CompletionRequest, {"prompt": ["a"] * 5}, "n", "may be at most 4"),
    (CompletionRequest, {"prompt": [1] * 100}, "prompt", "100 token ids"),
    (CompletionRequest, {"prompt": [[1], [1] * 100]}, "prompt", "100 token ids"),
    (CompletionRequest, {"prompt": "a", "stop": ["a"] * 2000}, "stop", "2000 entries"),
    (CompletionRequest, {"prompt": "a", "metadata": {str(i): "" for i in range(2000)}}, "metadata", "2000 entries"),
    (CompletionRequest, {"prompt": "a"} | {f"x{i}": 1 for i in range(2000)}, "x0", "Unknown field"),
    (ChatRequest, {"messages": [{"role": "user", "content": "a"}] * 100}, "messages", "100 messages"),
    (ChatRequest, {"messages": [{"role": "user", "content": "a" * 501}] * 2}, "messages", "1002 characters"),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 501}] * 2}]},
        "messages",
        "1002 characters",
    ),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100}]},
        "messages",
        "100 parts",
    ),
    (ChatRequest, {"messages": [{"role": "user"} | {f"x{i}": 1 for i in range(20)}]}, "messages", "21 fields"),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": "a", "annotations": [1] * 2000}]},
        "messages",
        "2000 entries",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "param", "words"), TOO_MUCH, ids=[words for *_, words in TOO_MUCH])
def test_more_than_the_context_can_hold_is_refused_before_it_is_validated(kind, fields, param, words, monkeypatch):
    def validate(*arguments: object) -> None:
        raise AssertionError("counts are checked first")

    monkeypatch.setattr(kind, "model_validate", validate)
    with pytest.raises(ApiError, match=words) as caught:
        parse_request(kind, json.dumps({"model": "tiny"} | fields).encode(), LIMITS)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_what_the_context_can_hold_is_read():
    prompts = ["a" * 1000, "b"] * 2
    assert parse_request(CompletionRequest, json.dumps({"model": "m", "prompt": prompts}).encode(), LIMITS)
    turns = [{"role": "user", "content": "a" * 10}] * 99
    assert parse_request(ChatRequest, json.dumps({"model": "m", "messages": turns}).encode(), LIMITS)


def test_no_text_of_a_full_context_is_longer_than_the_limit(server: ServerThread):
    tokenizer, limits = server.service.model.tokenizer, server.service.model.limits
    longest = max(range(tokenizer.vocab_size), key=lambda token: len(tokenizer.token_bytes(token)) * (token > 6))
    assert limits.max_token_bytes == len(tokenizer.token_bytes(longest)) > 1
    text = tokenizer.token_text(longest) * (limits.context - 1)
    assert len(tokenizer.encode(text)) == limits.context
    assert len(text) <= limits.context * limits.max_token_bytes


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_large_for_the_context_is_413(slow_server, chunked):
    server = slow_server()
    most = server.service.model.limits.body_bytes(1)
    assert most < 100_000
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": " " * most}]}).encode()
    parts = (body[start : start + 10_000] for start in range(0, len(body), 10_000))
    refused = httpx.post(f"{server.url}/v1/chat/completions", content=parts if chunked else body, timeout=60)
    assert refused.status_code == 413
    assert f"larger than {most} bytes" in refused.json()["error"]["message"]
    assert "context of 2048 tokens" in refused.json()["error"]["message"]


def test_large_bodies_are_read_in_another_thread(slow_server, monkeypatch):
    server = slow_server()
    tokenizer, threads = server.service.model.tokenizer, []
    encode = tokenizer.encode

    def recorded(text, **flags):
        threads.append(threading.current_thread().name)
        return encode(text, **flags)

    monkeypatch.setattr(tokenizer, "encode", recorded)
    for prompt in ("a", ["the quick brown fox " * 60] * 16):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert threads[0] == "http"
    assert len(threads) == 17
    assert "http" not in threads[1:]


NEIGHBOR = """
import http.client, sys, time
kind, address = sys.argv[1:]
size = 3_999_900
body = {
    "blanks": lambda: '{"model":"m","prompt":"' + " " * size + '"}',
    "prompts": lambda: '{"model":"m","prompt":["a"' + ',"a"' * 780_000 + "]}",
    "newlines": lambda: '{"model":"m","prompt":"' + "\\\\n" * (size // 2) + '"}',
    "unknown fields": lambda: '{"model":"m",' + "".join(f'"f{i}":1,' for i in range(300_000)) + '"prompt":"a"}',
}[kind]().encode()
connection = http.client.HTTPConnection(address, timeout=120)
began = time.monotonic()
connection.request("POST", "/v1/completions", body)
print(connection.getresponse().status, time.monotonic() - began)
"""


def longest_gap(address: str, while_runs: subprocess.Popen) -> float:
    """Seconds between two tokens of a stream at most; streams follow each other until the process has ended."""
    longest = 0.0
    body = {"model": "m", "prompt": "the", "max_tokens": 300, "temperature": 0, "stream": True, "logprobs": 0}
    while True:
        connection = http.client.HTTPConnection(address, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body))
        response, last = connection.getresponse(), 0.0
        while line := response.readline():
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                longest, last = max(longest, now - last if last else 0.0), now
        connection.close()
        if while_runs.poll() is not None:
            return longest


def test_a_stream_goes_on_while_another_client_sends_4_mb(tmp_path: Path):
    folder = tmp_path / "m"
    save_model(make_model(2048), folder, eos_id=1)
    make_tokenizer().save(folder)
    with start_server(folder, ServeConfig(port=0), tmp_path, 120) as server:
        address = urlsplit(server.url).netloc
        for kind in ("blanks", "prompts", "newlines", "unknown fields"):
            command = [sys.executable, "-c", NEIGHBOR, kind, address]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as neighbor:
                noisy_s = longest_gap(address, neighbor)
                status, took_s = neighbor.communicate()[0].split()
            assert status == "413"
            # A body that is read between two tokens would hold the stream for nearly as long as its answer takes, on a
            # busy machine, too.
            assert noisy_s < max(0.5, float(took_s) / 2), kind
