"""Talk: one question to two models, with the same seed; a vote is a preference pair that `dpo` and `reward` read."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from modelwright_board.files import read_tail
from modelwright_board.runs import Run, shown_path
from modelwright_board.screen import Board, Query, Screen
from modelwright_board.servers import server_jobs, server_url

VOTES = "votes.jsonl"
MOST_TEXT = 100_000


def number_of_votes(board: Board) -> int:
    return read_tail(board.own, VOTES, most=50_000_000).count("\n")


def routes(board: Board) -> Sequence[BaseRoute]:
    async def ask(request: Request) -> Response:
        """Forwards a question to a server that the board has started, and streams the answer back."""
        values = await request.app.state.pages.form(request)
        jobs = await run_in_threadpool(server_jobs, board.jobs)
        job = next((one for one in jobs if one.id == values.get("server")), None)
        if job is None:
            raise HTTPException(404, "This server does not run any more.")
        try:
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": values.get("question", "")[:MOST_TEXT]}],
                "seed": int(values.get("seed") or 0), "temperature": float(values.get("temperature") or 0),
                "max_tokens": int(values.get("max_tokens") or 64), "stream": True,
            }  # fmt: skip
        except ValueError:
            raise HTTPException(400, "Seed, temperature and length must be numbers.") from None
        client = httpx.AsyncClient(timeout=httpx.Timeout(300.0, connect=3.0), trust_env=False)
        try:
            models = (await client.get(f"{server_url(job)}/v1/models")).json()
            body["model"] = models["data"][0]["id"]
            sent = client.build_request("POST", f"{server_url(job)}/v1/chat/completions", json=body)
            reply = await client.send(sent, stream=True)
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            await client.aclose()
            raise HTTPException(502, "It does not answer yet; its output on the page Serve says why.") from None
        if reply.status_code != 200:
            text = (await reply.aread()).decode("utf-8", "replace")
            await client.aclose()
            with suppress(ValueError, LookupError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise HTTPException(400, str(text)[:1000])

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in reply.aiter_bytes():
                    yield piece
            except httpx.HTTPError:
                yield b'data: {"error": {"message": "the connection to the server was lost"}}\n\n'
            finally:
                await reply.aclose()
                await client.aclose()

        return StreamingResponse(pieces(), media_type="text/event-stream")

    async def vote(request: Request) -> Response:
        """Keeps a vote as a line of a file in the form prompt, chosen, rejected."""
        values = await request.app.state.pages.form(request)
        names = {"prompt": "question", "chosen": "chosen", "rejected": "rejected"}
        pair = {name: values.get(field, "") for name, field in names.items()}
        if not all(pair.values()) or pair["chosen"] == pair["rejected"]:
            raise HTTPException(400, "A vote needs a question and two different answers.")

        def keep() -> int:
            with open(board.own / VOTES, "a", encoding="utf-8") as file:
                file.write(json.dumps(pair, ensure_ascii=False) + "\n")
            return number_of_votes(board)

        return JSONResponse({"votes": await run_in_threadpool(keep)})

    return [Route("/talk/ask", ask, methods=["POST"]), Route("/talk/vote", vote, methods=["POST"])]


def show(board: Board, query: Query) -> Mapping[str, Any]:
    servers = [(job.id, f"{job.words[1]} at port {job.option('--port', '8000')}") for job in server_jobs(board.jobs)]
    return {"servers": servers, "votes": number_of_votes(board), "votes_path": shown_path(board.own / VOTES)}


def state(board: Board, run: Run | None) -> str:
    votes = number_of_votes(board)
    return f"{votes} votes" if votes else ""


SCREEN = Screen(
    name="talk", title="Talk", question="Which of two models answers better?", show=show, state=state, routes=routes,
    blocks=("servers", "votes", "jobs"),
)  # fmt: skip
