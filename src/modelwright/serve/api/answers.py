"""Answers in general: from the request to the reply in one piece or as server-sent events, for completions and chat; an
answer is aborted when its client leaves. Log-probabilities as JSON has them.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from modelwright.serve.account.exchange import Exchange, RouteName, subject_of
from modelwright.serve.api.parsing import admit, parse_request, parsed, require_generator
from modelwright.serve.engines.grammars import CompiledGrammar
from modelwright.serve.engines.worker import Stream
from modelwright.serve.errors import ApiError
from modelwright.serve.generation import Answer, Generation, GenerationRequest, Prompt, start
from modelwright.serve.keys import Caller
from modelwright.serve.served_model import ServedModel
from modelwright.serve.service import Lease, service_of, version_header
from modelwright.serve.tokenizer import Delta

G = TypeVar("G", bound=GenerationRequest)

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, as in vLLM, because JSON cannot represent it."""

ID_PREFIX = "token_id:"
"""Before the id of a token that is called by it, as in vLLM."""


@dataclass(frozen=True, kw_only=True)
class AnswerKind(Generic[G]):
    """Completions or chat: how a request is read, and the forms of its answers.

    read: validates a body; prompts: of a validated request, in tokens; many: whether a request may have several
    prompts; full: the answer in one piece; opening: the first events of a stream; chunk: one further event;
    event_object: the field `object` of events.
    """

    route: RouteName
    id_prefix: str
    read: Callable[[bytes, Lease], G]
    prompts: Callable[[G, Lease], list[Prompt]]
    many: bool
    full: Callable[[Generation], dict[str, Any]]
    opening: Callable[[Generation], list[dict[str, Any]]]
    chunk: Callable[[Generation, int, Delta], dict[str, Any]]
    event_object: str


def read_generation(kind: type[G], body: bytes, lease: Lease) -> G:
    """The validated request of a body. Raises `ApiError`."""
    asked = parse_request(kind, body, lease.model.limits)
    lease.require_model(asked.model)
    require_generator(lease, asked.model)
    if asked.stream and asked.prompt_logprobs is not None:
        text = "prompt_logprobs come with whole answers only; leave out stream or prompt_logprobs."
        raise ApiError(400, text, param="prompt_logprobs", code="invalid_value")
    return asked


async def respond(request: Request, kind: AnswerKind[G]) -> Response:
    """Handle a request for answers: read it, choose the version, start the answers and send them."""
    service = service_of(request)
    caller = service.caller(request, "infer")
    most = service.config.max_completions
    with service.lease() as entry:
        body = await admit(request, entry, num_prompts=most if kind.many else 1)
        asked = await parsed(lambda: kind.read(body, entry), len(body), entry)
        subject = subject_of(asked, caller.name)
        with service.arm(entry, subject) as (lease, assignment):

            async def open_on(model: ServedModel, caller: Caller) -> Generation:
                chosen = Lease(service, model)
                prompts = await parsed(lambda: kind.prompts(asked, chosen), len(body), chosen, is_slow=asked.has_images)
                grammar = await _compiled(asked, chosen)
                return start(asked, prompts, model, caller, kind=kind.id_prefix, max_choices=most, grammar=grammar)

            exchange = Exchange(
                asked=asked,
                route=kind.route,
                subject=subject,
                model=lease.model,
                assignment=assignment,
                observers=service.observers,
                open_on=open_on,
            )
            with exchange.beginning():
                exchange.generation = generation = await open_on(lease.model, caller)
    return await _reply(request, generation, kind, exchange)


async def _compiled(asked: GenerationRequest, lease: Lease) -> CompiledGrammar | None:
    """The grammar of the answers, None if they may have any text. Raises `ApiError`."""
    source = asked.grammar()
    if source is None:
        return None
    if asked.ignore_eos or asked.min_tokens:
        text = f"{source.param} says where the answer ends, so it cannot be combined with ignore_eos or min_tokens."
        raise ApiError(400, text, param=source.param, code="invalid_value")
    return await lease.model.grammars.compile(source)


async def _reply(request: Request, generation: Generation, kind: AnswerKind[Any], exchange: Exchange) -> Response:
    """The answer in one piece, or as a stream of events if the client asked for one."""
    version = version_header(generation.version)
    if generation.request.stream:
        events = _events(generation, kind, exchange)
        headers = version | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    with exchange.answering():
        await unless_disconnected(request, generation.complete(), generation.stream)
    return JSONResponse(kind.full(generation), headers=version)


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


async def _events(generation: Generation, kind: AnswerKind[Any], exchange: Exchange) -> AsyncIterator[bytes]:
    """Server-sent events; an error after the start is an event too, because the status has already been sent."""
    try:
        with exchange.answering():
            for body in kind.opening(generation):
                yield _event(body | _usage_so_far(generation))
            async for index, piece in generation.pieces():
                if piece.text or piece.tokens or piece.finish_reason or generation.request.return_token_ids:
                    yield _event(kind.chunk(generation, index, piece) | _usage_so_far(generation))
            if generation.request.wants_usage_chunk:
                yield _event(generation.envelope(kind.event_object, []) | {"usage": generation.usage()})
    except ApiError as error:
        yield _event(error.body())
    finally:
        generation.stream.close()
    yield b"data: [DONE]\n\n"


def _usage_so_far(generation: Generation) -> dict[str, Any]:
    """The field `usage` of an event before the last one: figures if the client asked for them in every event, null if
    it asked for those of the end, absent otherwise.
    """
    if generation.request.wants_usage_always:
        return {"usage": generation.usage()}
    return {"usage": None} if generation.request.wants_usage_chunk else {}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n\n"


def token_name(generation: Generation, token_id: int) -> str:
    """A token as log-probabilities name it: by its text, or by its id, which no two tokens share, if the client asks
    for that.
    """
    by_id = generation.request.return_tokens_as_token_ids
    return f"{ID_PREFIX}{token_id}" if by_id else generation.tokenizer.token_text(token_id)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def prompt_logprobs(generation: Generation, answer: Answer) -> list[dict[str, Any] | None]:
    """For each token of a prompt, in vLLM's form: the token itself and the likeliest ones at its place by id; None for
    the first, which follows nothing.
    """
    entries: list[dict[str, Any] | None] = [None]
    most = generation.request.prompt_logprobs or 0
    for score in answer.prompt_scores:
        ranked = [(rank, *other) for rank, other in enumerate(score.alternatives[:most], start=1)]
        ranked += [(score.rank, score.token_id, score.logprob)]
        entries.append(
            {
                str(token): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": generation.tokenizer.token_text(token),
                }
                for rank, token, logprob in ranked
            }
        )
    return entries
