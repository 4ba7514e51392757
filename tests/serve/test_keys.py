"""API keys: scopes, limits, what is stored; and the other ways in: TLS, CORS, the log."""

import json
import logging
import shutil
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml

from modelwright.core.config import ConfigError
from modelwright.serve.config import ServeConfig
from modelwright.serve.errors import ApiError, jittered
from modelwright.serve.keys import Caller, KeyEntry, TokenBucket, key_hash, load_keys, main
from modelwright.serve.server import ServerThread
from refusals import config_error
from serve.patience import held, wait_until


def entry(key: str, **fields) -> KeyEntry:
    return KeyEntry(name=key, sha256=key_hash(key), **fields)


def write_keys(path: Path, **keys: dict) -> str:
    entries = [{"name": key, "sha256": key_hash(key)} | fields for key, fields in keys.items()]
    path.write_text(yaml.safe_dump({"keys": entries}))
    return str(path)


def post(server: ServerThread, key: str = "", path: str = "/v1/completions", **fields) -> httpx.Response:
    body = {"model": "tiny", "prompt": "the", "max_tokens": 2} | fields
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


def test_a_bucket_refills_with_time_and_says_how_long_it_takes():
    now = [0.0]
    bucket = TokenBucket(60, clock=lambda: now[0])
    assert bucket.take(60) == 0
    assert bucket.take(6) == pytest.approx(6)
    now[0] = 5.0
    assert bucket.take(6) == pytest.approx(1)
    assert bucket.take(5) == 0
    bucket.give_back(3)
    assert bucket.take(3) == 0
    now[0] = 1000.0
    assert bucket.take(500) == 0, "more than a minute holds passes when the bucket is full"
    assert bucket.take(1) > 400
    assert TokenBucket(0).take(10**9) == 0


def test_waits_are_rounded_up_and_jittered():
    waits = {jittered(100) for _ in range(200)}
    assert min(waits) >= 100
    assert max(waits) <= 126
    assert len(waits) > 10
    assert jittered(0) == 1


def test_a_caller_holds_its_tokens_until_it_settles():
    caller = Caller(entry("a", tokens_per_minute=100, max_concurrent=3))
    first = caller.reserve(2, 80, typical_answer_s=1)
    with pytest.raises(ApiError, match="2 are open") as many:
        caller.reserve(2, 1, typical_answer_s=7)
    assert int(many.value.headers["Retry-After"]) >= 7
    with pytest.raises(ApiError, match="tokens per minute") as tokens:
        caller.reserve(1, 30, typical_answer_s=1)
    assert 6 <= int(tokens.value.headers["Retry-After"]) <= 8
    first.settle(10)
    first.settle(10)
    caller.reserve(3, 85, typical_answer_s=1)


def test_key_files_are_checked_and_hold_no_key(tmp_path: Path, capsys):
    main(["alice", "--scopes", "infer", "metrics"])
    made = capsys.readouterr()
    key = made.err.split()[-1]
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + made.out)
    assert key not in path.read_text()
    (only,) = load_keys(path)
    assert (only.name, only.scopes, only.sha256) == ("alice", ("infer", "metrics"), key_hash(key))
    wrong = [
        ([{"name": "a", "sha256": "secret"}], "64 hex digits"),
        ([{"name": "a", "sha256": key_hash("a")}, {"name": "a", "sha256": key_hash("b")}], "same name"),
        ([{"name": "a", "sha256": key_hash("a")}, {"name": "b", "sha256": key_hash("a")}], "same sha256"),
        ([{"name": "a", "sha256": key_hash("a"), "scopes": ["root"]}], "root"),
        ([{"name": "a", "sha256": key_hash("a"), "max_concurrent": -1}], "max_concurrent"),
    ]
    for entries, words in wrong:
        path.write_text(yaml.safe_dump({"keys": entries}))
        with pytest.raises(ConfigError, match=words) as caught:
            load_keys(path)
        assert str(path) in str(caught.value)
    with config_error("keys_file", match="no such file"):
        load_keys(tmp_path / "absent.yaml")


def test_scopes_and_limits_over_http(slow_server, tmp_path: Path):
    keys = write_keys(
        tmp_path / "keys.yaml",
        user={"requests_per_minute": 4},
        scrape={"scopes": ["metrics"]},
        narrow={"max_concurrent": 1},
        frugal={"tokens_per_minute": 12},
    )
    server = slow_server(keys_file=keys, max_running=4)
    assert post(server).status_code == post(server, "wrong").status_code == 401
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200
    refused = post(server, "scrape")
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    assert httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer scrape"}).status_code == 200
    assert httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer narrow"}).status_code == 403

    statuses = [post(server, "user") for _ in range(6)]
    assert [one.status_code for one in statuses] == [200] * 4 + [429] * 2
    assert 10 <= int(statuses[-1].headers["retry-after"]) <= 20
    assert post(server, "frugal", max_tokens=5).status_code == 200
    limited = post(server, "frugal", max_tokens=11)
    assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    with ThreadPoolExecutor() as pool:
        with held(server):
            running = pool.submit(post, server, "narrow")
            wait_until(lambda: server.service.worker.num_open == 1)
            assert post(server, "narrow").status_code == 429
        assert running.result().status_code == 200
    assert post(server, "narrow", max_tokens=100_000).status_code == 400
    assert post(server, "narrow").status_code == 200


