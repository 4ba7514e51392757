"""Serve and watch: servers with load and latencies over time, their versions, keys, and the log of requests."""

from collections.abc import Mapping
from typing import Any

from modelwright_board.files import masked, parse_lines, read_tail
from modelwright_board.jobs import Job
from modelwright_board.runs import Run
from modelwright_board.screen import Board, Query, Screen, last_value
from modelwright_board.servers import server_jobs, server_url

LOG = "requests.jsonl"


def chosen_server(board: Board, query: Query) -> Job | None:
    servers = server_jobs(board.jobs)
    wanted = last_value(query, "server")
    return next((job for job in servers if job.id == wanted), servers[0] if servers else None)


def sampled(board: Board, query: Query, sent: dict[str, Any], *, of_tests: bool = False) -> Mapping[str, Any]:
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


SCREEN = Screen(
    name="serve", title="Serve and watch", question="Does it answer, how fast, and to whom?", show=show, state=state,
    blocks=("servers", "jobs"), charts=sampled,
)  # fmt: skip
