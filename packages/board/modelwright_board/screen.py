"""What all screens share: the state of the board, and the description of a screen. forms.py has the buttons."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute

from modelwright_board.forms import Action, Field, forms_of
from modelwright_board.jobs import Jobs
from modelwright_board.project import recipe_names
from modelwright_board.runs import Run, Runs, shown_path
from modelwright_board.series import MetricsFile
from modelwright_board.servers import Watch, server_jobs

HIDDEN_FOLDER = ".board"
"""Folder below the runs for jobs, dropped files, votes and the token of the board. No route serves its files."""

Query = Mapping[str, Sequence[str]]


class Board:
    """State that all screens share. root: folder of the runs."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.own = self.root / HIDDEN_FOLDER
        self.runs = Runs(self.root)
        self.jobs = Jobs(self.own / "jobs")
        self.metrics_file = lru_cache(maxsize=24)(MetricsFile)  # those that were looked at last
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

    def preset(self, field: Field, run: Run | None) -> str:
        """Returns what a field holds in a new form. run: the one that the page is about."""
        if field.preset == "{run}":
            return run.where if run and (field.choices == "runs" or run.has_done(*run.trainings)) else ""
        if field.preset == "{port}":
            taken = {job.option("--port", "8000") for job in server_jobs(self.jobs)}
            return next(port for port in map(str, range(8000, 9000)) if port not in taken)
        return field.preset

    def choices(self, kind: str) -> list[tuple[str, str]]:
        """Returns suggestions for a field: words of a command line, each with its title. kind: recipes, data (dropped
        files), runs, or models (the runs that have one).
        """
        if kind == "recipes":
            return [(name, name) for name in recipe_names()]
        if kind == "data":
            return [(shown_path(path), path.name) for path in self.uploads()]
        runs = [run for run in self.runs.all() if kind == "runs" or run.has_done(*run.trainings)]
        return [(run.where, f"{run.name} ({run.state})") for run in runs]


@dataclass(frozen=True, kw_only=True)
class Screen:
    """A page at /NAME, drawn from NAME.html.jinja with what `show` returns; the forms of NAME.yaml follow.

    stage: the stage whose state the rail shows, unless `state` makes other words for it. blocks: template blocks that
    are drawn again as they change. charts: returns the message of curves for a page that has already got what `sent`
    says.
    """

    name: str
    title: str
    question: str
    show: Callable[[Board, Query], Mapping[str, Any]]
    stage: str = ""
    state: Callable[[Board, Run | None], str] | None = None
    routes: Callable[[Board], Sequence[BaseRoute]] = lambda board: ()
    blocks: Sequence[str] = ("jobs",)
    charts: Callable[[Board, Query, dict[str, Any]], Mapping[str, Any]] | None = None
    is_step: bool = True

    @property
    def actions(self) -> Sequence[Action]:
        return forms_of(self.name)

    def rail_words(self, board: Board, run: Run | None) -> str:
        if self.state:
            return self.state(board, run)
        stage = run.stage(self.stage) if run else None
        return stage.state if stage else ""


def sandboxed(page: str | bytes) -> Response:
    """Shows a page that a command has left without scripts and without an origin, whatever is in it."""
    policy = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'"
    return HTMLResponse(page, headers={"Content-Security-Policy": policy})


def readable(name: str) -> str:
    """Returns the name of a metric or figure as words."""
    return name.replace("num_", "").replace("heldout_", "held-out ").replace("_", " ")


def last_value(query: Query, name: str, default: str = "") -> str:
    return query.get(name, [default])[-1]
