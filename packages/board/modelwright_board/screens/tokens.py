"""Tokens: examples and rows as a model reads them, drawn by `modelwright show`."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from modelwright_board.files import as_number, as_object, read_text
from modelwright_board.screen import Board, Query, Screen, readable, sandboxed

PAGE = "tokens.html"


def routes(board: Board) -> Sequence[BaseRoute]:
    async def page(request: Request) -> Response:
        text = read_text(board.own, PAGE)
        if not text:
            return PlainTextResponse("Nothing has been shown yet.\n", 404)
        return sandboxed(text)

    return [Route("/tokens/page", page)]


def show(board: Board, query: Query) -> Mapping[str, Any]:
    run = board.chosen_run(query)
    rows: list[list[Any]] = []
    facts = as_object(run.json("pack", "artifact", "manifest.json").get("facts")) if run else {}
    for name, value in facts.items():
        entry = as_object(value)
        numbers = [(key, as_number(one)) for key, one in (entry or {"": value}).items()]
        if words := "; ".join(f"{readable(key)} {round(one, 3):,.6g}".strip() for key, one in numbers if one == one):
            rows.append([name, words])
    last = next(iter(board.jobs.of("tokens")), None)
    drawn = (board.own / PAGE).is_file() and last is not None and last.state == "done"
    return {"rows": rows[:40], "drawn": last.id if drawn and last else ""}


SCREEN = Screen(
    name="tokens", title="Tokens", question="What exactly does the model read, and which of it is learned?", show=show,
    stage="pack", routes=routes, blocks=("page", "jobs"),
)  # fmt: skip
