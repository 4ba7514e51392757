"""The routes that work with the model: completions, chat, embeddings, tokens."""

import base64
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelwright.serve import chat, completions
from modelwright.serve.bodies import parsed, read_body
from modelwright.serve.errors import ApiError
from modelwright.serve.exchange import Exchange, RouteName, subject_of
from modelwright.serve.generation import Generation, Prompt, start
from modelwright.serve.grammars import CompiledGrammar
from modelwright.serve.jobs import EmbeddingJob
from modelwright.serve.keys import Caller
from modelwright.serve.parsing import parse_request
from modelwright.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    TokenizeRequest,
)
from modelwright.serve.served_model import ServedModel
from modelwright.serve.service import Lease, service_of, version_header
from modelwright.serve.streams import AnswerForm, respond, unless_disconnected

G = TypeVar("G", CompletionRequest, ChatRequest)


@dataclass(frozen=True)
class _Kind(Generic[G]):
    """A kind of request for answers. read: validates a body; prompts: of a validated request, in tokens; many: whether
    a request may have several prompts.
    """

    route: RouteName
    id_prefix: str
    form: AnswerForm
    read: Callable[[bytes, Lease], G]
    prompts: Callable[[G, Lease], list[Prompt]]
    many: bool


async def create_completion(request: Request) -> Response:
    return await _generate(request, _COMPLETION)


async def create_chat_completion(request: Request) -> Response:
    return await _generate(request, _CHAT)


async def _generate(request: Request, kind: _Kind[G]) -> Response:
    service = service_of(request)
    caller = service.caller(request, "infer")
    most = service.config.max_completions
    with service.lease() as entry:
        body = await _admit(request, entry, num_prompts=most if kind.many else 1)
        asked = await parsed(lambda: kind.read(body, entry), len(body), entry)
        subject = subject_of(asked, caller.name)
        with service.arm(entry, subject) as (lease, assignment):

            async def open_on(model: ServedModel, caller: Caller) -> Generation:
                chosen = Lease(service, model)
                prompts = await parsed(lambda: kind.prompts(asked, chosen), len(body), chosen)
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
    return await respond(request, generation, kind.form, exchange)


async def create_embeddings(request: Request) -> Response:
    """The last hidden state of each input, see `Engine.embed`."""
    service = service_of(request)
    caller = service.caller(request, "infer")
    with service.lease() as lease:
        body = await _admit(request, lease, num_prompts=service.config.max_completions)
        asked, inputs = await parsed(lambda: _read_embedding(body, lease), len(body), lease)
        stream = lease.model.worker.submit([EmbeddingJob(ids, caller.salt) for ids in inputs], caller)
    vectors: list[Sequence[float]] = [()] * len(inputs)

    async def collect() -> None:
        async for index, output in stream:
            vectors[index] = output.embedding

    await unless_disconnected(request, collect(), stream)
    if not all(vectors):
        raise ApiError(500, "The model's output is not finite; its weights are broken.", code="model_failed")
    num_tokens = sum(map(len, inputs))
    service.metrics.prompt_tokens.inc(num_tokens)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, asked.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    reply = {"object": "list", "data": data, "model": asked.model, "usage": usage}
    return JSONResponse(reply, headers=version_header(lease.model))


async def tokenize(request: Request) -> Response:
    return await _without_engine(request, _tokenized)


async def detokenize(request: Request) -> Response:
    return await _without_engine(request, _detokenized)


async def _without_engine(request: Request, read: Callable[[bytes, Lease], dict[str, Any]]) -> Response:
    service = service_of(request)
    service.caller(request, "infer")
    with service.lease() as lease:
        body = await read_body(request, lease, num_prompts=1)
        return JSONResponse(
            await parsed(lambda: read(body, lease), len(body), lease), headers=version_header(lease.model)
        )


async def _admit(request: Request, lease: Lease, *, num_prompts: int) -> bytes:
    """What all requests to the engine pass before they are parsed: capacity, body. Raises `ApiError`."""
    lease.require_open()
    lease.model.worker.require_room(1)
    return await read_body(request, lease, num_prompts=num_prompts)


async def _compiled(asked: GenerationRequest, lease: Lease) -> CompiledGrammar | None:
    """The grammar of the answers, None if they may have any text. Raises `ApiError`."""
    source = asked.grammar()
    if source is None:
        return None
    if asked.ignore_eos or asked.min_tokens:
        text = f"{source.param} says where the answer ends, so it cannot be combined with ignore_eos or min_tokens."
        raise ApiError(400, text, param=source.param, code="invalid_value")
    return await lease.model.grammars.compile(source)


