"""Plan: a recipe or a fine-tuning, its estimates before it starts, and the command."""

from collections.abc import Mapping
from typing import Any

from modelwright_board.runs import Run
from modelwright_board.screen import Board, Query, Screen


def show(board: Board, query: Query) -> Mapping[str, Any]:
    return {"active": [run for run in board.runs.all() if run.state == "running"]}


def state(board: Board, run: Run | None) -> str:
    number = sum(job.is_alive for job in board.jobs.of("plan"))
    return f"{number} started" if number else ""


SCREEN = Screen(
    name="plan", title="Plan", question="What will it take, and what is started?", show=show, state=state,
    blocks=("active", "jobs"),
)  # fmt: skip
