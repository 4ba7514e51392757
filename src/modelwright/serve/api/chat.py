"""/v1/chat/completions: conversations, their images, and answers that are text or function calls. Fields that OpenAI
does not have are named as in vLLM.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from modelwright.data.images.decode import STORED_SIDE, ImageFault, decode, squared
from modelwright.infer.sequence import Pixels
from modelwright.serve.agents.calls import TEXT_SHOWN, Function, Part, TextPart
from modelwright.serve.agents.forms import OWN_FORM
from modelwright.serve.agents.reasoning import END_THINK, THINK, THOUGHT_SHOWN, AnswerReader
from modelwright.serve.api.answers import AnswerKind, finite, prompt_logprobs, read_generation, respond, token_name
from modelwright.serve.api.fields import (
    Content,
    FunctionDefinition,
    FunctionName,
    GenerationRequest,
    Ignored,
    NumLogprobs,
    Strict,
    Unsupported,
)
from modelwright.serve.engines.grammars import GrammarSource, Thought, check_references
from modelwright.serve.errors import ApiError
from modelwright.serve.generation import Answer, AnswerPlan, Generation, Prompt
from modelwright.serve.limits import Limits
from modelwright.serve.load import Delta, TokenInfo
from modelwright.serve.served_model import ServedModel
from modelwright.serve.service import Lease

CHUNK = "chat.completion.chunk"
MAX_CALLS = 8
"""Most calls of one answer."""


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Ignored = None


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
    """A call in an earlier turn of the assistant. `index`: a client that joins a stream may leave it in."""

    index: int | None = None
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Strict):
    """A turn. Only an assistant's may omit the content; a tool's turn answers the call `tool_call_id`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Ignored = None
    cache_control: Ignored = None
    reasoning_details: Ignored = None
    id: Ignored = None
    audio: Unsupported = None
    annotations: Ignored = None
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

    def templated(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns the turn in the form of templates that know calls, which is that of training. names: names of the
        functions of earlier calls by their ids."""
        role = "system" if self.role == "developer" else self.role
        turn: dict[str, Any] = {"role": role, "content": self.content.marked if self.content else ""}
        thought = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if role == "assistant" and thought is not None:
            turn["reasoning_content"] = thought
        if self.tool_calls:
            calls = [(call.id, call.function.name, _arguments(call.function.arguments)) for call in self.tool_calls]
            turn["tool_calls"] = [
                {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
                for one, name, arguments in calls
            ]
        if role == "tool":
            name = self.name or names.get(self.tool_call_id or "")
            turn |= {"name": name} if name else {}
            turn |= {"tool_call_id": self.tool_call_id} if self.tool_call_id else {}
        return turn


def _arguments(text: str) -> Any:
    """Returns the arguments of a call as templates want them: an object, or the text itself if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def render_prompt(
    messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any], model: ServedModel
) -> list[int]:
    """Returns the ids of a conversation up to the answer. A template without a place for tools gets them in the system
    message, calls as JSON and results in turns of the user. Raises `ApiError` 400 if the template rejects it.
    """
    tokenizer = model.tokenizer
    # `strict` concerns decoding; training has no such field
    names = ("name", "description", "parameters")
    described = [
        {"type": "function", "function": {n: value for n in names if (value := getattr(tool.function, n)) is not None}}
        for tool in tools
    ]
    if tokenizer.takes_tools and model.form is not OWN_FORM:
        called = {call.id: call.function.name for message in messages for call in message.tool_calls or []}
        turns: list[Any] = [message.templated(called) for message in messages]
        return tokenizer.encode_chat(turns, tools=described, variables=variables, image_text=model.image_text)
    turns = [message.plain() for message in messages]
    if tokenizer.takes_reasoning:
        for turn, message in zip(turns, messages, strict=True):
            thought = message.reasoning_content or message.reasoning
            turn |= {"reasoning_content": thought} if thought and message.role == "assistant" else {}
    if described:
        lines = ["To call one of these functions, answer with its name and arguments alone, as a JSON object:"]
        lines += [json.dumps(tool["function"], ensure_ascii=False) for tool in described]
        text = "\n".join(lines)
        # many templates allow only one system message, and only at the start
        first = turns[0]["role"] == "system"
        head = f"{turns[0]['content']}\n\n{text}" if first else text
        turns = [{"role": "system", "content": head}, *(turns[1:] if first else turns)]
    return tokenizer.encode_chat(turns, variables=variables, image_text=model.image_text)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    CLAMPS_TOKENS = True
    TURNS_FIELD: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    """Tokens after which a thought is closed, as vLLM names it."""

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        limits.check_chat(data)

    def plain_messages(self) -> list[dict[str, str]]:
        """Returns the conversation as texts."""
        return [message.plain() for message in self.messages]

    @property
    def has_images(self) -> bool:
        return any(message.content is not None and message.content.images for message in self.messages)

    def callable_functions(self) -> list[Function]:
        """Returns the functions that the answer may call, none for `tool_choice` "none". Raises `ApiError` 400 for a
        choice that the tools do not allow, and for schemas that cannot be used.
        """
        choice, tools = self.tool_choice, [tool.function for tool in self.tools or []]
        if choice == "required" and not tools:
            raise ApiError(400, "tool_choice is required, but there are no tools.", param="tool_choice")
        if isinstance(choice, NamedTool):
            named = choice.function.name
            tools = [function for function in tools if function.name == named]
            if not tools:
                text = f"tool_choice names the function {named!r}, which is not among the tools."
                raise ApiError(400, text, param="tool_choice", code="invalid_value")
        if len({tool.name for tool in tools}) < len(tools):
            raise ApiError(400, "Two tools have the same name.", param="tools", code="invalid_value")
        if choice == "none":
            return []
        if self.must_call or any(tool.strict for tool in tools):
            for tool in tools:
                check_references(tool.schema_of_arguments, "tools")
        return [Function(tool.name, tool.schema_of_arguments, bool(tool.strict)) for tool in tools]

    @property
    def must_call(self) -> bool:
        """True if the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def variables(self, template: str) -> dict[str, Any]:
        """Returns the variables of the template, with `reasoning_effort` in the form that the template knows."""
        given, effort = dict(self.chat_template_kwargs or {}), self.reasoning_effort
        if effort is None:
            return given
        if "reasoning_effort" in template:
            return {"reasoning_effort": effort} | given
        if "enable_thinking" in template:
            return {"enable_thinking": effort not in ("none", "minimal")} | given
        self.ignore("reasoning_effort")
        return given

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
    if asked.top_logprobs is not None and not asked.logprobs:
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
            where = f"messages.{number}.content.{part.number}" if asked.TURNS_FIELD == "messages" else asked.TURNS_FIELD
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
    functions = {function.name for function in asked.callable_functions()}
    tools = [tool for tool in asked.tools or [] if tool.function.name in functions]
    ids = render_prompt(asked.messages, tools, asked.variables(model.tokenizer.template), model)
    return [Prompt(ids, "", pixels)]


def _chat_plan(asked: ChatRequest, model: ServedModel, prompts: Sequence[Prompt]) -> AnswerPlan:
    """Returns how answers are constrained and read. Raises `ApiError` 400 for grammars that exclude each other."""
    functions, form, tokenizer = asked.callable_functions(), model.form, model.tokenizer
    source = asked.grammar()
    is_single = asked.parallel_tool_calls is False or isinstance(asked.tool_choice, NamedTool)
    most = 1 if is_single else MAX_CALLS
    if functions and (asked.must_call or any(one.is_strict for one in functions)):
        if source is not None:
            text = f"{source.param} and tools cannot be combined; give one of them."
            raise ApiError(400, text, param="tools", code="invalid_value")
        text = form.grammar(functions, tokenizer.special, most=most, is_forced=asked.must_call)
        source = GrammarSource("lark", text, "tools")
    state: Literal["before", "thought", "text"] = "text"
    if model.thinks:
        # a template may open the thought, or close an empty one
        tail = tokenizer.decode(prompts[0].ids[-16:], skip_special=False).rstrip()
        state = "thought" if tail.endswith(THINK) else "text" if tail.endswith(END_THINK) else "before"
    budget = asked.thinking_token_budget
    if state != "text" and (source is not None or budget is not None):
        marks = tokenizer.mark_ids(THINK), tokenizer.mark_ids(END_THINK)
        thought = Thought(*marks, state == "thought", -1 if budget is None else budget)
        source = replace(source or GrammarSource("any", "", "thinking_token_budget"), thought=thought)
    elif budget is not None:
        asked.ignore("thinking_token_budget")
    if not functions and state == "text":
        return AnswerPlan(source)
    names = [one.name for one in functions]

    def reader() -> AnswerReader:
        return AnswerReader(state, form.parser(names, most=most) if names else None)

    marks = {form.opening} if names else set[str]()
    marks |= {THINK, END_THINK} if state != "text" else set()
    return AnswerPlan(source, reader, shows_special=bool(marks & tokenizer.special.keys()))


def _bad_image(where: str, reason: str, *, code: str = "invalid_image") -> ApiError:
    return ApiError(400, f"Invalid value for {where!r}: {reason}.", param=where.partition(".")[0], code=code)


def _full(generation: Generation) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for index, answer in enumerate(generation.answers):
        message: dict[str, Any] = {"role": "assistant", "content": answer.shown, "refusal": None}
        if answer.reader is not None:
            message = _message(answer.reader.push(answer.shown, is_last=True))
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": _logprobs(generation, answer.tokens),
                "finish_reason": _reason(answer),
                **_token_ids(generation, index),
            }
        )
    body = generation.envelope("chat.completion", choices) | {"usage": generation.usage()} | _prompt_ids(generation)
    if generation.request.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(generation, generation.answers[0])
    return body


def _opening(generation: Generation) -> list[dict[str, Any]]:
    delta = {"role": "assistant", "content": "" if generation.answers[0].reader is None else None}
    choices = [
        {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        for index in range(len(generation.answers))
    ]
    return [generation.envelope(CHUNK, [choice]) | _prompt_ids(generation) for choice in choices]


def _chunk(generation: Generation, index: int, piece: Delta) -> dict[str, Any]:
    answer = generation.answers[index]
    delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
    if answer.reader is not None:
        delta = _delta(answer.reader.push(piece.text, is_last=bool(piece.finish_reason)))
    choice = {
        "index": index,
        "delta": delta,
        "logprobs": _logprobs(generation, piece.tokens),
        "finish_reason": _reason(answer) or None,
    }
    return generation.envelope(CHUNK, [choice | _token_ids(generation, index)])


def _message(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns the message of a complete answer."""
    delta = _delta(parts)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", [])]
    content = delta.get(TEXT_SHOWN)
    # a client may leave out what stands before a call; an answer without a call has a text
    content = content if (content and content.strip()) or not calls else None
    message = {"role": "assistant", "content": content if calls else content or "", "refusal": None}
    message |= {THOUGHT_SHOWN: delta[THOUGHT_SHOWN]} if THOUGHT_SHOWN in delta else {}
    return message | ({"tool_calls": calls} if calls else {})


def _delta(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns parts as a message's fields, as OpenAI streams them: id and name come with the first part of a call."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, TextPart):
            delta[part.field] = delta.get(part.field, "") + part.text
            continue
        call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
        if part.name:
            call |= {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}}
        call["function"]["arguments"] += part.arguments
    return delta | ({"tool_calls": list(calls.values())} if calls else {})


def _reason(answer: Answer) -> str:
    """Returns the finish reason, which is "tool_calls" for an answer with complete calls."""
    has_calls = answer.reader is not None and answer.reader.num_calls > 0
    return "tool_calls" if has_calls and answer.finish_reason == "stop" else answer.finish_reason


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
    plan=_chat_plan,
)