def _read_completion(body: bytes, lease: Lease) -> CompletionRequest:
    asked = parse_request(CompletionRequest, body, lease.model.limits)
    lease.require_model(asked.model)
    _require_no_stream_scores(asked)
    return asked


def _completion_prompts(asked: CompletionRequest, lease: Lease) -> list[Prompt]:
    return [_prompt(prompt, asked, lease) for prompt in _prompts(asked.prompts, "prompt")]


def _prompt(prompt: str | list[int], asked: CompletionRequest, lease: Lease) -> Prompt:
    ids = _ids(prompt, "prompt", lease)
    if isinstance(prompt, str) or not asked.echo:
        return Prompt(ids, prompt if isinstance(prompt, str) else "")
    return Prompt(ids, lease.model.codec.decode(ids))


def _read_chat(body: bytes, lease: Lease) -> ChatRequest:
    asked = parse_request(ChatRequest, body, lease.model.limits)
    lease.require_model(asked.model)
    _require_no_stream_scores(asked)
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs", code="invalid_value")
    return asked


def _chat_prompts(asked: ChatRequest, lease: Lease) -> list[Prompt]:
    return [Prompt(lease.model.codec.encode_chat(asked.plain_messages()), "")]


def _read_embedding(body: bytes, lease: Lease) -> tuple[EmbeddingRequest, list[list[int]]]:
    asked = parse_request(EmbeddingRequest, body, lease.model.limits)
    lease.require_model(asked.model)
    inputs = [_ids(one, "input", lease) for one in _prompts(asked.inputs, "input")]
    longest = max(map(len, inputs))
    if longest >= lease.model.limits.context:
        text = f"This model's context is {lease.model.limits.context} tokens; an input has {longest}. Shorten it."
        raise ApiError(400, text, param="input", code="context_length_exceeded")
    return asked, inputs


def _tokenized(body: bytes, lease: Lease) -> dict[str, Any]:
    asked = parse_request(TokenizeRequest, body, lease.model.limits)
    lease.require_model(asked.model)
    codec = lease.model.codec
    if asked.messages is not None:
        ids = codec.encode_chat([message.plain() for message in asked.messages])
    else:
        ids = codec.encode(asked.prompt or "", with_begin=asked.add_special_tokens)
    texts = {"token_strs": [codec.token_text(token) for token in ids]} if asked.return_token_strs else {}
    return {"count": len(ids), "max_model_len": lease.model.limits.context, "tokens": ids, **texts}


def _detokenized(body: bytes, lease: Lease) -> dict[str, Any]:
    asked = parse_request(DetokenizeRequest, body, lease.model.limits)
    lease.require_model(asked.model)
    return {"prompt": lease.model.codec.decode(_known_ids(asked.tokens, "tokens", lease))}


def _prompts(prompts: list[str] | list[list[int]], param: str) -> list[str] | list[list[int]]:
    if not prompts:
        raise _empty(param)
    return prompts


def _ids(prompt: str | list[int], param: str, lease: Lease) -> list[int]:
    ids = lease.model.codec.encode(prompt) if isinstance(prompt, str) else _known_ids(prompt, param, lease)
    if not ids:
        raise _empty(param)
    return ids


def _empty(param: str) -> ApiError:
    return ApiError(400, f"The {param} is empty; give at least one token.", param=param, code="invalid_value")


def _known_ids(ids: list[int], param: str, lease: Lease) -> list[int]:
    size = lease.model.info.vocab_size
    if any(not 0 <= token < size for token in ids):
        raise ApiError(400, f"Token ids must be between 0 and {size - 1}.", param=param, code="invalid_value")
    return ids


def _require_no_stream_scores(asked: CompletionRequest | ChatRequest) -> None:
    if asked.stream and asked.prompt_logprobs is not None:
        text = "prompt_logprobs come with whole answers only; leave out stream or prompt_logprobs."
        raise ApiError(400, text, param="prompt_logprobs", code="invalid_value")


def _encoded(vector: Sequence[float], form: str) -> str | list[float]:
    """Numbers, or the base64 of little-endian FP32, which OpenAI's client asks for."""
    if form == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


_COMPLETION = _Kind("completion", "cmpl", completions, _read_completion, _completion_prompts, many=True)
_CHAT = _Kind("chat", "chatcmpl", chat, _read_chat, _chat_prompts, many=False)
