"""Plan: a recipe or a fine-tuning, its estimates before it starts, and the command."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelwright.core.config import ConfigError
from modelwright_board import screen
from modelwright_board.project import recipe_names
from modelwright_board.runs import Run, shown_path
from modelwright_board.screen import Board, Query, Values


def folder(board: Board, values: Values, default: str) -> str:
    """Returns the run's folder, always one in the board's own so that the run appears on it. Raises `ConfigError`."""
    name = values.get("name", "").strip() or default
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ConfigError("Name of the run: must be a plain name")
    return shown_path(board.root / name)


def common(values: Values) -> list[str]:
    words = [*screen.option(values, "minutes", "--minutes"), *screen.option(values, "nproc", "--nproc")]
    return [*words, *screen.split_words(values.get("settings", "")), *(["--dry-run"] if values.get("dry") else [])]


def recipe(board: Board, values: Values) -> Sequence[str]:
    target = screen.required(values, "recipe", "Recipe")
    sources = screen.split_words(values.get("sources", ""))
    words = ["run", target, "--run-dir", folder(board, values, Path(target).stem)]
    return [
        *words, *(["--data.sources", *sources] if sources else []), *screen.option(values, "stages", "--stages"),
        *common(values),
    ]  # fmt: skip


def finetune(board: Board, values: Values) -> Sequence[str]:
    model = screen.required(values, "model", "Model")
    sources = screen.split_words(screen.required(values, "sources", "Data"))
    name = folder(board, values, f"{Path(model).name}-{Path(sources[0]).stem if sources else 'data'}")
    lora = ["--lora"] if values.get("method") == "lora" else []
    epochs = screen.option(values, "epochs", "--sft.num_epochs")
    return ["finetune", model, *sources, "--run-dir", name, *lora, *epochs, *common(values)]


def resume(board: Board, values: Values) -> Sequence[str]:
    return ["run", screen.required(values, "run_dir", "Run"), *screen.split_words(values.get("settings", ""))]


def cost(board: Board, values: Values) -> Sequence[str]:
    return [
        "plan", "cost", screen.required(values, "target", "Run or recipe"),
        *screen.split_words(values.get("settings", "")),
    ]  # fmt: skip


def run_of(board: Board, values: Values) -> str:
    """Returns the name of the run that a command works on, "" for a dry run."""
    if values.get("dry"):
        return ""
    if "run_dir" in values:
        return Path(values["run_dir"]).name
    words = list((finetune if "model" in values else recipe)(board, values))
    return Path(words[words.index("--run-dir") + 1]).name


def show(board: Board, query: Query) -> Mapping[str, Any]:
    active = [run for run in board.runs.all() if run.state == "running"]
    return {"active": active, "recipes": recipe_names()}


def state(board: Board, run: Run | None) -> str:
    number = sum(job.is_alive for job in board.jobs.of("plan"))
    return f"{number} started" if number else ""


SCREEN = screen.Screen(
    name="plan",
    title="Plan",
    question="What will it take, and what is started?",
    show=show,
    state=state,
    blocks=("active", "jobs"),
    actions=(
        screen.Action("recipe", recipe, run_of),
        screen.Action("finetune", finetune, run_of),
        screen.Action("resume", resume, run_of),
        screen.Action("cost", cost),
    ),
)
