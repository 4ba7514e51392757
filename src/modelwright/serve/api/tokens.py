"""/tokenize and /detokenize, in vLLM's form. They use the tokenizer without an engine."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelwright.serve.api.chat import Message
from modelwright.serve.api.fields import RequestModel
from modelwright.serve.api.parsing import known_ids, parse_request, parsed, read_body
from modelwright.serve.limits import Limits
from modelwright.serve.service import Lease, service_of, version_header


class TokenizeRequest(RequestModel):
    """POST /tokenize, in vLLM's form: a text, or a conversation up to the start of the assistant's turn."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        if data.get("messages") is None:
            limits.check_prompts(data, "prompt")
        else:
            limits.check_chat(data)


class TokenizeReply(BaseModel):
    """Token ids of a text or conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class DetokenizeRequest(RequestModel):
    """POST /detokenize, in vLLM's form."""

    PROMPT_FIELDS = ("tokens",)

    model: str | None = None
    tokens: list[int]


class DetokenizeReply(BaseModel):
    """Text of token ids."""

    prompt: str


async def tokenize(request: Request) -> Response:
    def read(body: bytes, lease: Lease) -> dict[str, Any]:
        asked = parse_request(TokenizeRequest, body, lease.model.limits)
        lease.require_model(asked.model)
        tokenizer = lease.model.tokenizer
        if asked.messages is not None:
            plain = [message.plain() for message in asked.messages]
            ids = tokenizer.encode_chat(plain, image_text=lease.model.image_text)
        else:
            ids = tokenizer.encode(asked.prompt or "", with_begin=asked.add_special_tokens)
        texts = {"token_strs": [tokenizer.token_text(token) for token in ids]} if asked.return_token_strs else {}
        return {"count": len(ids), "max_model_len": lease.model.limits.context, "tokens": ids, **texts}

    return await _without_engine(request, read)


async def detokenize(request: Request) -> Response:
    def read(body: bytes, lease: Lease) -> dict[str, Any]:
        asked = parse_request(DetokenizeRequest, body, lease.model.limits)
        lease.require_model(asked.model)
        return {"prompt": lease.model.tokenizer.decode(known_ids(asked.tokens, "tokens", lease))}

    return await _without_engine(request, read)


async def _without_engine(request: Request, read: Callable[[bytes, Lease], dict[str, Any]]) -> Response:
    service = service_of(request)
    service.caller(request, "infer")
    with service.lease() as lease:
        body = await read_body(request, lease, num_prompts=1)
        reply = await parsed(lambda: read(body, lease), len(body), lease)
        return JSONResponse(reply, headers=version_header(lease.model.fingerprint))
