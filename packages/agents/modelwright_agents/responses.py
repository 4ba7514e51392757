"""/v1/responses: OpenAI's Responses API. A request becomes one of the server's chat API, which renders, constrains and
reads the answer; this module has the form of items in and out, the named events of streams, and the kept responses.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from modelwright.core.config import ConfigError
from modelwright.serve.agents.calls import CallPart, Part, TextPart
from modelwright.serve.agents.reasoning import THOUGHT_SHOWN
from modelwright.serve.api.answers import AnswerKind, require_generator, respond
from modelwright.serve.api.chat import (
    CHAT,
    ChatRequest,
    FunctionCall,
    FunctionReference,
    Message,
    NamedTool,
    Tool,
    ToolCall,
)
from modelwright.serve.api.fields import (
    FunctionDefinition,
    FunctionName,
    Ignored,
    JsonSchemaFormat,
    RequestModel,
    ResponseFormat,
    Said,
    StreamOptions,
    Strict,
    Unsupported,
    read_content,
    short,
    unsupported,
)
from modelwright.serve.api.operations import GENERATES, Operation, RouteSpec
from modelwright.serve.api.parsing import parse_request
from modelwright.serve.engines.grammars import GrammarSource
from modelwright.serve.errors import ApiError
from modelwright.serve.generation import Generation
from modelwright.serve.limits import Limits
from modelwright.serve.service import Lease, Service

NAME = "responses"
"""Entry point of the route, and its word among the extensions of a server."""
_PART_KINDS = {"input_text": "text", "output_text": "text", "text": "text", "input_image": "image_url"}
_PART_FIELDS = {"annotations", "logprobs"}
"""Fields of a part of an answer that a client sends back, which change nothing."""


def read_parts(content: Any) -> Said | None:
    """Validates the content of an item, whose parts have other names than those of the chat API."""
    parts: list[Any] = []
    for number, part in enumerate(cast(list[Any], content) if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _PART_KINDS:
            known = "input_text, output_text and input_image"
            raise ValueError(
                f"part {number}: the type {short(str(kind))!r} is not supported; this server reads {known}"
            )
        if kind == "input_image":
            if part.get("file_id"):
                raise ValueError(f"part {number}: file_id is not supported; send the image as a data: URL in image_url")
            image = {"url": part.get("image_url")} | ({"detail": part["detail"]} if part.get("detail") else {})
            rest = {name: part[name] for name in set(part) - {"type", "image_url", "detail", "file_id"}}
            parts.append({"type": "image_url", "image_url": image, **rest})
        else:
            rest = {name: value for name, value in part.items() if name not in _PART_FIELDS}
            parts.append(rest | {"type": "text"})
    return read_content(parts if isinstance(content, list) else content)


_PART = {"type": "object", "properties": {"type": {"const": "input_text"}, "text": {"type": "string"}},
         "required": ["type", "text"], "additionalProperties": False}  # fmt: skip
Parts = Annotated[
    Said,
    BeforeValidator(read_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]}),
]


class _Item(Strict):
    id: Ignored = None
    status: Ignored = None


class MessageItem(_Item):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    phase: Ignored = None


class CallItem(_Item):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str


class CallResultItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ThoughtPart(Strict):
    type: Literal["reasoning_text"]
    text: str


class ThoughtItem(_Item):
    """A thought in an earlier answer."""

    type: Literal["reasoning"]
    content: list[ThoughtPart] | None = None
    summary: Ignored = None
    encrypted_content: Unsupported = None


def _with_type(item: Any) -> Any:
    if isinstance(item, dict):
        kind = item.get("type", "message")
        if kind not in ("message", "function_call", "function_call_output", "reasoning"):
            raise ValueError(f"items of type {short(str(kind))!r} are not supported by this server")
        return {"type": kind, **item}
    return item


InputItem = Annotated[
    MessageItem | CallItem | CallResultItem | ThoughtItem, Field(discriminator="type"), BeforeValidator(_with_type)
]


class FunctionTool(FunctionDefinition):
    """A function."""

    type: Literal["function"]


class FunctionChoice(Strict):
    """A function that must be called."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(JsonSchemaFormat):
    """The form of the answer; the fields of a schema are next to its type."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")] = "answer"
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Annotated[Any, unsupported("medium"), WithJsonSchema({"enum": ["medium"]})] = None


class ReasoningOptions(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Ignored = None
    generate_summary: Ignored = None


class ResponseRequest(RequestModel):
    """POST /v1/responses. Fields of features that this server lacks are refused by name."""

    HARMLESS_FIELDS = frozenset(("prompt_cache_retention", "moderation"))

    model: str
    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=64)] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    background: Unsupported = None
    conversation: Unsupported = None
    context_management: Unsupported = None
    max_tool_calls: Unsupported = None
    prompt: Unsupported = None
    top_logprobs: Unsupported = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        asked = data.get("input")
        limits.check_chat({"input": [{"content": asked}] if isinstance(asked, str) else asked}, "input")

    def turns(self) -> list[Message]:
        """Returns the input as turns of a conversation. Thought, text and calls of one answer are one turn."""
        turns: list[Message] = []
        if isinstance(self.input, str):
            return [Message.model_construct(role="user", content=read_content(self.input))]
        for number, item in enumerate(self.input):
            said = item.content if isinstance(item, MessageItem) else getattr(item, "output", None)
            if said and said.images and not (isinstance(item, MessageItem) and item.role == "user"):
                text = f"Invalid value for 'input.{number}': images belong into turns of the user."
                raise ApiError(400, text, param="input", code="invalid_value")
            if isinstance(item, CallResultItem):
                turns.append(Message.model_construct(role="tool", content=item.output, tool_call_id=item.call_id))
                continue
            if isinstance(item, MessageItem) and item.role != "assistant":
                turns.append(Message.model_construct(role=item.role, content=item.content))
                continue
            if not turns or turns[-1].role != "assistant" or isinstance(item, ThoughtItem):
                turns.append(Message.model_construct(role="assistant", content=None))
            turn = turns[-1]
            if isinstance(item, MessageItem):
                before = f"{turn.content.marked}\n" if turn.content else ""
                turn.content = Said(before + item.content.marked)
            elif isinstance(item, CallItem):
                call = FunctionCall(name=item.name, arguments=item.arguments)
                turn.tool_calls = [*(turn.tool_calls or []), ToolCall(id=item.call_id, type="function", function=call)]
            else:
                turn.reasoning_content = "\n".join(part.text for part in item.content or ()) or None
        return turns


@dataclass(frozen=True, kw_only=True)
class ResponsesConfig:
    """Settings of the route: `serve.routes.responses`."""

    stored: int = 0
    """Responses that are kept in memory for `previous_response_id`; 0 keeps none."""

    def __post_init__(self) -> None:
        if self.stored < 0:
            raise ConfigError(f"stored: must not be negative, got {self.stored}")


class ResponseStore:
    """The conversations of the last responses, by id, for `previous_response_id`. capacity: 0 keeps none."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._turns: OrderedDict[str, Sequence[Any]] = OrderedDict()

    def put(self, name: str, turns: Sequence[Any]) -> None:
        self._turns[name] = turns
        while len(self._turns) > self.capacity:
            self._turns.popitem(last=False)

    def get(self, name: str) -> Sequence[Any]:
        """Returns the turns before and of a response. Raises `ApiError` 400."""
        if not self.capacity:
            text = "this server keeps no responses (setting serve.routes.responses.stored); send all items in input"
            raise ApiError(400, f"Invalid value for 'previous_response_id': {text}.", param="previous_response_id")
        if (turns := self._turns.get(name)) is None:
            text = f"No response {name!r} is kept here, where the last {self.capacity} are; send all items in input."
            code = "previous_response_not_found"
            raise ApiError(400, text, param="previous_response_id", code=code)
        return turns


