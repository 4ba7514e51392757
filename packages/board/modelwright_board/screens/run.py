"""Run: curves, alarms, samples, log, settings and results of one run, or of up to eight runs compared."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelwright_board.files import as_number, as_object, flat_settings, parse_lines, read_tail
from modelwright_board.jobs import command_line
from modelwright_board.project import recipe_settings
from modelwright_board.runs import Run
from modelwright_board.screen import Board, Query, Screen, last_value
from modelwright_board.series import AXES, curve_message

MOST_RUNS = 8
FIRST_S, NEXT_S = 0.1, 1.0
"""Time to read metrics for the first points, which come soon, and for those after it, which are drawn anew."""
_FACTS = ("heldout_loss", "best_loss", "num_steps", "num_tokens", "num_parameters", "train_time_s")


def chosen(board: Board, query: Query) -> list[Run]:
    names = list(dict.fromkeys(query.get("run", ())))[:MOST_RUNS]
    runs = [run for name in names if (run := board.runs.get(name))]
    first = None if runs else board.chosen_run({})
    return [first] if first else runs


def stage_of(runs: Sequence[Run], query: Query) -> tuple[str, list[str]]:
    """Returns the stage whose curves are shown, and those that could be: without a choice, the one that is going on."""
    stages = list(dict.fromkeys(name for run in runs for name in run.trainings))
    wanted = last_value(query, "stage")
    return (wanted if wanted in stages else (stages[-1] if stages else "")), stages


def axis_of(query: Query) -> str:
    axis = last_value(query, "x")
    return axis if axis in AXES else "step"


def charts(board: Board, query: Query, sent: dict[str, Any]) -> Mapping[str, Any]:
    runs = chosen(board, query)
    stage, _ = stage_of(runs, query)
    # A training that has begun meanwhile has other curves.
    if sent.get("", (stage, 0))[0] != stage:
        sent.clear()
    budget_s = NEXT_S if sent else FIRST_S
    sent[""] = (stage, 0)
    files = {run.name: board.metrics_file(run.path, stage) for run in runs if stage in run.trainings}
    for file in files.values():
        file.lock.acquire()
    try:
        return curve_message(files, axis_of(query), sent, budget_s=budget_s)
    finally:
        for file in files.values():
            file.lock.release()


def show(board: Board, query: Query) -> Mapping[str, Any]:
    runs = chosen(board, query)
    stage, stages = stage_of(runs, query)
    one = runs[0] if len(runs) == 1 else None
    shared = {
        "runs": runs, "stage": stage, "stages": stages, "axis": axis_of(query), "axes": list(AXES), "one": one,
        "results": results(runs), "differences": differences(runs), "changed": [],
        "alarms": [], "samples": [], "log": "",
    }  # fmt: skip
    if one is None:
        return shared

    def tail(file: str, names: Sequence[str], number: int) -> list[dict[str, str]]:
        records = parse_lines(read_tail(one.path, stage, file))[-number:] if stage else []
        return [{name: str(record.get(name, ""))[:2000] for name in names} for record in records]

    return {
        **shared, "alarms": tail("anomalies.jsonl", ("step", "kind", "text"), 20),
        "samples": tail("samples.jsonl", ("step", "loss", "text", "prompt"), 12),
        "log": read_tail(one.path, one.stages[-1].name, "log.txt", most=20_000) if one.stages else "",
        "line": command_line(list(one.words)[1:]), "resume": command_line(["run", one.where]),
        "run_jobs": [job for job in board.jobs.all() if job.run == one.name][:3], "changed": changed(board, one),
    }  # fmt: skip


def changed(board: Board, run: Run) -> list[tuple[str, str, str]]:
    """Returns the settings in which a run differs from its recipe: name, the recipe's value, its value."""
    name = run.origin.removeprefix("recipe ") if run.origin.startswith("recipe ") else "quickstart"
    recipe = flat_settings(recipe_settings(name, board.own))
    mine = run.settings().items() if recipe else ()
    return [(key, recipe.get(key, "–"), value) for key, value in mine if recipe.get(key) != value][:200]


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """Returns the settings in which the runs differ, a column for each run."""
    settings = [run.settings() for run in runs]
    names = dict.fromkeys(name for one in settings for name in one)
    rows = [[name, *(one.get(name, "–") for one in settings)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1][:300]


def results(runs: Sequence[Run]) -> list[list[Any]]:
    """Returns rows of figures, one column for each run: those of trainings, then those of the evaluation."""
    columns: list[dict[str, float]] = []
    for run in runs:
        column: dict[str, float] = {}
        for stage in run.trainings:
            facts = as_object(run.json(stage, "artifact", "manifest.json").get("facts"))
            column |= {f"{stage}: {name}": as_number(facts[name]) for name in _FACTS if name in facts}
        column |= {f"{name}: {title}": value for name, title, _, value, _ in run.scores()}
        columns.append({name: value for name, value in column.items() if value == value})
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name) for column in columns)] for name in names][:200]


SCREEN = Screen(
    name="run", title="Run", question="Is it learning, and is anything wrong?", show=show,
    state=lambda board, run: run.state if run else "", charts=charts,
    blocks=("head", "alarms", "samples", "log", "jobs"),
)  # fmt: skip
