"""Screens and their buttons. A button turns the fields of a form into a command line."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute

from modelwright.core.config import ConfigError
from modelwright_board.jobs import Jobs
from modelwright_board.runs import Run, Runs, shown_path
from modelwright_board.series import SeriesCache
from modelwright_board.servers import Watch

HIDDEN_FOLDER = ".board"
"""Folder below the runs for jobs, dropped files, votes and the token of the board. No route serves its files."""

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
class Action:
    """A button, whose form is in the screen's template. words: makes the command line, without the program's name, from
    the fields' values; raises `ConfigError` for values that make none. run: makes the name of the run that the command
    works on.
    """

    name: str
    words: Callable[[Board, Values], Sequence[str]]
    run: Callable[[Board, Values], str] | None = None


@dataclass(frozen=True, kw_only=True)
class Screen:
    """A page at /NAME, drawn from NAME.html.jinja with what `show` returns.

    state: a word or two for the rail. blocks: template blocks that are drawn again as they change. charts: returns the
    message of curves for a page that has already got what `sent` says.
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


@dataclass(frozen=True)
class Choices:
    """Suggestions for the fields of forms: words of a command line, each with its title."""

    board: Board

    def runs(self) -> list[tuple[str, str]]:
        return [(run.where, f"{run.name} ({run.state})") for run in self.board.runs.all()]

    def models(self) -> list[tuple[str, str]]:
        """Returns the runs that have a model."""
        return [(run.where, run.name) for run in self.board.runs.all() if run.has_done(*run.trainings)]

    def data(self) -> list[tuple[str, str]]:
        """Returns dropped files."""
        return [(shown_path(path), path.name) for path in self.board.uploads()]
