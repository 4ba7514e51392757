"""Prometheus metrics of one server, in a registry of their own. Those that vLLM has, too, appear a second time under
vLLM's names, so that dashboards and autoscalers made for it work here.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from modelwright.infer.engine import EngineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_FINE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


class Metrics:
    """All metrics by name. Times are in seconds."""

    def __init__(self, model_name: str) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "modelwright_http_requests", "Finished HTTP requests", ["route", "method", "status"], registry=registry
        )
        self.connections = Gauge("modelwright_connections", "Open connections", registry=registry)
        self.closed_connections = Counter(
            "modelwright_closed_connections",
            "Connections closed by the server (header_timeout, send_timeout, replaced, refused)",
            ["reason"],
            registry=registry,
        )
        self.answers = Counter(
            "modelwright_generations",
            "Finished answers by reason (stop, length, aborted, error)",
            ["reason"],
            registry=registry,
        )
        self.prompt_tokens = Counter("modelwright_prompt_tokens", "Tokens of prompts taken in", registry=registry)
        self.output_tokens = Counter("modelwright_output_tokens", "Tokens generated", registry=registry)
        self.preemptions = Gauge(
            "modelwright_preemptions",
            "Answers put back to the queue for lack of cache since the start",
            registry=registry,
        )
        self.running = Gauge("modelwright_running_answers", "Answers being computed", registry=registry)
        self.waiting = Gauge("modelwright_waiting_answers", "Answers in the queue", registry=registry)
        self.kv_blocks = Gauge("modelwright_kv_blocks", "Blocks of the key/value cache", ["state"], registry=registry)
        self.first_token = Histogram(
            "modelwright_time_to_first_token_seconds", "Arrival to first token", buckets=_SECONDS, registry=registry
        )
        self.next_token = Histogram(
            "modelwright_inter_token_seconds", "Between tokens of one answer", buckets=_FINE_SECONDS, registry=registry
        )
        self.duration = Histogram(
            "modelwright_answer_seconds", "Arrival to last token", buckets=_SECONDS, registry=registry
        )

        self.kv_usage = Gauge(
            "modelwright_kv_cache_usage_ratio", "Used share of the key/value cache, 0 to 1", registry=registry
        )
        self.prefix_queries = Counter(
            "modelwright_prefix_cache_queries", "Prompt tokens looked up in the prefix cache", registry=registry
        )
        self.prefix_hits = Counter(
            "modelwright_prefix_cache_hits", "Prompt tokens found in the prefix cache", registry=registry
        )
        registry.register(VllmNames(model_name, self))

    def observe(self, stats: EngineStats, before: EngineStats) -> None:
        """Update from an engine's figures. before: those of the last time."""
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.kv_blocks.labels("free").set(stats.num_free_blocks)
        self.kv_blocks.labels("used").set(stats.num_blocks - stats.num_free_blocks)
        self.kv_usage.set(1 - stats.num_free_blocks / stats.num_blocks)
        self.preemptions.set(stats.num_preemptions)
        self.prefix_queries.inc(stats.num_prefix_queries - before.num_prefix_queries)
        self.prefix_hits.inc(stats.num_prefix_hits - before.num_prefix_hits)

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)


class VllmNames(Collector):
    """Metrics of vLLM (its v1 loggers), with the values of ours and the label that vLLM gives them."""

    def __init__(self, model_name: str, metrics: "Metrics") -> None:
        self._label = {"model_name": model_name}
        self._sources: dict[str, tuple[str, Collector]] = {
            "num_requests_running": ("gauge", metrics.running),
            "num_requests_waiting": ("gauge", metrics.waiting),
            "kv_cache_usage_perc": ("gauge", metrics.kv_usage),
            "gpu_cache_usage_perc": ("gauge", metrics.kv_usage),
            "num_preemptions": ("counter", metrics.preemptions),
            "prefix_cache_queries": ("counter", metrics.prefix_queries),
            "prefix_cache_hits": ("counter", metrics.prefix_hits),
            "prompt_tokens": ("counter", metrics.prompt_tokens),
            "generation_tokens": ("counter", metrics.output_tokens),
            "time_to_first_token_seconds": ("histogram", metrics.first_token),
            "inter_token_latency_seconds": ("histogram", metrics.next_token),
            "time_per_output_token_seconds": ("histogram", metrics.next_token),
            "e2e_request_latency_seconds": ("histogram", metrics.duration),
        }

    def collect(self) -> Iterator[Metric]:
        for name, (kind, source) in self._sources.items():
            for metric in source.collect():
                renamed = Metric(f"vllm:{name}", metric.documentation, kind)
                for sample in metric.samples:
                    suffix = sample.name.removeprefix(metric.name)
                    if suffix != "_created":
                        suffix = "_total" if kind == "counter" else suffix
                        renamed.add_sample(renamed.name + suffix, self._label | sample.labels, sample.value)
                yield renamed


@dataclass
class RequestTimer:
    """Times one answer."""

    metrics: Metrics
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
        """Seconds since the answer was asked for."""
        elapsed_s = time.perf_counter() - self.started
        self.metrics.answers.labels(reason).inc()
        self.metrics.duration.observe(elapsed_s)
        return elapsed_s
