"""Servers that the board has started: their figures, sampled while they run, and requests to them."""

import json
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from modelwright_board.files import as_list, as_number, as_object
from modelwright_board.jobs import Job, Jobs

PERIOD_S, WINDOW_S, KEPT = 2.0, 60.0, 1800
_LATENCIES = (
    ("Time to first token", "modelwright_time_to_first_token_seconds"),
    ("Time between tokens", "modelwright_inter_token_seconds"),
    ("Time of an answer", "modelwright_answer_seconds"),
)
AB_TITLE = "A/B test "
QUANTILES = ((0.5, "median"), (0.95, "95%"), (0.99, "99%"))

Metrics = Mapping[str, list[tuple[dict[str, str], float]]]


def server_url(job: Job) -> str:
    return f"http://127.0.0.1:{job.option('--port', '8000')}"


def server_jobs(jobs: Jobs) -> list[Job]:
    """Returns the servers that run, the newest first."""
    return [job for job in jobs.all() if job.is_alive and job.words[:1] == ["serve"]]


def parse_metrics(text: str) -> Metrics:
    """Parses Prometheus' text format: labels and value of each series, by name; empty if it is no such text."""
    result: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                result[one.name].append((one.labels, one.value))
    except ValueError:
        return {}
    return result


def total(metrics: Metrics, name: str) -> float:
    return sum(value for _, value in metrics.get(name, ()))


def quantile(now: Metrics, before: Metrics, name: str, share: float) -> float:
    """Returns a quantile of the observations between two scrapes, as PromQL's histogram_quantile; NaN without any."""
    earlier = {labels.get("le"): value for labels, value in before.get(f"{name}_bucket", ())}
    # float() reads "+Inf", the limit of the last bucket.
    found = ((labels.get("le", "nan"), value) for labels, value in now.get(f"{name}_bucket", ()))
    buckets = sorted((float(limit), value - earlier.get(limit, 0.0)) for limit, value in found)
    count = buckets[-1][1] if buckets else 0.0
    if count <= 0:
        return math.nan
    low = below = 0.0
    for limit, number in buckets:
        if number >= share * count:
            if limit == math.inf or number == below:
                return low
            return low + (limit - low) * (share * count - below) / (number - below)
        low, below = limit, number
    return low


class Watch:
    """Samples the servers in a background thread, so that charts have a history when a page is opened."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._client = httpx.Client(timeout=2.0, trust_env=False)
        self._samples: dict[str, deque[tuple[float, dict[str, float]]]] = {}
        self._raw: dict[str, deque[tuple[float, Metrics]]] = {}
        self.latest: dict[str, Metrics] = {}
        self._lock = threading.Lock()
        self._is_started = False

    def start(self) -> None:
        """Starts the thread, once."""
        with self._lock:
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            for job in server_jobs(self._jobs):
                self.sample(job, time.time())
            time.sleep(PERIOD_S)

    def sample(self, job: Job, now: float) -> None:
        try:
            reply = self._client.get(f"{server_url(job)}/metrics")
        except httpx.HTTPError:
            return
        if reply.status_code != 200:
            return
        metrics = parse_metrics(reply.text)
        raw = self._raw.setdefault(job.id, deque())
        while raw and now - raw[0][0] > WINDOW_S:
            raw.popleft()
        before_at, before = raw[0] if raw else (now, metrics)
        span = now - before_at
        values = {
            "Requests at once: running": total(metrics, "modelwright_running_answers"),
            "Requests at once: waiting": total(metrics, "modelwright_waiting_answers"),
            "Cache in use: share": total(metrics, "modelwright_kv_cache_usage_ratio"),
        }
        if span > 0:
            for word, name in (("answers", "output"), ("prompts", "prompt")):
                series = f"modelwright_{name}_tokens_total"
                values[f"Tokens per second: {word}"] = max(0.0, total(metrics, series) - total(before, series)) / span
            for title, name in _LATENCIES:
                for share, word in QUANTILES:
                    values[f"{title}: {word}"] = quantile(metrics, before, name, share)
        if job.option("--requests.ab_state"):
            values |= interval_values(get_json(f"{server_url(job)}/ab.json"))
        raw.append((now, metrics))
        with self._lock:
            self.latest[job.id] = metrics
            samples = self._samples.setdefault(job.id, deque(maxlen=KEPT))
            samples.append((now, {name: value for name, value in values.items() if math.isfinite(value)}))

    def last(self, job: Job) -> float:
        """Returns the time of the last sample (Unix seconds), 0 without one."""
        with self._lock:
            samples = self._samples.get(job.id)
            return samples[-1][0] if samples else 0.0

    def charts(self, job: Job, since: float, *, of_tests: bool = False) -> Sequence[Mapping[str, Any]]:
        """Returns the charts of a server, or those of its A/B tests, with the samples after `since` (Unix seconds)."""
        with self._lock:
            samples = [one for one in self._samples.get(job.id, ()) if one[0] > since]
        units = {"Requests at once": "requests", "Cache in use": "share", "Tokens per second": "tokens/s"}
        charts: dict[str, dict[str, Any]] = {}
        for moment, values in samples:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
            for name, value in values.items():
                title, _, metric = name.partition(": ")
                if title.startswith(AB_TITLE) != of_tests:
                    continue
                unit = "value" if of_tests else units.get(title, "seconds")
                fresh = {"title": title, "unit": unit, "log": False, "zero": not of_tests, "of": {}}
                chart = charts.setdefault(title, fresh)
                trace = chart["of"].setdefault(metric, {"run": job.words[1], "metric": metric, "x": [], "y": []})
                trace["x"].append(at)
                trace["y"].append(round(value, 6))
        start = -1 if since <= 0 else "9"  # text after every time: nothing that the page has is replaced
        return [
            {**chart, "traces": [{**trace, "since": start} for trace in chart.pop("of").values()]}
            for chart in charts.values()
        ]


def interval_values(answer: Any) -> dict[str, float]:
    """Returns the 95% interval of each measure of the running A/B tests, by title and curve."""
    values: dict[str, float] = {}
    for test in map(as_object, as_list(as_object(answer).get("tests"))):
        for one in map(as_object, as_list(test.get("measures")) if test.get("status") == "running" else []):
            title = f"{AB_TITLE}{test.get('name')}, {one.get('name')}".replace(": ", " ")
            values |= {f"{title}: {key}": as_number(one.get(key)) for key in ("low", "high")}
    return values


def get_json(url: str) -> Any:
    """Returns the JSON answer of a server on this machine, `None` without an answer."""
    try:
        reply = httpx.get(url, timeout=2.0, trust_env=False)
        return json.loads(reply.content) if reply.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
