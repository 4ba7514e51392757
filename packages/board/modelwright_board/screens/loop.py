"""Loop: drift of requests, updates and their gate, A/B tests, and where a model comes from."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelwright_board import screen
from modelwright_board.files import as_list, as_number, as_object, parse_json, read_text
from modelwright_board.masks import masked
from modelwright_board.runs import Run
from modelwright_board.screen import Board, Query, Values
from modelwright_board.screens.plan import folder
from modelwright_board.servers import get_json, server_jobs, server_url

MOST_PARENTS = 8


def freeze(board: Board, values: Values) -> Sequence[str]:
    return [
        "drift",
        "freeze",
        *screen.split_words(screen.required(values, "requests", "Requests")),
        "--reference",
        screen.required(values, "reference", "Reference"),
        *screen.split_words(values.get("settings", "")),
    ]


def check(board: Board, values: Values) -> Sequence[str]:
    return [
        "drift",
        "check",
        *screen.split_words(screen.required(values, "requests", "Requests")),
        "--reference",
        screen.required(values, "reference", "Reference"),
        "--json",
    ]


def update(board: Board, values: Values) -> Sequence[str]:
    model, sources = (
        screen.required(values, "model", "Model"),
        screen.split_words(screen.required(values, "sources", "New texts")),
    )
    words = ["continual", "run", model, *sources, "--benchmark", screen.required(values, "benchmark", "Benchmark")]
    return [*words, "--run-dir", folder(board, values, ""), *screen.split_words(values.get("settings", ""))]


def lineage(board: Board, values: Values) -> Sequence[str]:
    return ["lineage", screen.required(values, "target", "Model"), "--json"]


def drift_reports(board: Board, run: Run | None) -> list[dict[str, Any]]:
    """Returns the windows that were checked last, by a button or by the run's own check, with their features."""
    found = [as_object(one) for one in as_list(parse_json(read_text(run.path, "drift.json")))] if run else []
    for job in board.jobs.of("loop", action="check")[:1]:
        # One object for each window, one a line or over several.
        text = board.jobs.result(job)
        whole = parse_json(text)
        found += (
            [as_object(whole)]
            if isinstance(whole, dict)
            else [as_object(parse_json(line)) for line in text.splitlines()]
        )
    reports: list[dict[str, Any]] = []
    for one in [one for one in found if one.get("features")][-6:]:
        features = [as_object(feature) for feature in as_list(one.get("features"))]
        reports.append({
            "alarm": bool(one.get("alarm")), "requests": one.get("num_requests"), "notes": [str(note)[:500] for note in as_list(one.get("notes"))],
            "features": [
                {
                    "name": str(feature.get("name")), "alarm": bool(feature.get("alarm")), "effect": as_number(feature.get("effect")),
                    "p": as_number(feature.get("adjusted_p")), "cause": str(feature.get("cause", "")),
                    "window": [masked(text, 200) for text in as_list(feature.get("window_examples"))][:3],
                    "reference": [masked(text, 200) for text in as_list(feature.get("reference_examples"))][:3],
                }
                for feature in features
            ],
        })  # fmt: skip
    return reports


def updates(board: Board) -> list[list[str]]:
    """Returns the runs that are updates, each with the verdict of its gate and its promotion."""
    rows: list[list[str]] = []
    for run in board.runs.all()[:200]:
        verdict = run.json("gate", "artifact", "verdict.json") or run.json("release", "gate-verdict.json")
        promotion = run.json("promotion.json")
        if verdict or promotion:
            passed = verdict.get("passed", verdict.get("is_passed"))
            rows.append(
                [
                    run.name,
                    "–" if passed is None else "passed" if passed else "refused",
                    str(promotion.get("state", promotion.get("status", "–"))),
                ]
            )
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
            tests.append(
                {
                    "name": str(test.get("name")),
                    "status": str(test.get("status")),
                    "reason": str(test.get("reason") or ""),
                    "rows": rows,
                    "url": server_url(job),
                }
            )
    return tests[:20]


def graph(board: Board) -> list[dict[str, str]]:
    """Returns the models that the last lineage names, the latest first, each with its data and its gate."""
    job = next((one for one in board.jobs.of("loop", action="lineage") if one.state == "done"), None)
    nodes: list[dict[str, str]] = []
    entry = as_object(parse_json(board.jobs.result(job))) if job else {}
    while entry and len(nodes) < MOST_PARENTS:
        data = as_object(entry.get("data"))
        gate = as_object(entry.get("gate"))
        nodes.append({
            "title": f"{str(entry.get('folder', ''))[-44:]}", "content": str(entry.get("content", ""))[:12], "stage": str(entry.get("stage", ""))[:30],
            "data": ", ".join(f"{key} {value}" for key, value in list(data.items())[:3] if isinstance(value, (str, int, float)))[:70],
            "commit": ", ".join(str(one)[:12] for one in as_list(entry.get("commits"))[:2]), "gate": "gate passed" if gate else "",
        })  # fmt: skip
        entry = as_object(entry.get("parent"))
    return nodes


def show(board: Board, query: Query) -> Mapping[str, Any]:
    run = board.chosen_run(query)
    return {
        "reports": drift_reports(board, run),
        "updates": updates(board),
        "tests": ab_tests(board),
        "nodes": graph(board),
    }


def state(board: Board, run: Run | None) -> str:
    last = next(iter(board.jobs.of("loop", action="check")), None)
    return "" if last is None else "drift" if last.code == 4 else "no drift" if last.code == 0 else last.state


_REQUESTS = screen.Field(
    "requests", "Requests", choices=screen.data_choices, is_required=True, hint="exported: JSON Lines or Parquet"
)
_REFERENCE = screen.Field("reference", "Reference", default="drift/v1", hint="folder")
SCREEN = screen.Screen(
    name="loop",
    title="Loop",
    question="Has the world changed, and did the update help?",
    show=show,
    state=state,
    blocks=("found", "jobs"),
    actions=(
        screen.Action("check", "Check requests for drift", check, (_REQUESTS, _REFERENCE), button="Check", needs="drift"),
        screen.Action("freeze", "Freeze a reference", freeze, (_REQUESTS, _REFERENCE, screen.SETTINGS), button="Freeze", needs="drift"),
        screen.Action(
            "update", "Update a model", update,
            (
                screen.Field("model", "Model", choices=screen.model_choices, is_required=True), screen.Field("sources", "New texts", choices=screen.data_choices, is_required=True),
                screen.Field("benchmark", "Benchmark", hint="folder that `continual freeze` has written"), screen.Field("name", "Name of the run"), screen.SETTINGS,
            ),
            text="Trains on new texts with old ones, and lets the gate judge.", button="Update", needs="continual",
        ),
        screen.Action("lineage", "Where does a model come from?", lineage, (screen.Field("target", "Model", choices=screen.run_choices, is_required=True),), button="Trace", needs="lineage"),
    ),
)  # fmt: skip
