"""Smaller and out: quantize, prune, distill and export; size, speed and loss of each."""

import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from modelwright_board.files import as_list, as_number, as_object
from modelwright_board.runs import Run, scores_of
from modelwright_board.screen import Board, Query, Screen


def folder_bytes(path: Path) -> float:
    """Returns the size of the files in a folder, without its subfolders; NaN if it is missing."""
    try:
        found = [one for one in islice(os.scandir(path), 500) if one.is_file(follow_symlinks=False)]
        return float(sum(one.stat(follow_symlinks=False).st_size for one in found))
    except OSError:
        return float("nan")


def models_of(run: Run) -> list[list[Any]]:
    """Returns each model of a run: size, loss, speed."""
    rows: list[list[Any]] = []
    scores = run.scores()
    for stage in run.stages:
        if stage.state != "done" or not (run.path / stage.name / "artifact" / "config.json").is_file():
            continue
        facts = as_object(run.json(stage.name, "artifact", "manifest.json").get("facts"))
        results = [score for score in scores if score[0] == stage.name]
        speed, loss = float("nan"), as_number(facts.get("heldout_loss"))
        if stage.name == "quantize":
            found = run.json("quantize", "artifact", "results.json")
            comparison = as_object(found.get("comparison"))
            speeds = [as_object(one) for one in as_list(comparison.get("speed"))]
            speed = as_number(speeds[0].get("int8_tokens_per_s")) if speeds else speed
            loss = as_number(as_object(comparison.get("agreement")).get("int8_loss"))
            results = scores_of({"int8": found.get("int8")})
        prefix = "bits per byte of "
        bits = [f"{one[1].removeprefix(prefix)} {one[3]:.3f}" for one in results if one[1].startswith(prefix)]
        rows.append([stage.name, folder_bytes(run.path / stage.name / "artifact"), loss, "; ".join(bits), speed])
    return rows


def show(board: Board, query: Query) -> Mapping[str, Any]:
    run = board.chosen_run(query)
    exports: list[list[Any]] = []
    for job in board.jobs.of("smaller", action="export")[:20]:
        written = board.jobs.result(job).strip().splitlines()
        if job.state == "done" and written:
            path = Path(written[-1])
            size = float(path.stat().st_size) if path.is_file() else folder_bytes(path)
            exports.append([job.option("--to"), job.words[1], written[-1], size])
    return {"models": models_of(run) if run else [], "exports": exports}


def state(board: Board, run: Run | None) -> str:
    stage = run.stage("quantize") if run else None
    return f"INT8 {stage.state}" if stage else ""


SCREEN = Screen(
    name="smaller", title="Smaller and out", question="How small can the model get, and which programs read it?",
    show=show, state=state, blocks=("exports", "jobs"),
)  # fmt: skip
