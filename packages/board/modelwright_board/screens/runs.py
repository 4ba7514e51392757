"""All runs, the latest first: how each is doing, and which to compare."""

from collections.abc import Mapping
from typing import Any

from modelwright_board.screen import Board, Query, Screen, last_value

PAGE = 50


def show(board: Board, query: Query) -> Mapping[str, Any]:
    find = last_value(query, "find").strip()
    found = [run for run in board.runs.all() if find.lower() in run.name.lower()]
    text = last_value(query, "page", "1")
    page = min(max(1, int(text) if text.isdigit() and len(text) < 7 else 1), max(1, -(-len(found) // PAGE)))
    shown = found[(page - 1) * PAGE : page * PAGE]
    running = sum(run.state == "running" for run in found)
    return {"runs": shown, "num_runs": len(found), "running": running, "find": find, "page": page, "page_size": PAGE}


SCREEN = Screen(
    name="runs", title="Runs", question="Which runs are there, and how is each doing?", show=show,
    blocks=("list", "jobs"), is_step=False,
)  # fmt: skip
