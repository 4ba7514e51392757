"""/v1/chat/completions: conversations, their images, and answers that are text or function calls. Fields that OpenAI
does not have are named as in vLLM.
"""

import base64
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from modelwright.data.images.decode import STORED_SIDE, ImageFault, decode, squared
from modelwright.infer.sequence import Pixels
from modelwright.serve.api.answers import AnswerKind, finite, prompt_logprobs, read_generation, respond, token_name
from modelwright.serve.api.fields import (
    Content,
    ForcedCall,
    FunctionDefinition,
    FunctionName,
    GenerationRequest,
    NumLogprobs,
    Strict,
    Unsupported,
)
from modelwright.serve.errors import ApiError
from modelwright.serve.generation import Generation, Prompt
from modelwright.serve.limits import Limits
from modelwright.serve.load import Delta, TokenInfo
from modelwright.serve.service import Lease

CHUNK = "chat.completion.chunk"


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(Strict):
    name: FunctionName


class NamedTool(Strict):
    """A function that must be called."""

    type: Literal["function"]
    function: FunctionReference


class FunctionCall(Strict):
    name: FunctionName
    arguments: str


class ToolCall(Strict):
    """A call in an earlier turn of the assistant."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Strict):
    """A turn. Only an assistant's may omit the content; a tool's turn answers the call `tool_call_id`."""

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
        """Returns role and content in the form of chat templates, with a mark in place of each image."""
        # templates know neither calls nor results: calls are text of the assistant, results text of the user in the
        # notation of Hermes 2 Pro
        role = {"developer": "system", "tool": "user"}.get(self.role, self.role)
        functions = [call.function for call in self.tool_calls or []]
        calls = [f'{{"name": {json.dumps(one.name)}, "arguments": {one.arguments}}}' for one in functions]
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
        """Returns the conversation for the chat template, with the tools in a system message if one must be called."""
        messages = [message.plain() for message in self.messages]
        call = self.forced_call()
        if call is None:
            return messages
        lines = ["Answer with a call of one of these functions, as JSON:"]
        for one in call.functions:
            tool = {"name": one.name, "description": one.description or "", "parameters": one.schema_of_arguments}
            lines.append(json.dumps(tool, ensure_ascii=False))
        tools = "\n".join(lines)
        # many templates allow only one system message, and only at the start
        if messages[0]["role"] == "system":
            return [{"role": "system", "content": f"{messages[0]['content']}\n\n{tools}"}, *messages[1:]]
        return [{"role": "system", "content": tools}, *messages]

    @property
    def has_images(self) -> bool:
        return any(message.content is not None and message.content.images for message in self.messages)

    def forced_call(self) -> ForcedCall | None:
        """Returns the call that `tool_choice` forces, or None for plain text. Raises `ApiError` 400 for "auto" and for
        a function that is not among the tools.
        """
        functions, choice = tuple(tool.function for tool in self.tools or []), self.tool_choice
        if isinstance(choice, NamedTool):
            named = tuple(function for function in functions if function.name == choice.function.name)
            if not named:
                text = f"tool_choice names the function {choice.function.name!r}, which is not among the tools."
                raise ApiError(400, text, param="tool_choice", code="invalid_value")
            return ForcedCall(named[:1], is_named=True)
        if choice == "required" and not functions:
            raise ApiError(400, "tool_choice is required, but there are no tools.", param="tool_choice")
        if functions and choice in (None, "auto"):  # OpenAI's default is "auto" if there are tools
            text = 'tool_choice "auto" is not supported by this server; take "required", "none", or name a function.'
            raise ApiError(400, text, param="tool_choice", code="invalid_value")
        return ForcedCall(functions, is_named=False) if choice == "required" else None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def texts(self) -> list[str]:
        return [message.content.text for message in self.messages if message.content and message.content.text]

    def session_text(self) -> str:
        """Returns the turns up to the first one of the user."""
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
    # not a validator of the model, because the error has to name the field
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs", code="invalid_value")
    return asked


def _chat_prompts(asked: ChatRequest, lease: Lease) -> list[Prompt]:
    """Tokenizes a conversation and decodes its images. Raises `ApiError` 400 that names the part: for a text-only
    model, for too many images, and for files that are too large or cannot be decoded.
    """
    model, config = lease.model, lease.service.config.images
    info = model.info
    pixels: list[Pixels] = []
    for number, message in enumerate(asked.messages):
        for part in message.content.images if message.content else ():
            where = f"messages.{number}.content.{part.number}"
            if not info.reads_images:
                raise _bad_image(where, "this model reads no images; remove the part", code="unsupported_image")
            if len(pixels) == config.max_count:
                raise _bad_image(where, f"one request may have at most {config.max_count} images; remove the others")
            # four characters are three bytes, of which up to two are padding
            if len(part.data) * 3 // 4 > config.max_bytes + 2:
                raise _bad_image(where, f"the image has more than {config.max_bytes:,} bytes; make it smaller")
            try:
                file = base64.b64decode(part.data, validate=True)
            except ValueError:  # binascii.Error, or the plain one for characters beyond ASCII
                raise _bad_image(where, "the data: URL is not valid base64") from None
            try:
                image = decode(file, most_side=max(STORED_SIDE, info.image_size), max_pixels=config.max_pixels)
            except ImageFault as fault:
                raise _bad_image(where, f"the image {fault}") from None
            pixels.append(squared(image, size=info.image_size, fit="crop" if info.crops_images else "stretch"))
    return [Prompt(model.tokenizer.encode_chat(asked.plain_messages(), image_text=model.image_text), "", pixels)]


def _bad_image(where: str, reason: str, *, code: str = "invalid_image") -> ApiError:
    return ApiError(400, f"Invalid value for {where!r}: {reason}.", param="messages", code=code)


def _full(generation: Generation) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for index, answer in enumerate(generation.answers):
        message: dict[str, Any] = {"role": "assistant", "content": answer.shown, "refusal": None}
        if answer.call is not None:
            part = answer.call.push(answer.shown)
            function = {"name": part.name, "arguments": part.arguments}
            # an answer that was cut off may end before the name of the function
            calls = [{"id": answer.call.call_id, "type": "function", "function": function}] if part.name else []
            message |= {"content": None, "tool_calls": calls}
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": _logprobs(generation, answer.tokens),
                "finish_reason": _reason(generation, answer.finish_reason),
                **_token_ids(generation, index),
            }
        )
    body = generation.envelope("chat.completion", choices) | {"usage": generation.usage()} | _prompt_ids(generation)
    if generation.request.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(generation, generation.answers[0])
    return body


def _opening(generation: Generation) -> list[dict[str, Any]]:
    delta = {"role": "assistant", "content": "" if generation.call is None else None}
    choices = [
        {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        for index in range(len(generation.answers))
    ]
    return [generation.envelope(CHUNK, [choice]) | _prompt_ids(generation) for choice in choices]


def _chunk(generation: Generation, index: int, piece: Delta) -> dict[str, Any]:
    call = generation.answers[index].call
    delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
    if call is not None:
        part = call.push(piece.text)
        # as OpenAI streams calls: id and name come once, with the first event of the call
        function = {"name": part.name, "arguments": part.arguments} if part.name else {"arguments": part.arguments}
        head = {"id": call.call_id, "type": "function"} if part.name else {}
        delta = {"tool_calls": [{"index": 0, **head, "function": function}]} if part.name or part.arguments else {}
    choice = {
        "index": index,
        "delta": delta,
        "logprobs": _logprobs(generation, piece.tokens),
        "finish_reason": _reason(generation, piece.finish_reason) or None,
    }
    return generation.envelope(CHUNK, [choice | _token_ids(generation, index)])


def _reason(generation: Generation, reason: str) -> str:
    """Returns the finish reason, which is "tool_calls" for a complete call."""
    return "tool_calls" if generation.call is not None and reason == "stop" else reason


def _prompt_ids(generation: Generation) -> dict[str, Any]:
    wanted = generation.request.return_token_ids
    return {"prompt_token_ids": list(generation.answers[0].prompt.ids)} if wanted else {}


def _token_ids(generation: Generation, index: int) -> dict[str, Any]:
    """Returns the ids that no event has contained yet, if the client asks for ids. Call it once per body."""
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
    name, data = token_name(generation, token_id), generation.model.tokenizer.token_bytes(token_id)
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
