"""Loop: drift of requests, updates and their gate, A/B tests, and where a model comes from."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from modelwright_board.files import as_list, as_number, as_object, masked, parse_json, read_text
from modelwright_board.runs import Run
from modelwright_board.screen import Board, Query, Screen
from modelwright_board.screens.serve import sampled
from modelwright_board.servers import get_json, server_jobs, server_url

MOST_PARENTS = 8


def drift_reports(board: Board, run: Run | None) -> list[dict[str, Any]]:
    """Returns the windows that were checked last, by a button or by the run's own check, with their features."""
    found = [as_object(one) for one in as_list(parse_json(read_text(run.path, "drift.json")))] if run else []
    for job in board.jobs.of("loop", action="check")[:1]:
        # One object for each window, one a line or over several.
        text = board.jobs.result(job)
        whole = parse_json(text)
        values = [whole] if isinstance(whole, dict) else map(parse_json, text.splitlines())
        found += map(as_object, values)
    reports: list[dict[str, Any]] = []
    for one in [one for one in found if one.get("features")][-6:]:
        features: list[dict[str, Any]] = []
        for feature in map(as_object, as_list(one.get("features"))):
            numbers = {"effect": as_number(feature.get("effect")), "p": as_number(feature.get("adjusted_p"))}
            words = {name: str(feature.get(name, "")) for name in ("name", "cause")}
            sides = {
                side: [masked(text, 200) for text in as_list(feature.get(f"{side}_examples"))][:3]
                for side in ("window", "reference")
            }
            features.append({**words, **numbers, **sides, "alarm": bool(feature.get("alarm"))})
        notes = [str(note)[:500] for note in as_list(one.get("notes"))]
        shown = {"alarm": bool(one.get("alarm")), "requests": one.get("num_requests"), "notes": notes}
        reports.append({**shown, "features": features})
    return reports


def updates(board: Board) -> list[list[str]]:
    """Returns the runs that are updates, each with the verdict of its gate and its promotion."""
    rows: list[list[str]] = []
    for run in board.runs.all()[:200]:
        verdict = run.json("gate", "artifact", "verdict.json") or run.json("release", "gate-verdict.json")
        promotion = run.json("promotion.json")
        if verdict or promotion:
            passed = verdict.get("passed", verdict.get("is_passed"))
            verdict_word = "–" if passed is None else "passed" if passed else "refused"
            rows.append([run.name, verdict_word, str(promotion.get("state", promotion.get("status", "–")))])
    return rows[:50]


def ab_tests(board: Board) -> list[dict[str, Any]]:
    """Returns the A/B tests of the servers that run, with the interval of each measure."""
    tests: list[dict[str, Any]] = []
    for job in server_jobs(board.jobs):
        for test in as_list(as_object(get_json(f"{server_url(job)}/ab.json")).get("tests")):
            test = as_object(test)
            rows: list[list[Any]] = []
            for one in map(as_object, as_list(test.get("measures"))):
                low, middle, high = (as_number(one.get(key)) for key in ("low", "estimate", "high"))
                middle = middle if middle == middle else (low + high) / 2
                if abs(low) < float("inf") and abs(high) < float("inf"):
                    rows.append([str(one.get("name")), low, middle, high, 1 if one.get("kind") == "ratio" else 0])
            words = {name: str(test.get(name) or "") for name in ("name", "status", "reason")}
            tests.append({**words, "rows": rows, "url": server_url(job)})
    return tests[:20]


def graph(board: Board) -> list[dict[str, str]]:
    """Returns the models that the last lineage names, the latest first, each with its data and its gate."""
    job = next((one for one in board.jobs.of("loop", action="lineage") if one.state == "done"), None)
    nodes: list[dict[str, str]] = []
    entry = as_object(parse_json(board.jobs.result(job))) if job else {}
    while entry and len(nodes) < MOST_PARENTS:
        data = as_object(entry.get("data"))
        gate = as_object(entry.get("gate"))
        facts = [f"{key} {value}" for key, value in data.items() if isinstance(value, (str, int, float))]
        nodes.append({
            "title": str(entry.get("folder", ""))[-44:], "content": str(entry.get("content", ""))[:12],
            "stage": str(entry.get("stage", ""))[:30], "data": ", ".join(facts[:3])[:70],
            "commit": ", ".join(str(one)[:12] for one in as_list(entry.get("commits"))[:2]),
            "gate": "gate passed" if gate else "",
        })  # fmt: skip
        entry = as_object(entry.get("parent"))
    return nodes


def show(board: Board, query: Query) -> Mapping[str, Any]:
    run = board.chosen_run(query)
    return {
        "reports": drift_reports(board, run), "updates": updates(board), "tests": ab_tests(board),
        "nodes": graph(board),
    }  # fmt: skip


def state(board: Board, run: Run | None) -> str:
    last = next(iter(board.jobs.of("loop", action="check")), None)
    return "" if last is None else "drift" if last.code == 4 else "no drift" if last.code == 0 else last.state


SCREEN = Screen(
    name="loop", title="Loop", question="Have requests drifted, and did the update help?", show=show, state=state,
    blocks=("found", "jobs"), charts=partial(sampled, of_tests=True),
)  # fmt: skip
