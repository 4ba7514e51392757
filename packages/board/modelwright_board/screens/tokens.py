"""Tokens: examples and rows as a model reads them, drawn by `modelwright show`."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from modelwright_board import screen
from modelwright_board.files import as_number, as_object, read_text
from modelwright_board.runs import Run, shown_path
from modelwright_board.screen import Board, Query, Values

SANDBOX = "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'self'"
PAGE = "tokens.html"


def look(board: Board, values: Values) -> Sequence[str]:
    target = screen.required(values, "model", "Run or model folder")
    page = board.own / PAGE
    return [
        "show", target, *screen.split_words(values.get("sources", "")), "--rows", values.get("rows") or "3", "--html",
        shown_path(page),
    ]  # fmt: skip


def routes(board: Board) -> Sequence[BaseRoute]:
    async def page(request: Request) -> Response:
        text = read_text(board.own, PAGE)
        if not text:
            return PlainTextResponse("Nothing has been shown yet.\n", 404)
        return HTMLResponse(text, headers={"Content-Security-Policy": SANDBOX})

    return [Route("/tokens/page", page)]


def show(board: Board, query: Query) -> Mapping[str, Any]:
    run = board.chosen_run(query)
    rows: list[list[Any]] = []
    facts = as_object(run.json("pack", "artifact", "manifest.json").get("facts")) if run else {}
    for name, value in facts.items():
        entry = as_object(value)
        if entry:
            rows.append(
                [
                    name,
                    "; ".join(
                        f"{key} {as_number(one):,.6g}" for key, one in entry.items() if as_number(one) == as_number(one)
                    ),
                ]
            )
        elif as_number(value) == as_number(value):
            rows.append([name, f"{as_number(value):,.6g}"])
    last = next(iter(board.jobs.of("tokens")), None)
    drawn = (board.own / PAGE).is_file() and last is not None and last.state == "done"
    return {"rows": rows[:40], "drawn": last.id if drawn and last else ""}


def state(board: Board, run: Run | None) -> str:
    stage = run.stage("pack") if run else None
    return stage.state if stage else ""


SCREEN = screen.Screen(
    name="tokens", title="Tokens", question="What exactly does the model read, and which of it is learned?", show=show,
    state=state, routes=routes, blocks=("page", "jobs"), actions=(screen.Action("look", look),),
)  # fmt: skip
