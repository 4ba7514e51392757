"""The routes that generate text and those that know only tokens: completions, chat, /tokenize, /detokenize."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelwright.serve import chat, completions
from modelwright.serve.account.exchange import Exchange, RouteName, subject_of
from modelwright.serve.bodies import parsed, read_body
from modelwright.serve.engines.grammars import CompiledGrammar
from modelwright.serve.errors import ApiError
from modelwright.serve.generation import Generation, Prompt, start
from modelwright.serve.images import read_images
from modelwright.serve.inputs import admit, known_ids, not_empty, require_generator, token_ids
from modelwright.serve.keys import Caller
from modelwright.serve.parsing import parse_request
from modelwright.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from modelwright.serve.served_model import ServedModel
from modelwright.serve.service import Lease, service_of, version_header
from modelwright.serve.streams import AnswerForm, respond

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
    return await respond(request, generation, kind.form, exchange)


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
            await parsed(lambda: read(body, lease), len(body), lease), headers=version_header(lease.model.fingerprint)
        )


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
    require_generator(lease, asked.model)
    _require_no_stream_scores(asked)
    return asked


def _completion_prompts(asked: CompletionRequest, lease: Lease) -> list[Prompt]:
    return [_prompt(prompt, asked, lease) for prompt in not_empty(asked.prompts, "prompt")]


def _prompt(prompt: str | list[int], asked: CompletionRequest, lease: Lease) -> Prompt:
    ids = token_ids(prompt, "prompt", lease)
    if isinstance(prompt, str) or not asked.echo:
        return Prompt(ids, prompt if isinstance(prompt, str) else "")
    return Prompt(ids, lease.model.codec.decode(ids))


def _read_chat(body: bytes, lease: Lease) -> ChatRequest:
    asked = parse_request(ChatRequest, body, lease.model.limits)
    lease.require_model(asked.model)
    require_generator(lease, asked.model)
    _require_no_stream_scores(asked)
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs", code="invalid_value")
    return asked


def _chat_prompts(asked: ChatRequest, lease: Lease) -> list[Prompt]:
    model = lease.model
    images = read_images(asked.messages, model.info, lease.config.images)
    return [Prompt(model.codec.encode_chat(asked.plain_messages(), image_text=model.image_text), "", images)]


def _tokenized(body: bytes, lease: Lease) -> dict[str, Any]:
    asked = parse_request(TokenizeRequest, body, lease.model.limits)
    lease.require_model(asked.model)
    codec = lease.model.codec
    if asked.messages is not None:
        plain = [message.plain() for message in asked.messages]
        ids = codec.encode_chat(plain, image_text=lease.model.image_text)
    else:
        ids = codec.encode(asked.prompt or "", with_begin=asked.add_special_tokens)
    texts = {"token_strs": [codec.token_text(token) for token in ids]} if asked.return_token_strs else {}
    return {"count": len(ids), "max_model_len": lease.model.limits.context, "tokens": ids, **texts}


def _detokenized(body: bytes, lease: Lease) -> dict[str, Any]:
    asked = parse_request(DetokenizeRequest, body, lease.model.limits)
    lease.require_model(asked.model)
    return {"prompt": lease.model.codec.decode(known_ids(asked.tokens, "tokens", lease))}


def _require_no_stream_scores(asked: CompletionRequest | ChatRequest) -> None:
    if asked.stream and asked.prompt_logprobs is not None:
        text = "prompt_logprobs come with whole answers only; leave out stream or prompt_logprobs."
        raise ApiError(400, text, param="prompt_logprobs", code="invalid_value")


_COMPLETION = _Kind("completion", "cmpl", completions, _read_completion, _completion_prompts, many=True)
_CHAT = _Kind("chat", "chatcmpl", chat, _read_chat, _chat_prompts, many=False)
