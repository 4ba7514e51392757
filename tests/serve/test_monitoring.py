"""What an operator watches: probes, metrics under both names, the dashboard's queries, the log."""

import json
import logging
import re

import httpx
import pytest

from modelwright.serve.account.monitoring import JsonLines, log_to_stderr
from modelwright.serve.server import ServerThread
from serve.patience import held, wait_until

SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
METRIC_IN_QUERY = re.compile(r"\b(?:vllm:|modelwright_)\w+")
LABELS_OF_MODEL = {"route", "method", "status", "reason", "model_name", "le", "state", "version", "outcome"}


def samples(server: ServerThread, **headers: str) -> dict[str, float]:
    """All samples of a server by name, that of a labeled one with its labels."""
    text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).text
    return {name + (f"{{{labels}}}" if labels else ""): float(value) for name, labels, value in SAMPLE.findall(text)}


def labels_by_name(server: ServerThread) -> dict[str, set[str]]:
    """Every series that exists, also those without samples yet, with its labels as far as they are known."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    known: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
        for suffix in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            known[name + suffix] = set()
    for name, labels, _ in SAMPLE.findall(text):
        known.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    return known


def ask(server: ServerThread, **fields) -> httpx.Response:
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 5, "temperature": 0} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_probes_follow_the_state(slow_server, monkeypatch):
    server = slow_server(drain_timeout_s=200)

    def probe(path: str) -> tuple[int, str]:
        reply = httpx.get(f"{server.url}/{path}", timeout=60)
        body = reply.json()
        return reply.status_code, body["error"]["code"] if reply.status_code == 503 else body["status"]

    assert (probe("livez"), probe("readyz")) == ((200, "alive"), (200, "ready"))
    assert httpx.get(f"{server.url}/readyz").json()["version"] == server.service.model.fingerprint
    with held(server):
        stream = httpx.stream(
            "POST", f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "a", "stream": True}
        )
        with stream:
            wait_until(lambda: server.service.worker.num_open == 1)
            server.stop_soon()
            wait_until(lambda: server.service.is_draining)
            assert (probe("livez"), probe("readyz")) == ((200, "alive"), (503, "draining"))
            assert "shutting down" in httpx.get(f"{server.url}/readyz").json()["error"]["message"]

    broken = server = slow_server()
    monkeypatch.setattr(broken.service.worker.client.engine, "step", lambda: 1 / 0)
    assert ask(broken).status_code == 500
    assert (probe("livez"), probe("readyz")) == ((503, "broken"), (503, "broken"))


def test_metrics_have_the_names_of_vllm(slow_server):
    server = slow_server(max_running=2)
    for _ in range(3):
        assert ask(server).status_code == 200
    found = samples(server)
    label = '{model_name="tiny"}'
    same = {
        "vllm:prompt_tokens_total": "modelwright_prompt_tokens_total",
        "vllm:generation_tokens_total": "modelwright_output_tokens_total",
        "vllm:num_requests_running": "modelwright_running_answers",
        "vllm:num_requests_waiting": "modelwright_waiting_answers",
        "vllm:kv_cache_usage_perc": "modelwright_kv_cache_usage_ratio",
        "vllm:gpu_cache_usage_perc": "modelwright_kv_cache_usage_ratio",
        "vllm:num_preemptions_total": "modelwright_preemptions",
        "vllm:time_to_first_token_seconds_count": "modelwright_time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum": "modelwright_inter_token_seconds_sum",
        "vllm:time_per_output_token_seconds_count": "modelwright_inter_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count": "modelwright_answer_seconds_count",
    }
    for theirs, ours in same.items():
        assert found[theirs + label] == found[ours]
    assert found["vllm:generation_tokens_total" + label] == 15
    assert found["vllm:time_to_first_token_seconds_count" + label] == 3
    assert found["vllm:inter_token_latency_seconds_count" + label] == 12
    assert found["vllm:e2e_request_latency_seconds_sum" + label] > 0
    assert found['vllm:e2e_request_latency_seconds_bucket{le="+Inf",model_name="tiny"}'] == 3


def test_the_cache_in_use_is_a_share(slow_server):
    server = slow_server()
    usage = 'vllm:kv_cache_usage_perc{model_name="tiny"}'
    assert samples(server)[usage] == 0
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 200, "temperature": 0, "stream": True}
    with (
        held(server, after=20),
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream,
    ):
        chunks = stream.iter_bytes()  # while it lives, the client stays
        assert next(chunks)
        assert 0 < samples(server)[usage] < 1


def test_every_query_of_the_dashboard_names_what_exists(slow_server):
    server = slow_server()
    assert ask(server).status_code == 200
    known = labels_by_name(server)
    dashboard = httpx.get(f"{server.url}/grafana.json").json()
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    assert len(queries) > 15
    for query in queries:
        assert query.count("(") == query.count(")")
        names = METRIC_IN_QUERY.findall(query)
        assert names, query
        for name in names:
            assert name in known, query
        named = set(re.findall(r"(\w+)=~?\"", query)) | {
            label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")
        }
        assert named <= LABELS_OF_MODEL
        observed = set().union(*(known[name] for name in names))
        assert named <= observed or not observed, f"{query} asks for {named - observed}"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_requests_have_ids_in_answers_and_in_the_log(slow_server, caplog):
    caplog.set_level(logging.INFO)
    server = slow_server(log_prompts=True)
    named = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "abc-1.2_3"})
    assert named.headers["x-request-id"] == "abc-1.2_3"
    forged = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "abc POST / 200"}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{16}", forged)
    own = ask(server, prompt='said "hi"\n').headers["x-request-id"]
    wait_until(lambda: any("/v1/completions 200" in record.getMessage() for record in caplog.records))
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    mine = [line for line in lines if line.get("request_id") == own]
    assert [line.get("status") for line in mine] == [None, 200]
    assert '\\"hi\\"' in mine[0]["message"]
    assert (mine[1]["method"], mine[1]["route"], mine[1]["level"]) == ("POST", "/v1/completions", "INFO")
    assert mine[1]["duration_s"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", mine[1]["time"])


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_log_goes_to_standard_error(form, capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    with log_to_stderr(form):
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("modelwright.serve").exception("it failed")
    logging.getLogger("modelwright.serve").warning("not shown")
    shown = capsys.readouterr().err
    assert "not shown" not in shown.splitlines()[0]
    if form == "json":
        entry = json.loads(shown.splitlines()[0])
        assert (entry["level"], entry["message"]) == ("ERROR", "it failed")
        assert "ValueError: why" in entry["traceback"]
    else:
        assert "ERROR it failed" in shown.splitlines()[0]
