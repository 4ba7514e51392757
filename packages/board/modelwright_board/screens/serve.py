"""Serve and watch: servers with load and latencies over time, their versions, keys, and the log of requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelwright_board import screen
from modelwright_board.files import parse_lines, read_tail
from modelwright_board.jobs import Job
from modelwright_board.masks import masked
from modelwright_board.runs import Run, shown_path
from modelwright_board.screen import Board, Query, Values
from modelwright_board.servers import server_jobs, server_url

LOG = "requests.jsonl"


def serve_words(board: Board, values: Values) -> Sequence[str]:
    words = [
        "serve", screen.required(values, "target", "Run or model folder"), "--port",
        screen.required(values, "port", "Port"),
    ]  # fmt: skip
    words += ["--int8"] if values.get("int8") else []
    log = values.get("log", "").strip()
    words += ["--requests.log", log] if log else []
    ab = values.get("ab_state", "").strip()
    return [*words, *(["--requests.ab_state", ab] if ab else []), *screen.split_words(values.get("settings", ""))]


def export_log(board: Board, values: Values) -> Sequence[str]:
    return ["requests", "export", screen.required(values, "log", "Log"), shown_path(board.own / LOG)]


def chosen_server(board: Board, query: Query) -> Job | None:
    servers = server_jobs(board.jobs)
    wanted = query.get("server", [""])[-1]
    return next((job for job in servers if job.id == wanted), servers[0] if servers else None)


def charts(board: Board, query: Query, sent: dict[str, Any]) -> Mapping[str, Any]:
    return sampled(board, query, sent, of_tests=False)


def sampled(board: Board, query: Query, sent: dict[str, Any], *, of_tests: bool) -> Mapping[str, Any]:
    """Returns the message of curves of the chosen server, or of its A/B tests."""
    board.watch.start()
    job = chosen_server(board, query)
    if job is None:
        return {}
    since = sent.get(job.id, 0.0)
    found = board.watch.charts(job, since, of_tests=of_tests)
    if found:
        sent[job.id] = board.watch.last(job)
    return {"charts": found, "axis": "time", "share": 1.0} if found else {}


def show(board: Board, query: Query) -> Mapping[str, Any]:
    board.watch.start()
    servers: list[dict[str, Any]] = []
    for job in server_jobs(board.jobs):
        metrics = board.watch.latest.get(job.id, {})
        info = (metrics.get("modelwright_model_info") or [({}, 0.0)])[0][0]
        statuses: dict[str, float] = {}
        for labels, value in metrics.get("modelwright_http_requests_total", ()):
            statuses[labels.get("status", "?")] = statuses.get(labels.get("status", "?"), 0.0) + value
        servers.append({
            "job": job, "url": server_url(job), "version": info.get("version", ""),
            "model": info.get("model", job.words[1]), "is_ready": bool(metrics), "statuses": sorted(statuses.items()),
            "keys": job.option("--keys_file"),
        })  # fmt: skip
    log = [
        {name: masked(record.get(name, ""), 300) for name in ("time", "version", "prompt", "answer", "status")}
        for record in parse_lines(read_tail(board.own, LOG, most=200_000))[-20:]
    ]
    shown = chosen_server(board, query)
    return {"servers": servers, "log": log, "shown": shown.id if shown else ""}


def state(board: Board, run: Run | None) -> str:
    number = len(server_jobs(board.jobs))
    return f"{number} running" if number else ""


SCREEN = screen.Screen(
    name="serve", title="Serve and watch", question="Does it answer, how fast, and to whom?", show=show, state=state,
    blocks=("servers", "jobs"), charts=charts, has_charts=True,
    actions=(screen.Action("serve", serve_words), screen.Action("log", export_log)),
)  # fmt: skip
