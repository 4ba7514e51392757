"""Sends answers: whole, or as server-sent events; aborts them when the client leaves."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from modelwright.serve.account.exchange import Exchange
from modelwright.serve.engines.worker import Stream
from modelwright.serve.errors import ApiError
from modelwright.serve.generation import Generation
from modelwright.serve.service import version_header
from modelwright.serve.tokenizer import Delta


class AnswerForm(Protocol):
    """The bodies of one kind of answer: the modules `completions` and `chat`."""

    def full(self, generation: Generation) -> dict[str, Any]: ...

    def opening(self, generation: Generation) -> list[dict[str, Any]]: ...

    def chunk(self, generation: Generation, index: int, piece: Delta) -> dict[str, Any]: ...

    def usage_chunk(self, generation: Generation) -> dict[str, Any]: ...


async def respond(request: Request, generation: Generation, form: AnswerForm, exchange: Exchange) -> Response:
    """The answer in one piece, or as a stream of events if the client asked for one."""
    version = version_header(generation.version)
    if generation.request.stream:
        events = _events(generation, form, exchange)
        headers = version | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    with exchange.answering():
        await unless_disconnected(request, generation.complete(), generation.stream)
    return JSONResponse(form.full(generation), headers=version)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, None], stream: Stream) -> None:
    """Wait for the work on a stream of the engine; abort the stream if the client disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client left before the answer was ready.", code="client_closed_request")
        working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        stream.close()


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _events(generation: Generation, form: AnswerForm, exchange: Exchange) -> AsyncIterator[bytes]:
    """Server-sent events; an error after the start is an event too, because the status has already been sent."""
    try:
        with exchange.answering():
            for body in form.opening(generation):
                yield _event(body | _usage_so_far(generation))
            async for index, piece in generation.pieces():
                if piece.text or piece.tokens or piece.finish_reason or generation.request.return_token_ids:
                    yield _event(form.chunk(generation, index, piece) | _usage_so_far(generation))
            if generation.request.wants_usage_chunk:
                yield _event(form.usage_chunk(generation))
    except ApiError as error:
        yield _event(error.body())
    finally:
        generation.stream.close()
    yield b"data: [DONE]\n\n"


def _usage_so_far(generation: Generation) -> dict[str, Any]:
    """What an event before the last one says of usage: figures if the client asked for them in every event, null if it
    asked for those of the end, nothing otherwise.
    """
    if generation.request.wants_usage_always:
        return {"usage": generation.usage()}
    return {"usage": None} if generation.request.wants_usage_chunk else {}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n\n"
