"""Smaller and out: quantize, prune, distill and export; size, speed and loss of each."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelwright.core.config import ConfigError
from modelwright_board import screen
from modelwright_board.files import as_list, as_number, as_object
from modelwright_board.project import EXPORT_DTYPES, recipe_names
from modelwright_board.runs import Run
from modelwright_board.screen import Board, Query, Values
from modelwright_board.screens.plan import folder


def export(board: Board, values: Values) -> Sequence[str]:
    target, form = screen.required(values, "target", "Model"), values.get("form") or "hf"
    dtype = values.get("dtype", "").strip()
    if dtype and dtype not in EXPORT_DTYPES.get(form, ()):
        known = ", ".join(EXPORT_DTYPES.get(form, ())) or "none"
        raise ConfigError(f"Number format: {form} has {known}")
    words = ["export", target, "--to", form, *([place] if (place := values.get("place", "").strip()) else [])]
    words += [*(["--dtype", dtype] if dtype else []), *(["--int8"] if values.get("int8") else [])]
    return [*words, *(["--overwrite"] if values.get("overwrite") else [])]


def quantize(board: Board, values: Values) -> Sequence[str]:
    target = screen.required(values, "target", "Run")
    return ["run", target, "--stages", "quantize,report", *screen.split_words(values.get("settings", ""))]


def distill(board: Board, values: Values) -> Sequence[str]:
    recipe = screen.required(values, "recipe", "Recipe")
    words = ["run", recipe, "--run-dir", folder(board, values, f"{recipe}-distilled")]
    words += [
        "--stages", "clean,tokenize,pack,pretrain,sft,student,distill,evaluate,report", "--student.init",
        values.get("init") or "prune",
    ]  # fmt: skip
    words += [
        *screen.option(values, "layers", "--student.num_layers"),
        *screen.option(values, "ffn", "--student.ffn_dim"),
    ]
    return [*words, *screen.split_words(values.get("settings", ""))]


def folder_bytes(path: Path) -> float:
    """Returns the size of the files in a folder, without its subfolders; NaN if it is missing."""
    try:
        return float(
            sum(
                one.stat(follow_symlinks=False).st_size
                for one in list(os.scandir(path))[:500]
                if one.is_file(follow_symlinks=False)
            )
        )
    except OSError:
        return float("nan")


def models_of(run: Run) -> list[list[Any]]:
    """Returns each model of a run: size, loss, speed."""
    rows: list[list[Any]] = []
    models = as_object(run.json("evaluate", "artifact", "results.json").get("models"))
    for stage in run.stages:
        if stage.state != "done" or not (run.path / stage.name / "artifact" / "config.json").is_file():
            continue
        facts = as_object(run.json(stage.name, "artifact", "manifest.json").get("facts"))
        result = as_object(models.get(stage.name))
        speed, loss = float("nan"), as_number(facts.get("heldout_loss"))
        if stage.name == "quantize":
            found = run.json("quantize", "artifact", "results.json")
            comparison = as_object(found.get("comparison"))
            speeds = [as_object(one) for one in as_list(comparison.get("speed"))]
            speed = as_number(speeds[0].get("int8_tokens_per_s")) if speeds else speed
            loss = as_number(as_object(comparison.get("agreement")).get("int8_loss"))
            result = as_object(found.get("int8"))
        bits = [
            f"{kind} {as_number(as_object(one).get('bits_per_byte')):.3f}"
            for kind, one in as_object(result.get("bits_per_byte")).items()
        ]
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
    return {
        "models": models_of(run) if run else [], "exports": exports, "formats": list(EXPORT_DTYPES),
        "recipes": recipe_names(),
    }  # fmt: skip


def state(board: Board, run: Run | None) -> str:
    stage = run.stage("quantize") if run else None
    return f"INT8 {stage.state}" if stage else ""


def quantized_run(board: Board, values: Values) -> str:
    return Path(values.get("target", "")).name


def distilled_run(board: Board, values: Values) -> str:
    return values.get("name") or f"{values.get('recipe')}-distilled"


SCREEN = screen.Screen(
    name="smaller",
    title="Smaller and out",
    question="How small can the model get, and which programs read it?",
    show=show,
    state=state,
    blocks=("exports", "jobs"),
    actions=(
        screen.Action("export", export),
        screen.Action("quantize", quantize, quantized_run),
        screen.Action("distill", distill, distilled_run),
    ),
)
