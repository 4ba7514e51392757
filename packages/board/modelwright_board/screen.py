"""What a screen is, and what a button is: fields that become a command line."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from starlette.routing import BaseRoute

from modelwright.core.errors import ConfigError
from modelwright_board.jobs import Jobs
from modelwright_board.runs import Run, Runs
from modelwright_board.series import SeriesCache
from modelwright_board.servers import Watch

HIDDEN_FOLDER = ".board"
"""Folder below the runs for what the board keeps: jobs, dropped files, votes, its token. Never served as it is."""

Values = Mapping[str, str]
Query = Mapping[str, Sequence[str]]


class Board:
    """State that all screens share. root: folder of the runs."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.own = self.root / HIDDEN_FOLDER
        self.runs = Runs(self.root)
        self.jobs = Jobs(self.own / "jobs")
        self.series = SeriesCache()
        self.watch = Watch(self.jobs)

    def uploads(self) -> list[Path]:
        """Files that were dropped, the newest first."""
        folder = self.own / "data"
        found = [path for path in folder.glob("*") if path.is_file() and not path.is_symlink()]
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)

    def chosen_run(self, query: Query) -> Run | None:
        """Returns the run that the page's address names, else the one that changed last."""
        names = [*query.get("run", ()), *self.runs.names()[:1]]
        return next((run for name in names if (run := self.runs.get(name))), None)


@dataclass(frozen=True)
class Field:
    """A field of a form. choices: values with labels, of a select, or of the suggestions for a text."""

    name: str
    label: str
    kind: Literal["text", "select", "number", "check"] = "text"
    default: str = ""
    choices: Callable[[Board], Sequence[tuple[str, str]]] | None = None
    hint: str = ""
    is_required: bool = False


@dataclass(frozen=True)
class Action:
    """A button. words: makes the command line, without the program's name, from the fields' values; raises
    `ConfigError` for values that make none. run: makes the name of the run that the command works on. needs: the
    command that must be installed.
    """

    name: str
    title: str
    words: Callable[[Board, Values], Sequence[str]]
    fields: Sequence[Field] = ()
    text: str = ""
    button: str = "Start"
    run: Callable[[Board, Values], str] | None = None
    needs: str = ""


@dataclass(frozen=True, kw_only=True)
class Screen:
    """A page at /NAME, drawn from NAME.html.jinja with what `show` returns.

    state: a word or two for the rail. blocks: template blocks that are drawn again as they change. charts: returns the
    message of curves for a page that has already got what `sent` says. first_values: values of fields, before defaults.
    """

    name: str
    title: str
    question: str
    show: Callable[[Board, Query], Mapping[str, Any]]
    state: Callable[[Board, Run | None], str] = lambda board, run: ""
    actions: Sequence[Action] = ()
    routes: Callable[[Board], Sequence[BaseRoute]] = lambda board: ()
    blocks: Sequence[str] = ("jobs",)
    charts: Callable[[Board, Query, dict[str, Any]], Mapping[str, Any]] | None = None
    has_charts: bool = False
    is_step: bool = field(default=True)


def required(values: Values, name: str, label: str) -> str:
    """Returns the value of a field. Raises `ConfigError` if it is empty."""
    value = values.get(name, "").strip()
    if not value:
        raise ConfigError(f"{label}: is empty")
    return value


def split_words(text: str) -> list[str]:
    """Splits further options as a shell does. Raises `ConfigError`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"further settings: {error}") from None


def option(values: Values, name: str, flag: str) -> list[str]:
    """Returns `flag VALUE`, nothing for an empty field."""
    value = values.get(name, "").strip()
    return [flag, value] if value else []


def run_choices(board: Board) -> list[tuple[str, str]]:
    """Returns the runs as they are written on a command line."""
    return [(run.where, f"{run.name} ({run.state})") for run in board.runs.all()]


def model_choices(board: Board) -> list[tuple[str, str]]:
    """Returns the runs that have a model."""
    return [
        (run.where, run.name)
        for run in board.runs.all()
        if any(s.has_metrics and s.state == "done" for s in run.stages)
    ]


def data_choices(board: Board) -> list[tuple[str, str]]:
    """Returns dropped files."""
    from modelwright_board.runs import shown_path

    return [(shown_path(path), path.name) for path in board.uploads()]


SETTINGS = Field("settings", "Further settings", hint="as on the command line: --sft.learning_rate 3e-4")
