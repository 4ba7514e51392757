"""What operators see of one server: its Prometheus metrics, in a separate registry, and its log, as text or as JSON.

Metrics that vLLM has as well appear a second time under vLLM's names, so that dashboards and autoscalers made for it
work here.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from modelwright.infer.engine import EngineStats
from modelwright.serve.config import LogFormat

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_FINE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)

NO_LOAD = EngineStats()


class AnswerMetrics:
    """Counts answers to users, and measures their latency in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.finished = counter(
            "modelwright_generations", "Finished answers by reason (stop, length, aborted, error)", ["reason"]
        )
        self.prompt_tokens = counter("modelwright_prompt_tokens", "Tokens of prompts taken in")
        self.output_tokens = counter("modelwright_output_tokens", "Tokens generated")
        self.first_token = histogram(
            "modelwright_time_to_first_token_seconds", "Arrival to first token", buckets=_SECONDS
        )
        self.next_token = histogram(
            "modelwright_inter_token_seconds", "Between tokens of one answer", buckets=_FINE_SECONDS
        )
        self.duration = histogram("modelwright_answer_seconds", "Arrival to last token", buckets=_SECONDS)


class EngineMetrics:
    """Measures the load of all engines together, and counts lost engines and moved answers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self.running = gauge("modelwright_running_answers", "Answers being computed")
        self.waiting = gauge("modelwright_waiting_answers", "Answers in the queue")
        self.preemptions = gauge(
            "modelwright_preemptions", "Answers put back to the queue for lack of cache since the start"
        )
        self.kv_blocks = gauge("modelwright_kv_blocks", "Blocks of the key/value cache", ["state"])
        self.kv_usage = gauge("modelwright_kv_cache_usage_ratio", "Used share of the key/value cache, 0 to 1")
        self.prefix_queries = counter("modelwright_prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = counter("modelwright_prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.drafts = counter("modelwright_drafts", "Drafts of guessed tokens that were verified")
        self.draft_tokens = counter("modelwright_draft_tokens", "Guessed tokens that were verified")
        self.accepted_tokens = counter("modelwright_accepted_tokens", "Guessed tokens that were right")
        self.up = gauge("modelwright_engines", "Engines that run")
        self.failures = counter(
            "modelwright_engine_failures", "Lost engines by reason (died, wedged, outdated)", ["reason"]
        )
        self.moved_answers = counter(
            "modelwright_moved_answers",
            "Answers of lost or failing engines by outcome (continued, retried, lost)",
            ["outcome"],
        )
        self._stats: dict[str, EngineStats] = {}

    def observe(self, engine_name: str, stats: EngineStats) -> None:
        """Updates the metrics from one engine's figures; the metrics are sums over all engines."""
        # engines report totals since their start, and counters can only be increased
        before = self._stats.get(engine_name, NO_LOAD)
        self._stats[engine_name] = stats
        self.preemptions.inc(stats.num_preemptions - before.num_preemptions)
        self.prefix_queries.inc(stats.num_prefix_queries - before.num_prefix_queries)
        self.prefix_hits.inc(stats.num_prefix_hits - before.num_prefix_hits)
        self.drafts.inc(stats.num_drafts - before.num_drafts)
        self.draft_tokens.inc(stats.num_draft_tokens - before.num_draft_tokens)
        self.accepted_tokens.inc(stats.num_accepted_tokens - before.num_accepted_tokens)
        self._set_load()

    def forget(self, engine_name: str) -> None:
        """Removes an engine that has ended."""
        self._stats.pop(engine_name, None)
        self._set_load()

    def _set_load(self) -> None:
        engines = self._stats.values()
        num_blocks, num_free = (sum(e.num_blocks for e in engines), sum(e.num_free_blocks for e in engines))
        self.up.set(len(engines))
        self.running.set(sum(e.num_running for e in engines))
        self.waiting.set(sum(e.num_waiting for e in engines))
        self.kv_blocks.labels("free").set(num_free)
        self.kv_blocks.labels("used").set(num_blocks - num_free)
        self.kv_usage.set(1 - num_free / num_blocks if num_blocks else 0)


