"""Observers of exchanges: the log of requests, answers and feedback, for monitoring and training, and OpenTelemetry
spans by the semantic conventions for HTTP servers and for generative AI.

Finished requests come from the event loop; a separate thread replaces personal data with markers (the cleaning step
`privacy`) and logs them. A POST request has a server span, whose parent is the span in its traceparent header. Answers
of completions and chat have a child span with model, parameters, tokens and finish reasons. Spans contain texts only if
`log_prompts` allows it. A server that sends spans needs the extra `otel`.
"""

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelwright.core import VERSION
from modelwright.core.artifacts import StorageError
from modelwright.core.config import ConfigError, require
from modelwright.data.clean.steps.privacy import Privacy, PrivacyConfig
from modelwright.data.document import Document
from modelwright.serve.account import request_store
from modelwright.serve.account.database import Database, DatabaseWriter, WriterBusy, open_database
from modelwright.serve.account.monitoring import Metrics
from modelwright.serve.account.request_store import RequestRecord
from modelwright.serve.api.chat import ChatRequest
from modelwright.serve.config import RequestsConfig
from modelwright.serve.errors import log, shutting_down
from modelwright.serve.service import CLIENT_LEFT, Exchange, FeedbackRequest, FinishedRequest, pseudonym

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

DAY_S = 86_400.0


class RedactionFailed(Exception):
    """A check of the privacy step raised an exception, so the text may still contain personal data."""


@dataclass(frozen=True)
class TextRedaction:
    """Replaces personal data with markers. Equal values of one record get the same marker."""

    _step: Privacy = field(default_factory=lambda: Privacy(PrivacyConfig()))

    def pair(self, prompt: str, answer: str) -> tuple[str, str]:
        """Redacts both texts. Raises `RedactionFailed` where cleaning continues, because its texts are public."""
        # one document for both texts, so that a name in the prompt and in the answer gets the same marker
        meta = {"question": prompt, "answer": answer}
        document = Document(id="", text=f"{prompt}\n\n{answer}", kind="qa", split="open", source="", meta=meta)
        redacted = self._step.redact(document)
        failures = self._step.take_counts()["failed_validators"]
        if failures:
            raise RedactionFailed(", ".join(failures))
        return redacted.meta["question"], redacted.meta["answer"]

    def text(self, text: str) -> str:
        """Redacts a single text. Raises `RedactionFailed`."""
        return self.pair(text, "")[0]


class RequestLog:
    """An `ExchangeObserver` that logs requests. The writer's thread redacts texts before they reach the database."""

    keeps_answers = True

    def __init__(self, config: RequestsConfig, metrics: Metrics) -> None:
        """Raises `ConfigError` and `StorageError` if the database cannot be used."""
        require({"requests.log": "clean"})  # which recognizes the phone numbers and identity numbers to redact
        self._config = config
        self._metrics = metrics
        self._redaction = TextRedaction()
        database = open_database(config.log, setting="requests.log")
        self._salt = request_store.create_tables(database)
        self._writer = DatabaseWriter("request log", database, dropped=self._dropped, housekeeping=self._prune)
        self.start, self.close = self._writer.start, self._writer.close

    def ended(self, exchange: Exchange, finished: FinishedRequest) -> None:
        self._writer.offer(lambda database: self._write(database, finished), self._count)

    async def take_feedback(self, feedback: FeedbackRequest) -> bool:
        redact = self._redaction.text
        try:
            return await self._writer.call(
                lambda database: request_store.set_feedback(
                    database,
                    feedback.id,
                    score=feedback.score,
                    label=feedback.label and redact(feedback.label),
                    text=feedback.text and redact(feedback.text),
                )
            )
        except (WriterBusy, RedactionFailed, StorageError):
            raise shutting_down("The feedback could not be written; try again later.") from None

    def _write(self, database: Database, finished: FinishedRequest) -> str:
        """Writes a request. Returns "", or the reason if it is not logged."""
        user = pseudonym(self._salt, finished.subject.user)
        # counted in the database, so that a restart does not reset the limit
        most = self._config.max_per_user
        if most and request_store.num_since(database, user, finished.time - DAY_S) >= most:
            return "user_cap"
        try:
            prompt, answer = self._redaction.pair(finished.prompt, finished.answer)
        except RedactionFailed as error:
            log.error("a request was not logged: the check of %s has failed on it", error)
            return "redaction_failed"
        record = RequestRecord(
            id=finished.id,
            time=finished.time,
            session=pseudonym(self._salt, finished.subject.session),
            user=user,
            route=finished.route,
            model=finished.model,
            version=finished.version,
            arm=finished.assignment.arm if finished.assignment else "",
            prompt=prompt,
            answer=answer,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            finish_reason=finished.finish_reason,
            status=finished.status,
            ttft_s=finished.ttft_s,
            latency_s=finished.latency_s,
        )
        request_store.insert(database, record)
        return ""

    def _count(self, lost: str) -> None:
        if lost:
            self._dropped(lost, 1)
        else:
            self._metrics.logged_requests.inc()

    def _prune(self, database: Database) -> None:
        num_deleted = request_store.delete_before(database, time.time() - self._config.retention_days * DAY_S)
        if num_deleted:
            log.info("the request log's retention has deleted %d records", num_deleted)

    def _dropped(self, reason: str, count: int) -> None:
        self._metrics.unlogged_requests.labels(reason).inc(count)


PROVIDER = "modelwright"
TRACES_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 3.0
"""Time at shutdown after which spans that are still in the queue are lost."""
OPERATIONS = {"chat": "chat", "completion": "text_completion"}
"""The convention's `gen_ai.operation.name` by name of our route."""


