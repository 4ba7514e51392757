"""Spans of requests over real HTTP: what they say, whose children they are, and that no exporter holds up an answer."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv import attributes as stable
from opentelemetry.trace import SpanKind, StatusCode

from modelwright.core.config import ConfigError
from modelwright.serve import server as application
from modelwright.serve.account.observers import Tracing, tracing_to
from modelwright.serve.config import RequestsConfig
from modelwright.serve.server import ServerThread
from refusals import config_error
from serve.patience import held, wait_until

COLLECTOR = RequestsConfig(traces="http://localhost:4318")
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
CHAT = {
    "model": "tiny", "messages": [{"role": "user", "content": "what does this do?"}], "max_tokens": 6, "seed": 3,
    "temperature": 0.5, "top_p": 0.9,
}  # fmt: skip
COMPLETION = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 5, "temperature": 0}


class Blocked(SpanExporter):
    """Hangs until it is let go, and then fails."""

    def __init__(self) -> None:
        self.is_called = threading.Event()
        self.may_go_on = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_called.set()
        assert self.may_go_on.wait(120)
        raise OSError("the collector is gone")


@pytest.fixture
def traced(slow_server, monkeypatch) -> Callable[..., ServerThread]:
    """Makes servers whose spans go to an exporter of the test."""

    def make(exporter: SpanExporter, **settings: Any) -> ServerThread:
        def tracing(endpoint: str, *, log_prompts: bool) -> Tracing:
            assert endpoint == COLLECTOR.traces
            return Tracing(exporter, log_prompts=log_prompts)

        monkeypatch.setattr(application, "tracing_to", tracing)
        return slow_server(requests=COLLECTOR, max_running=4, **settings)

    return make


def post(server: ServerThread, route: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}{route}", json=body, headers=headers, timeout=60)


CHAT_SPANS = ("POST /v1/chat/completions", "chat tiny")
COMPLETION_SPANS = ("POST /v1/completions", "text_completion tiny")


def spans_of(server: ServerThread, exporter: InMemorySpanExporter, *names: str) -> dict[str, ReadableSpan]:
    """The spans since the last call by their names, which have to be these. That of the server ends a moment after its
    client has the answer.
    """

    def spans() -> list[ReadableSpan]:
        assert server.application.tracing is not None
        assert server.application.tracing._provider.force_flush()
        return list(exporter.get_finished_spans())

    wait_until(lambda: len(spans()) >= len(names))
    found = {span.name: span for span in spans()}
    assert sorted(found) == sorted(names)
    exporter.clear()
    return found


def test_spans_follow_the_conventions(traced):
    exporter = InMemorySpanExporter()
    server = traced(exporter)
    reply = post(server, "/v1/chat/completions", CHAT, **SAMPLED).json()
    spans = spans_of(server, exporter, *CHAT_SPANS)
    outer, inner = spans["POST /v1/chat/completions"], spans["chat tiny"]
    assert (outer.kind, inner.kind) == (SpanKind.SERVER, SpanKind.INTERNAL)
    assert outer.parent is not None
    assert inner.parent is not None
    assert (f"{outer.parent.trace_id:032x}", f"{outer.parent.span_id:016x}") == (TRACE, PARENT)
    assert (inner.parent.span_id, inner.context.trace_id) == (outer.context.span_id, outer.context.trace_id)
    assert outer.start_time <= inner.start_time < inner.end_time <= outer.end_time
    assert outer.attributes["http.route"] == "/v1/chat/completions"
    assert outer.attributes["http.response.status_code"] == 200
    assert {name: inner.attributes[name] for name in inner.attributes if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "modelwright",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.response.id": reply["id"],
        "gen_ai.response.model": reply["system_fingerprint"],
        "gen_ai.response.finish_reasons": (reply["choices"][0]["finish_reason"],),
        "gen_ai.usage.input_tokens": reply["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": reply["usage"]["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    written = f"{outer.to_json()}{inner.to_json()}"
    assert "what does" not in written
    assert reply["choices"][0]["message"]["content"] not in written
    assert outer.resource.attributes["service.name"] == "modelwright"


def test_attributes_are_those_of_the_installed_conventions(traced):
    """The names, as the package of the conventions has them."""
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    for module in ("http", "url", "server", "error"):
        constants = vars(__import__(f"{stable.__name__}.{module}_attributes", fromlist=["_"]))
        known |= {value for name, value in constants.items() if name.isupper() and isinstance(value, str)}
    assert "gen_ai.usage.input_tokens" in known
    exporter = InMemorySpanExporter()
    server = traced(exporter, log_prompts=True)
    fields = {"n": 2, "top_k": 5, "frequency_penalty": 0.1, "presence_penalty": 0.1, "stream": True}
    post(server, "/v1/completions", COMPLETION | fields)
    post(server, "/v1/completions", COMPLETION | {"max_tokens": 10**6})
    post(server, "/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}})
    used: set[str] = set()
    wait_until(
        lambda: bool(server.application.tracing._provider.force_flush()) and len(exporter.get_finished_spans()) == 6
    )
    for span in exporter.get_finished_spans():
        used |= set(span.attributes)
    assert len(used) > 20
    assert used - known <= {"gen_ai.request.stream", "gen_ai.response.time_to_first_chunk"}, "newer than the package"


def test_streams_errors_and_clients_that_leave(traced):
    exporter = InMemorySpanExporter()
    server = traced(exporter)
    post(server, "/v1/completions", COMPLETION | {"stream": True, "n": 2})
    spans = spans_of(server, exporter, *COMPLETION_SPANS)
    inner = spans["text_completion tiny"]
    assert inner.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert 0 < inner.attributes["gen_ai.response.time_to_first_chunk"] < (inner.end_time - inner.start_time) / 1e9
    assert inner.attributes["gen_ai.usage.output_tokens"] == 10
    assert inner.context.trace_id == spans["POST /v1/completions"].context.trace_id
    assert inner.parent.span_id == spans["POST /v1/completions"].context.span_id

    assert post(server, "/v1/completions", COMPLETION | {"max_tokens": 10**6}).status_code == 400
    spans = spans_of(server, exporter, *COMPLETION_SPANS)
    assert spans["text_completion tiny"].attributes["error.type"] == "400"
    assert {span.status.status_code for span in spans.values()} == {StatusCode.UNSET}, "the client's error"

    with held(server, after=3):
        body = COMPLETION | {"stream": True, "max_tokens": 1000}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=SAMPLED, timeout=60) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
        wait_until(lambda: server.service.worker.num_open == 0)
    spans = spans_of(server, exporter, *COMPLETION_SPANS)
    assert spans["text_completion tiny"].attributes["error.type"] == "499"
    assert f"{spans['text_completion tiny'].context.trace_id:032x}" == TRACE

    server.service.worker.client.engine.step = lambda: 1 / 0
    assert post(server, "/v1/completions", COMPLETION).status_code == 500
    spans = spans_of(server, exporter, *COMPLETION_SPANS)
    assert {span.status.status_code for span in spans.values()} == {StatusCode.ERROR}


def test_what_is_not_traced(traced):
    exporter = InMemorySpanExporter()
    server = traced(exporter)
    for path in ("livez", "readyz", "metrics", "v1/models"):
        assert httpx.get(f"{server.url}/{path}", timeout=60).status_code == 200
    post(server, "/v1/completions", COMPLETION, traceparent=f"00-{TRACE}-{PARENT}-00")
    assert not spans_of(server, exporter), "probes, and what the caller does not sample"
    post(server, "/v1/completions", COMPLETION, traceparent="00-zzz")
    outer = spans_of(server, exporter, *COMPLETION_SPANS)["POST /v1/completions"]
    assert outer.parent is None, "a bad header begins a trace"
    refused = post(server, "/v1/feedback", {"id": "cmpl-1", "score": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "feedback_off"), "spans keep no answers"


def test_texts_are_in_spans_only_where_prompts_are_logged(traced):
    exporter = InMemorySpanExporter()
    server = traced(exporter, log_prompts=True)
    reply = post(server, "/v1/chat/completions", CHAT).json()
    inner = spans_of(server, exporter, *CHAT_SPANS)["chat tiny"]
    assert json.loads(inner.attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "what does this do?"}]}
    ]
    assert json.loads(inner.attributes["gen_ai.output.messages"]) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": reply["choices"][0]["message"]["content"]}],
            "finish_reason": reply["choices"][0]["finish_reason"],
        }
    ]


def test_an_exporter_that_hangs_and_fails_delays_no_answer(traced, monkeypatch, caplog):
    """The queue has two places, so it overflows: were any answer to wait for the exporter, this would never end."""
    for name, value in {"SCHEDULE_DELAY": "1", "MAX_QUEUE_SIZE": "2", "MAX_EXPORT_BATCH_SIZE": "1"}.items():
        monkeypatch.setenv(f"OTEL_BSP_{name}", value)
    exporter = Blocked()
    server = traced(exporter)
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: post(server, "/v1/completions", COMPLETION | {"stream": True}), range(20)))
    assert [reply.status_code for reply in replies] == [200] * 20
    assert all(reply.text.endswith("data: [DONE]\n\n") for reply in replies)
    assert exporter.is_called.wait(60)
    monkeypatch.setattr("modelwright.serve.account.observers.CLOSE_TIMEOUT_S", 0.2)
    server.stop()
    assert "some spans could not be exported" in caplog.text
    exporter.may_go_on.set()


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A collector's address, and the paths and bodies that were posted to it."""
    posted: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as receiver:
        thread = threading.Thread(target=receiver.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{receiver.server_port}", posted
        receiver.shutdown()
        thread.join()


def test_a_collector_gets_the_spans_by_the_end(slow_server, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-models")
    address, posted = collector
    server = slow_server(requests=RequestsConfig(traces=address))
    assert post(server, "/v1/completions", COMPLETION, **SAMPLED).status_code == 200
    server.stop()
    assert {path for path, _ in posted} == {"/v1/traces"}
    resources = [one for _, body in posted for one in ExportTraceServiceRequest.FromString(body).resource_spans]
    assert {(a.key, a.value.string_value) for a in resources[0].resource.attributes} >= {("service.name", "my-models")}
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == ["POST /v1/completions", "text_completion tiny"]
    assert {span.trace_id.hex() for span in spans} == {TRACE}


def test_addresses_that_cannot_be_used_are_refused(monkeypatch):
    for address, reason in {
        "localhost:4318": "must be the address of a collector",
        "grpc://localhost:4317": "must be the address of a collector",
        "http://[localhost:4318": "must be the address of a collector",
        "http://localhost:port": "must be the address of a collector",
        "http://localhost:4318?token=secret": "must be the address of a collector",
        "http://me:secret@localhost:4318": "OTEL_EXPORTER_OTLP_HEADERS",
    }.items():
        with pytest.raises(ConfigError, match=reason) as raised:
            tracing_to(address, log_prompts=False)
        assert "secret" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with config_error("requests.traces", match="pip install 'modelwright\\[otel\\]'"):
        tracing_to(COLLECTOR.traces, log_prompts=False)
