"""Answers of completions and chat: from the request to a JSON reply or server-sent events. An answer is aborted when
its client disconnects. Also log-probabilities in the form of JSON.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from modelwright.serve.api.fields import GenerationRequest
from modelwright.serve.api.parsing import admit, parse_request, parsed
from modelwright.serve.errors import ApiError
from modelwright.serve.generation import Answer, AnswerPlan, Generation, Prompt, start
from modelwright.serve.keys import Caller
from modelwright.serve.load import Delta
from modelwright.serve.served_model import ServedModel, Stream
from modelwright.serve.service import (
    IGNORED_HEADER,
    SESSION_ENTRY,
    VERSION_HEADER,
    Exchange,
    Lease,
    RouteName,
    Subject,
    service_of,
)

G = TypeVar("G", bound=GenerationRequest)

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, as in vLLM, because JSON cannot represent it."""
ID_PREFIX = "token_id:"
"""Prefix of a token that is named by its id, as in vLLM."""


@dataclass(frozen=True, kw_only=True)
class AnswerKind(Generic[G]):
    """An API, completions or chat: how it reads requests and formats answers.

    read: validates a body; prompts: returns the tokenized prompts of a validated request; many: whether a request may
    have several prompts; full: returns the body of a complete answer; opening: returns the first events of a stream;
    chunk: returns one further event; event_object: field `object` of events.
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
    plan: Callable[[G, ServedModel, Sequence[Prompt]], AnswerPlan] | None = None
    """How answers are made and read; None for plain texts."""
    events: Callable[[Generation], AsyncIterator[Mapping[str, Any]]] | None = None
    """Yields named events instead of those of `opening` and `chunk`; its own errors are events as well."""


def require_generator(model: str, lease: Lease) -> None:
    """Raises `ApiError` for a name that is unknown, or of a model that only scores texts."""
    lease.require_model(model)
    if lease.model.info.scores:
        text = f"The model {model!r} scores texts and generates none; ask /v1/score or /v1/rerank."
        raise ApiError(400, text, param="model", code="unsupported_task")


def read_generation(kind: type[G], body: bytes, lease: Lease) -> G:
    """Validates a body and returns the request. Raises `ApiError`."""
    asked = parse_request(kind, body, lease.model.limits)
    require_generator(asked.model, lease)
    if asked.stream and asked.prompt_logprobs is not None:
        text = "prompt_logprobs come with whole answers only; leave out stream or prompt_logprobs."
        raise ApiError(400, text, param="prompt_logprobs", code="invalid_value")
    return asked


async def respond(request: Request, kind: AnswerKind[G]) -> Response:
    """Handles a request for answers: reads it, chooses the version, starts the answers and sends them."""
    service = service_of(request)
    caller = service.caller(request, "infer")
    most = service.config.max_completions
    with service.lease() as entry:
        body = await admit(request, entry, num_prompts=most if kind.many else 1)
        asked = await parsed(lambda: kind.read(body, entry), len(body), entry)
        # turns of one conversation share a session, because each repeats those before
        user = f"{caller.name}\0{asked.user or ''}"
        session = (asked.metadata or {}).get(SESSION_ENTRY) or f"\0{asked.session_text()}"
        subject = Subject(user, f"{user}\0{session}")
        with service.arm(entry, subject) as (lease, assignment):
            # a function, because a shadow test starts the same answers on its candidate later
            async def open_on(model: ServedModel, caller: Caller) -> Generation:
                chosen = Lease(service, model)
                prompts = await parsed(lambda: kind.prompts(asked, chosen), len(body), chosen, is_slow=asked.has_images)
                plan = kind.plan(asked, model, prompts) if kind.plan else AnswerPlan(asked.grammar())
                source, grammar = plan.source, None
                if source is not None:
                    if source.kind != "any" and (asked.ignore_eos or asked.min_tokens):
                        text = f"{source.param} says where the answer ends, so it cannot be combined with ignore_eos or"
                        raise ApiError(400, f"{text} min_tokens.", param=source.param, code="invalid_value")
                    grammar = await model.grammars.compile(source)
                return start(
                    asked, prompts, model, caller, kind=kind.id_prefix, max_choices=most, grammar=grammar, plan=plan
                )

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
    # outside the leases: open answers keep their version in service by themselves
    version = {VERSION_HEADER: generation.version}
    version |= {IGNORED_HEADER: ", ".join(asked.ignored)} if asked.ignored else {}
    if generation.request.stream:
        events = _events(generation, kind, exchange)
        # X-Accel-Buffering keeps nginx from holding events back until its buffer is full
        headers = version | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    with exchange.answering():
        await unless_disconnected(request, generation.complete(), generation.stream)
    return JSONResponse(kind.full(generation), headers=version)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, None], stream: Stream) -> None:
    """Waits for the work on a stream of the engine, and aborts the stream if the client disconnects."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client left before the answer was ready.", code="client_closed_request")
        working.result()
    finally:
        # this coroutine itself may be canceled, so both tasks are ended here in any case
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        stream.close()


async def _events(generation: Generation, kind: AnswerKind[Any], exchange: Exchange) -> AsyncIterator[bytes]:
    """Yields server-sent events. An error is an event as well, because the status has already been sent."""
    try:
        with exchange.answering():
            if kind.events is not None:
                async for event in kind.events(generation):
                    yield _event(event, name=event["type"])
                return
            for body in kind.opening(generation):
                yield _event(body | _usage_so_far(generation))
            async for index, piece in generation.pieces():
                if piece.text or piece.tokens or piece.finish_reason or generation.request.return_token_ids:
                    yield _event(kind.chunk(generation, index, piece) | _usage_so_far(generation))
            if generation.request.wants_usage_chunk:
                yield _event(generation.envelope(kind.event_object, []) | {"usage": generation.usage()})
    except ApiError as error:
        if kind.events is not None:
            return
        yield _event(error.body())
    finally:
        generation.stream.close()
    yield b"data: [DONE]\n\n"


def _usage_so_far(generation: Generation) -> dict[str, Any]:
    """Returns the field `usage` of all events but the last: figures if the client asked for them in every event, null
    if it asked for the final ones only, absent otherwise.
    """
    if not generation.request.wants_usage_chunk:
        return {}
    options = generation.request.stream_options
    return {"usage": generation.usage() if options and options.continuous_usage_stats else None}


def _event(body: Mapping[str, Any], *, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + to_json(body) + b"\n\n"  # in a fifth of the time of the module `json`


def token_name(generation: Generation, token_id: int) -> str:
    """Returns the name of a token in log-probabilities: its text, or, if the client asks for it, its unique id."""
    by_id = generation.request.return_tokens_as_token_ids
    return f"{ID_PREFIX}{token_id}" if by_id else generation.model.tokenizer.token_text(token_id)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def prompt_logprobs(generation: Generation, answer: Answer) -> list[dict[str, Any] | None]:
    """Returns, in vLLM's form, an entry for each token of a prompt: the token itself and the likeliest ones at its
    position, by id. None for the first, which has no context.
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
                    "decoded_token": generation.model.tokenizer.token_text(token),
                }
                for rank, token, logprob in ranked
            }
        )
    return entries