def tracing_to(endpoint: str, *, log_prompts: bool) -> "Tracing":
    """Returns a `Tracing` that sends spans to a collector of OTLP over HTTP. Raises `ConfigError` for a bad address and
    without the extra.

    endpoint: base address of the collector, as in the variable OTEL_EXPORTER_OTLP_ENDPOINT; secrets belong in
    `OTEL_EXPORTER_OTLP_HEADERS`.
    """
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise ConfigError("requests.traces: must be the address of a collector, such as http://localhost:4318")
    if parts.username is not None or parts.password is not None:
        text = "the address has a password, which configs would keep"
        raise ConfigError(f"requests.traces: {text}; put a header into OTEL_EXPORTER_OTLP_HEADERS")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        text = f"spans need a package that is not installed ({error.name})"
        raise ConfigError(f"requests.traces: {text}; pip install 'modelwright[otel]'") from None
    address = endpoint.rstrip("/") + TRACES_PATH
    return Tracing(OTLPSpanExporter(endpoint=address, timeout=EXPORT_TIMEOUT_S), log_prompts=log_prompts)


class Tracing:
    """An `ExchangeObserver` that creates spans. A thread of the SDK exports them from a bounded queue and drops spans
    that do not fit, so an exporter that hangs or fails delays no request.
    """

    keeps_answers = False

    def __init__(self, exporter: "SpanExporter", *, log_prompts: bool) -> None:
        from opentelemetry import context, trace
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # the later resource of a merge wins, so OTEL_SERVICE_NAME overrides our name
        named = Resource({SERVICE_NAME: PROVIDER}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=Resource.create().merge(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("modelwright.serve", VERSION)
        self._log_prompts = log_prompts
        self._context, self._trace = context, trace
        self._propagator = TraceContextTextMapPropagator()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Wraps an application so that its POST requests have spans. Probes and pages have none."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            headers = Headers(scope=scope)
            address, port = scope.get("server") or ("", None)
            attributes = {
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "url.scheme": scope["scheme"],
                "server.address": address,
                **({"server.port": port} if port else {}),
            }
            carrier = {name: headers[name] for name in self._propagator.fields if name in headers}
            parent = self._propagator.extract(carrier)
            kind = self._trace.SpanKind.SERVER
            span = self._tracer.start_span(scope["method"], context=parent, kind=kind, attributes=attributes)
            token, status = self._context.attach(self._trace.set_span_in_context(span)), CLIENT_LEFT

            async def sending(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await app(scope, receive, sending)
            finally:
                self._context.detach(token)
                # the route is known only now, because the router inside sets it in the scope
                route = getattr(scope.get("route"), "path", "")
                if route:
                    span.update_name(f"{scope['method']} {route}")
                    span.set_attribute("http.route", route)
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_attribute("error.type", str(status))
                    span.set_status(self._trace.StatusCode.ERROR)
                span.end()

        return traced

    def ended(self, exchange: Exchange, finished: FinishedRequest) -> None:
        asked, generation = exchange.asked, exchange.generation
        optional = {
            "gen_ai.request.max_tokens": asked.asked_tokens,
            "gen_ai.request.temperature": asked.temperature,
            "gen_ai.request.top_p": asked.top_p,
            "gen_ai.request.top_k": asked.top_k,
            "gen_ai.request.frequency_penalty": asked.frequency_penalty,
            "gen_ai.request.presence_penalty": asked.presence_penalty,
            "gen_ai.request.seed": asked.seed,
            "gen_ai.request.stream": asked.stream or None,
            "gen_ai.request.choice.count": asked.n if asked.n != 1 else None,
            "gen_ai.output.type": "json" if asked.response_format is not None else None,
        }
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": OPERATIONS[finished.route],
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": asked.model,
            **{name: value for name, value in optional.items() if value is not None},
        }
        if generation is not None:
            attributes |= {
                "gen_ai.response.id": finished.id,
                "gen_ai.response.model": finished.version,
                "gen_ai.response.finish_reasons": [a.finish_reason for a in generation.answers if a.finish_reason],
                "gen_ai.usage.input_tokens": finished.prompt_tokens,
                "gen_ai.usage.output_tokens": finished.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": generation.usage()["prompt_tokens_details"]["cached_tokens"],
            }
            if asked.stream and finished.ttft_s is not None:
                attributes["gen_ai.response.time_to_first_chunk"] = finished.ttft_s
        if finished.status >= 400:
            attributes["error.type"] = str(finished.status)
        if self._log_prompts:
            # prompts and answers as the convention's messages, in JSON
            if isinstance(asked, ChatRequest):
                turns = [(one["role"], one["content"]) for one in asked.plain_messages()]
            else:
                turns = [("user", text) for text in asked.texts() or [finished.prompt]]
            prompts = [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in turns]
            answers: list[dict[str, Any]] = [
                {
                    "role": "assistant",
                    "parts": [{"type": "text", "content": answer.new_text}],
                    "finish_reason": answer.finish_reason,
                }
                for answer in (generation.answers if generation else [])
            ]
            attributes["gen_ai.input.messages"] = json.dumps(prompts)
            attributes["gen_ai.output.messages"] = json.dumps(answers)
        # a stream ends outside the task of its request, where the server span is not the current one
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {asked.model}",
            context=exchange.context.run(self._context.get_current),
            kind=self._trace.SpanKind.INTERNAL,
            attributes=attributes,
            start_time=int(exchange.started_at * 1e9),
        )
        if finished.status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()

    async def take_feedback(self, feedback: FeedbackRequest) -> bool:
        return False

    async def close(self) -> None:
        """Exports the spans in the queue, within `CLOSE_TIMEOUT_S`."""
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_TIMEOUT_S)
        if closing.is_alive():
            log.warning("some spans could not be exported")