class VersionMetrics:
    """Names the version of the model in service, and counts reloads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self.info = gauge("modelwright_model_info", "The version that new requests get, with the value 1", ["version"])
        self.reloads = counter("modelwright_reloads", "Reloads of the model by outcome (done, failed)", ["outcome"])

    def show(self, version: str) -> None:
        """Sets the version that new requests get from now on."""
        self.info.clear()  # the previous version must not keep the value 1
        self.info.labels(version).set(1)


class Metrics:
    """All metrics of a server, by subject."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        self.http_requests = counter(
            "modelwright_http_requests", "Finished HTTP requests", ["route", "method", "status"]
        )
        self.connections = Gauge("modelwright_connections", "Open connections", registry=self.registry)
        self.closed_connections = counter(
            "modelwright_closed_connections",
            "Connections closed by the server (header_timeout, send_timeout, replaced, refused)",
            ["reason"],
        )
        self.answers = AnswerMetrics(self.registry)
        self.engines = EngineMetrics(self.registry)
        self.versions = VersionMetrics(self.registry)
        self.logged_requests = counter("modelwright_logged_requests", "Requests written to the request log")
        self.unlogged_requests = counter(
            "modelwright_unlogged_requests",
            "Requests or feedback that the request log lost by reason (queue_full, failed, user_cap, redaction_failed)",
            ["reason"],
        )
        self.ab_requests = counter("modelwright_ab_requests", "Requests of A/B tests by arm (A, B)", ["arm"])
        self.ab_uncounted = counter(
            "modelwright_ab_uncounted",
            "Requests that the state of an A/B test lost by reason (queue_full, failed)",
            ["reason"],
        )
        self.ab_rollbacks = counter(
            "modelwright_ab_rollbacks",
            "A/B tests ended by a guard (sample_ratio, error_limit, errors, latency, quality)",
            ["reason"],
        )
        self.ab_shadows = counter(
            "modelwright_ab_shadows",
            "Copies of requests to B by outcome (answered, failed, refused, preempted, dropped, same, different)",
            ["outcome"],
        )
        self.registry.register(VllmNames(model_name, self.answers, self.engines))


class VllmNames(Collector):
    """Reports our values under vLLM's metric names and label (vllm.v1.metrics.loggers)."""

    def __init__(self, model_name: str, answers: AnswerMetrics, engines: EngineMetrics) -> None:
        self._label = {"model_name": model_name}
        self._sources: dict[str, tuple[str, Collector]] = {
            "num_requests_running": ("gauge", engines.running),
            "num_requests_waiting": ("gauge", engines.waiting),
            "kv_cache_usage_perc": ("gauge", engines.kv_usage),
            "gpu_cache_usage_perc": ("gauge", engines.kv_usage),
            "num_preemptions": ("counter", engines.preemptions),
            "prefix_cache_queries": ("counter", engines.prefix_queries),
            "prefix_cache_hits": ("counter", engines.prefix_hits),
            "spec_decode_num_drafts": ("counter", engines.drafts),
            "spec_decode_num_draft_tokens": ("counter", engines.draft_tokens),
            "spec_decode_num_accepted_tokens": ("counter", engines.accepted_tokens),
            "prompt_tokens": ("counter", answers.prompt_tokens),
            "generation_tokens": ("counter", answers.output_tokens),
            "time_to_first_token_seconds": ("histogram", answers.first_token),
            "inter_token_latency_seconds": ("histogram", answers.next_token),
            "time_per_output_token_seconds": ("histogram", answers.next_token),
            "e2e_request_latency_seconds": ("histogram", answers.duration),
        }

    def collect(self) -> Iterator[Metric]:
        for name, (kind, source) in self._sources.items():
            for metric in source.collect():
                renamed = Metric(f"vllm:{name}", metric.documentation, kind)
                for sample in metric.samples:
                    # vLLM does not export the times at which metrics were created
                    suffix = sample.name.removeprefix(metric.name)
                    if suffix != "_created":
                        # some of our gauges, such as preemptions, are counters in vLLM, whose samples end in _total
                        suffix = "_total" if kind == "counter" else suffix
                        renamed.add_sample(renamed.name + suffix, self._label | sample.labels, sample.value)
                yield renamed


@dataclass
class RequestTimer:
    """Measures the latencies of one answer."""

    metrics: AnswerMetrics
    started: float = field(default_factory=time.perf_counter)
    last_token: float = 0.0

    def token(self) -> None:
        now = time.perf_counter()
        self.metrics.output_tokens.inc()
        if self.last_token:
            self.metrics.next_token.observe(now - self.last_token)
        else:
            self.metrics.first_token.observe(now - self.started)
        self.last_token = now

    def end(self, reason: str) -> float:
        """Records the end of the answer and returns the seconds since it was requested."""
        elapsed_s = time.perf_counter() - self.started
        self.metrics.finished.labels(reason).inc()
        self.metrics.duration.observe(elapsed_s)
        return elapsed_s


ROOT = "modelwright.serve"
ID_HEADER = "X-Request-Id"
ID_SCOPE = "modelwright.request_id"
"""Key of the request's id in its ASGI scope."""

CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Ids that clients may choose for their requests."""
_FIELDS = "modelwright_fields"


def with_fields(**fields: Any) -> dict[str, Any]:
    """Returns the `extra` of a log call that adds these fields to its JSON line."""
    return {_FIELDS: fields}


class JsonLines(logging.Formatter):
    """Formats a log line as a JSON object: time, level, logger, message, the call's fields, a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= vars(record).get(_FIELDS, {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


@contextmanager
def log_to_stderr(form: LogFormat) -> Iterator[None]:
    """Sends the server's log to standard error, unless the program has configured logging itself."""
    log = logging.getLogger(ROOT)
    if logging.root.handlers or log.handlers:
        yield
        return
    handler, level = logging.StreamHandler(sys.stderr), log.level
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