class _Chat(ChatRequest):
    """A request of the chat API with the one that it was made of."""

    TURNS_FIELD = "input"
    _asked: ResponseRequest = PrivateAttr()
    _store: ResponseStore | None = PrivateAttr(None)

    def grammar(self) -> GrammarSource | None:
        return self.response_format.source("text") if self.response_format else None


def _read(body: bytes, lease: Lease) -> _Chat:
    asked = parse_request(ResponseRequest, body, lease.model.limits)
    require_generator(asked.model, lease)
    store: ResponseStore = lease.service.extensions[NAME]
    if asked.store and not store.capacity:
        text = "store: this server keeps no responses (setting serve.routes.responses.stored); send store: false."
        raise ApiError(400, text, param="store", code="unsupported_parameter")
    earlier = store.get(asked.previous_response_id) if asked.previous_response_id else ()
    messages = [*earlier, *asked.turns()]
    if asked.instructions:
        # instead of those of earlier requests, as OpenAI documents
        said = read_content(asked.instructions)
        messages = [Message.model_construct(role="system", content=said), *messages]
    form = asked.text.format if asked.text else None
    choice = asked.tool_choice
    if isinstance(choice, FunctionChoice):
        choice = NamedTool(type="function", function=FunctionReference(name=choice.name))
    same = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "metadata")
    chat = _Chat.model_construct(
        **{name: getattr(asked, name) for name in same},
        messages=messages,
        max_completion_tokens=asked.max_output_tokens,
        tools=[Tool(type="function", function=tool) for tool in asked.tools] if asked.tools else None,
        tool_choice=choice,
        response_format=ResponseFormat(type=form.type, json_schema=form if form.type == "json_schema" else None)
        if form
        else None,
        reasoning_effort=asked.reasoning.effort if asked.reasoning else None,
    )
    chat._asked = asked
    chat._store = store if asked.store is not False and store.capacity else None
    chat.ignore(*asked.ignored, *(f"include.{name}" for name in asked.include or ()))
    if asked.reasoning and (asked.reasoning.summary or asked.reasoning.generate_summary):
        chat.ignore("reasoning.summary")
    return chat


