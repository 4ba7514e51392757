"""/v1/chat/completions: conversations, their images, and answers that are text or calls of functions. Fields that
OpenAI lacks are named as vLLM names them.
"""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from modelwright.data.images.decode import ImageFault, decode, squared
from modelwright.data.images.stored import STORED_SIDE
from modelwright.infer.sequence import Pixels
from modelwright.serve.api.answers import AnswerKind, finite, prompt_logprobs, read_generation, respond, token_name
from modelwright.serve.api.fields import Content, NumLogprobs, Strict, Unsupported
from modelwright.serve.api.structured import (
    CallDelta,
    CallText,
    ForcedCall,
    NamedTool,
    Tool,
    ToolCall,
    forced_call,
    only_source,
    tool_prompt,
)
from modelwright.serve.config import PromptImagesConfig
from modelwright.serve.engines.client import EngineInfo
from modelwright.serve.engines.grammars import GrammarSource
from modelwright.serve.errors import ApiError
from modelwright.serve.generation import Answer, Generation, GenerationRequest, Prompt
from modelwright.serve.limits import Limits
from modelwright.serve.service import Lease
from modelwright.serve.tokenizer import Delta, TokenInfo

CHUNK = "chat.completion.chunk"


class Message(Strict):
    """One turn. An assistant's turn may have no content; a tool's turn answers the call `tool_call_id`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: list[Any] | None = None
    function_call: Unsupported = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=64)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is missing; only an assistant's turn may leave it out, not a {self.role}'s")
        if self.content is not None and self.content.images and self.role != "user":
            raise ValueError(f"images belong into turns of the user, not into a {self.role}'s")
        return self

    def plain(self) -> dict[str, str]:
        """Role and content in the form that the chat template takes, with a mark where each image stands. Templates
        know neither calls nor their results, so calls are text of the assistant, and results are text of the user in
        the notation of Hermes 2 Pro.
        """
        role = {"developer": "system", "tool": "user"}.get(self.role, self.role)
        calls = [call.plain() for call in self.tool_calls or []]
        said = self.content.marked if self.content else ""
        content = "\n".join([*([said] if said else []), *calls])
        is_result = self.role == "tool"
        return {"role": role, "content": f"<tool_response>\n{content}\n</tool_response>" if is_result else content}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        limits.check_chat(data)

    def plain_messages(self) -> list[dict[str, str]]:
        """The conversation as the chat template takes it, with the tools in a system message if one must be called."""
        messages = [message.plain() for message in self.messages]
        call = self.forced_call()
        if call is None:
            return messages
        tools = tool_prompt(call.functions)
        if messages[0]["role"] == "system":
            return [{"role": "system", "content": f"{messages[0]['content']}\n\n{tools}"}, *messages[1:]]
        return [{"role": "system", "content": tools}, *messages]

    @property
    def has_images(self) -> bool:
        return any(message.content is not None and message.content.images for message in self.messages)

    def forced_call(self) -> ForcedCall | None:
        return forced_call(self.tools, self.tool_choice)

    def grammar(self) -> GrammarSource | None:
        call = self.forced_call()
        return only_source([self.form_of_text(), call.source() if call else None])

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def default_tokens(self, room: int) -> int:
        return room

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def texts(self) -> list[str]:
        return [message.content.text for message in self.messages if message.content and message.content.text]

    def session_text(self) -> str:
        """Up to the first turn of the user."""
        opening: list[str] = []
        for message in self.messages:
            opening.append(message.content.text if message.content else "")
            if message.role == "user":
                break
        return "\0".join(opening)


async def create_chat_completion(request: Request) -> Response:
    return await respond(request, CHAT)


def _read_chat(body: bytes, lease: Lease) -> ChatRequest:
    asked = read_generation(ChatRequest, body, lease)
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs", code="invalid_value")
    return asked


def _chat_prompts(asked: ChatRequest, lease: Lease) -> list[Prompt]:
    model = lease.model
    images = read_images(asked.messages, model.info, lease.config.images)
    return [Prompt(model.tokenizer.encode_chat(asked.plain_messages(), image_text=model.image_text), "", images)]


def read_images(messages: Sequence[Message], info: EngineInfo, config: PromptImagesConfig) -> list[Pixels]:
    """The images of a conversation, in order. Raises `ApiError` 400 that names the part: for a model that reads text
    only, for too many images, and for files that are too large or cannot be decoded.
    """
    pixels: list[Pixels] = []
    for number, message in enumerate(messages):
        for part in message.content.images if message.content else ():
            where = f"messages.{number}.content.{part.number}"
            if not info.reads_images:
                raise _bad_image(where, "this model reads no images; remove the part", code="unsupported_image")
            if len(pixels) == config.max_count:
                raise _bad_image(where, f"one request may have at most {config.max_count} images; remove the others")
            pixels.append(_pixels(part.data, where, info, config))
    return pixels


def _pixels(data: str, where: str, info: EngineInfo, config: PromptImagesConfig) -> Pixels:
    if len(data) * 3 // 4 > config.max_bytes + 2:
        raise _bad_image(where, f"the image has more than {config.max_bytes:,} bytes; make it smaller")
    try:
        file = base64.b64decode(data, validate=True)
    except ValueError:  # binascii.Error, or the plain one for characters beyond ASCII
        raise _bad_image(where, "the data: URL is not valid base64") from None
    try:
        pixels = decode(file, most_side=max(STORED_SIDE, info.image_size), max_pixels=config.max_pixels)
    except ImageFault as fault:
        raise _bad_image(where, f"the image {fault}") from None
    return squared(pixels, size=info.image_size, fit="crop" if info.crops_images else "stretch")


def _bad_image(where: str, reason: str, *, code: str = "invalid_image") -> ApiError:
    return ApiError(400, f"Invalid value for {where!r}: {reason}.", param="messages", code=code)


def _full(generation: Generation) -> dict[str, Any]:
    """The answer in one piece."""
    choices = [
        {
            "index": index,
            "message": _message(generation, answer),
            "logprobs": _logprobs(generation, answer.tokens),
            "finish_reason": _reason(generation, answer.finish_reason),
            **_token_ids(generation, index),
        }
        for index, answer in enumerate(generation.answers)
    ]
    body = generation.envelope("chat.completion", choices) | {"usage": generation.usage()} | _prompt_ids(generation)
    if generation.request.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(generation, generation.answers[0])
    return body


def _opening(generation: Generation) -> list[dict[str, Any]]:
    """The first events of a stream: the role of the speaker."""
    delta = {"role": "assistant", "content": "" if generation.call is None else None}
    return [
        generation.envelope(CHUNK, [_choice(index, delta, None, None)]) | _prompt_ids(generation)
        for index in range(len(generation.answers))
    ]


def _chunk(generation: Generation, index: int, piece: Delta) -> dict[str, Any]:
    """One event of a stream."""
    call = generation.answers[index].call
    delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
    if call is not None:
        part = call.push(piece.text)
        delta = {"tool_calls": [_call_delta(call, part)]} if part.name or part.arguments else {}
    logprobs = _logprobs(generation, piece.tokens)
    choice = _choice(index, delta, logprobs, _reason(generation, piece.finish_reason) or None)
    return generation.envelope(CHUNK, [choice | _token_ids(generation, index)])


def _message(generation: Generation, answer: Answer) -> dict[str, Any]:
    if answer.call is None:
        return {"role": "assistant", "content": answer.shown, "refusal": None}
    part = answer.call.push(answer.shown)
    function = {"name": part.name, "arguments": part.arguments}
    calls = [{"id": answer.call.call_id, "type": "function", "function": function}] if part.name else []
    return {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}


def _call_delta(call: CallText, part: CallDelta) -> dict[str, Any]:
    if part.name:
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": 0, "id": call.call_id, "type": "function", "function": function}
    return {"index": 0, "function": {"arguments": part.arguments}}


def _reason(generation: Generation, reason: str) -> str:
    """The finish reason; a complete call is reported as "tool_calls"."""
    return "tool_calls" if generation.call is not None and reason == "stop" else reason


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _prompt_ids(generation: Generation) -> dict[str, Any]:
    wanted = generation.request.return_token_ids
    return {"prompt_token_ids": list(generation.answers[0].prompt.ids)} if wanted else {}


def _token_ids(generation: Generation, index: int) -> dict[str, Any]:
    return {"token_ids": generation.answers[index].take_unsent_ids()} if generation.request.return_token_ids else {}


def _logprobs(generation: Generation, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
    if generation.request.num_logprobs is None:
        return None
    entries = []
    for token in tokens:
        assert token.logprob is not None, "an answer of a chat begins after its prompt"
        others = [_entry(generation, other, logprob) for other, logprob in token.alternatives]
        entries.append(_entry(generation, token.token_id, token.logprob) | {"top_logprobs": others})
    return {"content": entries, "refusal": None}


def _entry(generation: Generation, token_id: int, logprob: float) -> dict[str, Any]:
    name, data = token_name(generation, token_id), generation.tokenizer.token_bytes(token_id)
    return {"token": name, "logprob": finite(logprob), "bytes": list(data)}


CHAT = AnswerKind(
    route="chat",
    id_prefix="chatcmpl",
    read=_read_chat,
    prompts=_chat_prompts,
    many=False,
    full=_full,
    opening=_opening,
    chunk=_chunk,
    event_object=CHUNK,
)