def test_the_queue_is_bounded_in_tokens_too(slow_server):
    server = slow_server(max_queued_tokens=100, max_running=4)
    with ThreadPoolExecutor() as pool:
        with held(server):
            first = pool.submit(post, server, max_tokens=90)
            wait_until(lambda: server.service.worker.num_open == 1)
            refused = post(server, max_tokens=20)
            assert refused.status_code == 429
            assert "as many tokens" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
        assert first.result().status_code == 200
    assert post(server, max_tokens=200).status_code == 200, "alone, a request may have more"


def test_a_client_that_leaves_frees_the_cache_within_a_step(slow_server):
    server = slow_server()
    worker = server.service.worker
    step, abort, release = worker.client.engine.step, worker.client.engine.abort, worker.release
    steps, released, freed = [0], [], []

    def counted_step():
        steps[0] += 1
        return step()

    def counted_abort(request_id: str) -> bool:
        was_running = abort(request_id)
        freed.append((steps[0], worker.client.engine.stats().num_free_blocks)) if was_running else None
        return was_running

    def counted_release(request_id: str, answer_s: float) -> None:
        release(request_id, answer_s)
        released.append(steps[0])

    worker.client.engine.step, worker.client.engine.abort, worker.release = counted_step, counted_abort, counted_release
    body = {"model": "tiny", "prompt": "the", "max_tokens": 1800, "temperature": 0, "stream": True}
    for _ in range(3):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            assert next(response.iter_lines())
        wait_until(lambda: not worker.client.engine.has_work)
    assert len(freed) == 3
    for (at_step, num_free), asked_at in zip(freed, released, strict=True):
        assert at_step - asked_at <= 1
        assert num_free == worker.client.engine.stats().num_blocks


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl on this machine")
def test_https(slow_server, tmp_path: Path):
    files = [tmp_path / "key.pem", tmp_path / "certificate.pem"]
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(files[0]), "-out", str(files[1])]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    server = slow_server(tls_certificate=str(files[1]), tls_key=str(files[0]))
    assert server.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(files[1]))
    with httpx.Client(verify=trusted) as client:
        assert client.get(f"{server.url}/health").json()["status"] == "ok"
        body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True}
        assert client.post(f"{server.url}/v1/completions", json=body).text.endswith("[DONE]\n\n")
    for wrong in (str(tmp_path / "absent.pem"), str(files[0])):
        with pytest.raises(ConfigError, match="tls_certificate, tls_key"):
            slow_server(tls_certificate=wrong, tls_key=str(files[0]))
    with pytest.raises(ConfigError, match="needs both"):
        ServeConfig(tls_key="key.pem")


def test_other_origins_are_let_in_only_by_name(server: ServerThread, slow_server):
    headers = {"Origin": "https://example.com", "Access-Control-Request-Method": "POST"}
    opened = slow_server(cors_origins=("https://example.com",))
    for url, allowed in ((server.url, None), (opened.url, "https://example.com")):
        answer = httpx.options(f"{url}/v1/completions", headers=headers)
        assert answer.headers.get("access-control-allow-origin") == allowed
    other = httpx.options(f"{opened.url}/v1/completions", headers=headers | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_browser_may_send_what_openais_client_sends_and_read_what_it_needs(slow_server):
    opened, origin = slow_server(cors_origins=("https://example.com",)), {"Origin": "https://example.com"}
    sent = "authorization, content-type, x-request-id, x-stainless-arch, x-stainless-retry-count"
    asked = origin | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": sent}
    preflight = httpx.options(f"{opened.url}/v1/completions", headers=asked)
    assert (preflight.status_code, preflight.headers["access-control-allow-headers"]) == (200, sent)
    assert "access-control-allow-credentials" not in preflight.headers
    answer = httpx.post(f"{opened.url}/v1/completions", json={"model": "tiny", "prompt": "a"}, headers=origin)
    shown = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
    assert {"Retry-After", "X-Request-Id", "X-Model-Version"} <= shown
    assert {"x-request-id", "x-model-version"} <= answer.headers.keys()


def test_prompts_are_logged_only_if_asked_for(server: ServerThread, slow_server, caplog):
    caplog.set_level(logging.DEBUG, logger="modelwright")
    post(server, prompt="confidential")
    assert "confidential" not in caplog.text
    post(slow_server(log_prompts=True), prompt="confidential")
    assert json.dumps("confidential") in caplog.text