class ResponseReply(BaseModel):
    """A response: its items (thought, message, calls) in `output`, and the request's settings."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class ResponseEvent(BaseModel):
    """An event, whose `type` is its name as well."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class _Output:
    """Makes the items of a response, and their events, from the parts of an answer."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.items: list[dict[str, Any]] = []
        self.thought = ""
        self._open = ""
        """Field of the text, or index of the call, whose item is open; "" for none."""
        self._blank = ""
        self._number = -1

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def push(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Adds parts and returns their events."""
        events: list[dict[str, Any]] = []
        for part in parts:
            key = str(part.index) if isinstance(part, CallPart) else part.field
            if isinstance(part, TextPart) and key != self._open and not part.text.strip():
                # line breaks between calls are no message
                self._blank += part.text
                continue
            if key != self._open:
                events += [*self.close(), *self._begin(part, key)]
            item = self.items[-1]
            where = {"item_id": item["id"], "output_index": len(self.items) - 1}
            if isinstance(part, CallPart):
                item["arguments"] += part.arguments
                if part.arguments:
                    events.append(self.event("function_call_arguments.delta", **where, delta=part.arguments))
                continue
            text, self._blank = self._blank + part.text, ""
            item["content"][0]["text"] += text
            is_thought = part.field == THOUGHT_SHOWN
            kind, extra = ("reasoning_text", {}) if is_thought else ("output_text", {"logprobs": []})
            events.append(self.event(f"{kind}.delta", **where, content_index=0, delta=text, **extra))
            self.thought += text if is_thought else ""
        return events

    def _begin(self, part: Part, key: str) -> list[dict[str, Any]]:
        self._open = key
        number, suffix = len(self.items), self.generation.answer_id.partition("-")[2]
        if isinstance(part, CallPart):
            self._blank = ""
            item = {"id": f"fc_{suffix}_{number}", "type": "function_call", "status": "in_progress",
                    "call_id": part.call_id, "name": part.name, "arguments": ""}  # fmt: skip
            self.items.append(item)
            return [self.event("output_item.added", output_index=number, item=dict(item))]
        if part.field == THOUGHT_SHOWN:
            item: dict[str, Any] = {"id": f"rs_{suffix}_{number}", "type": "reasoning", "summary": []}
            content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": f"msg_{suffix}_{number}", "type": "message", "role": "assistant"}
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item |= {"status": "in_progress", "content": []}
        events = [self.event("output_item.added", output_index=number, item=dict(item))]
        where = {"item_id": item["id"], "output_index": number, "content_index": 0}
        events.append(self.event("content_part.added", **where, part=dict(content)))
        item["content"] = [content]
        self.items.append(item)
        return events

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Ends the open item and returns its events."""
        if not self._open:
            return []
        item, self._open = self.items[-1], ""
        item["status"] = status
        where: dict[str, Any] = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            events = [self.event("function_call_arguments.done", **where, **named)]
        else:
            content = item["content"][0]
            kind, where = content["type"], where | {"content_index": 0}
            extra = {"logprobs": []} if kind == "output_text" else {}
            events = [
                self.event(f"{kind}.done", **where, text=content["text"], **extra),
                self.event("content_part.done", **where, part=dict(content)),
            ]
        return [*events, self.event("output_item.done", output_index=len(self.items) - 1, item=dict(item))]

    def finish(self) -> list[dict[str, Any]]:
        """Ends the answer, which has a message at least, and returns the events. Keeps it if the request wants so."""
        generation, events = self.generation, list[dict[str, Any]]()
        if not self.items:
            events += self._begin(TextPart("content", ""), "content")
        is_cut = generation.answers[0].finish_reason == "length"
        events += self.close("incomplete" if is_cut else "completed")
        request = cast(_Chat, generation.request)
        if request._store is not None:
            items = ResponseRequest.model_validate({"model": "", "input": self.items})
            known = request.messages[bool(request._asked.instructions) :]
            request._store.put(generation.answer_id, [*known, *items.turns()])
        return events

    def body(self, status: str) -> dict[str, Any]:
        """Returns the response. status: "" for that of the finished answer."""
        generation, request = self.generation, cast(_Chat, self.generation.request)
        asked, usage = request._asked, None
        is_cut = generation.answers[0].finish_reason == "length"
        if not status:
            status, counts = "incomplete" if is_cut else "completed", generation.usage()
            thought = generation.model.tokenizer.encode(self.thought, with_begin=False)
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": min(len(thought), counts["completion_tokens"])},
                "total_tokens": counts["total_tokens"],
            }
        plain = asked.model_dump(
            by_alias=True, exclude_none=True, include={"tools", "tool_choice", "reasoning", "text"}
        )
        settings = ("instructions", "max_output_tokens", "previous_response_id", "metadata", "user")
        return {
            "id": generation.answer_id,
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": asked.model,
            "output": [dict(item) for item in self.items],
            "usage": usage,
            **{name: getattr(asked, name) for name in settings},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "store": request._store is not None,
            "truncation": "disabled",
            "tools": plain.get("tools", []),
            "tool_choice": plain.get("tool_choice", "auto"),
            "text": {"format": {"type": "text"}} | plain.get("text", {}),
            "reasoning": {"effort": None, "summary": None} | plain.get("reasoning", {}),
        }


def _parts(generation: Generation, text: str, *, is_last: bool) -> Sequence[Part]:
    reader = generation.answers[0].reader
    if reader is not None:
        return reader.push(text, is_last=is_last)
    return [TextPart("content", text)] if text else []


def _full(generation: Generation) -> dict[str, Any]:
    output = _Output(generation)
    output.push(_parts(generation, generation.answers[0].shown, is_last=True))
    output.finish()
    return output.body("")


async def _events(generation: Generation) -> AsyncIterator[Mapping[str, Any]]:
    output = _Output(generation)
    try:
        for kind in ("created", "in_progress"):
            yield output.event(kind, response=output.body("in_progress"))
        async for _, piece in generation.pieces():
            for event in output.push(_parts(generation, piece.text, is_last=bool(piece.finish_reason))):
                yield event
        for event in output.finish():
            yield event
        body = output.body("")
        yield output.event(body["status"], response=body)
    except ApiError as error:
        event = output.event("error", code=error.code or None, message=error.message, param=error.param or None)
        yield event | {"type": "error"}
        raise


async def create_response(request: Request) -> Response:
    return await respond(request, RESPONSES)


def prepare(service: Service, config: ResponsesConfig) -> None:
    service.extensions[NAME] = ResponseStore(config.stored)


RESPONSES = cast(AnswerKind[_Chat], replace(CHAT, id_prefix="resp", read=cast(Any, _read), full=_full, events=_events))

ROUTE = RouteSpec(
    scope="infer",
    config=ResponsesConfig,
    operation=Operation(
        "POST", "/v1/responses", create_response, "Answer with items, as OpenAI's Responses API", ResponseReply,
        ResponseRequest, GENERATES, ResponseEvent, prepare, needs_engine=True,
    ),
)  # fmt: skip
