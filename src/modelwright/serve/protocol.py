"""Requests as OpenAI clients send them, validated strictly: wrong types, values out of range, unknown fields and
features that this server lacks are rejected with the field's name instead of being ignored.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from modelwright.infer.sequence import MAX_TEMPERATURE
from modelwright.serve.errors import ApiError
from modelwright.serve.limits import Limits

R = TypeVar("R", bound="GenerationRequest")

SHOWN_CHARACTERS = 80
"""What a message repeats of a client's own words at most."""


def _unsupported(*neutral: Any) -> AfterValidator:
    """Accepts the values that ask for nothing, `neutral` and empty ones, and refuses all others."""

    def check(value: Any) -> None:
        if value and value not in neutral:
            raise ValueError("is not supported by this server; remove it")

    return AfterValidator(check)


def _content_text(content: Any) -> str | None:
    """The text of a message; text in parts is joined by line breaks."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of text parts")
    return "\n".join(_part_text(part) for part in cast(list[Any], content))


def _part_text(part: Any) -> str:
    kind = cast(Mapping[str, Any], part).get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"parts of type {_short(kind)!r} are not supported by this server, which reads text only")
    if kind != "text" or set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise ValueError('each part must be {"type": "text", "text": "..."}')
    return part["text"]


def _prompt(prompt: Any) -> Any:
    """A text, a list of texts, of token ids, or of lists of token ids, as it came."""
    entries = cast(list[Any], prompt) if isinstance(prompt, list) else [""]
    is_known = isinstance(prompt, (str, list)) and (
        all(isinstance(entry, str) for entry in entries)
        or _are_ids(entries)
        or all(isinstance(entry, list) and _are_ids(cast(list[Any], entry)) for entry in entries)
    )
    if not is_known:
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of lists of token ids")
    return prompt


def _are_ids(entries: list[Any]) -> bool:
    return all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries)


def _stop_texts(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else cast(list[Any], stop or [])
    is_known = isinstance(texts, list) and len(texts) <= 16
    if not is_known or not all(isinstance(text, str) and 0 < len(text) <= 1000 for text in texts):
        raise ValueError("give at most 16 stop strings of 1 to 1000 characters")
    return tuple(texts)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


Penalty = Annotated[float, Field(ge=-2, le=2)]
Unsupported = Annotated[Any, _unsupported()]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Message(Strict):
    """One turn. An assistant's turn may have no content."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_content_text)] = None
    name: str | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: list[Any] | None = None
    function_call: Unsupported = None
    tool_calls: Unsupported = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is missing; only an assistant's turn may leave it out, not a {self.role}'s")
        return self

    def plain(self) -> dict[str, str]:
        """Role and content in the form that the chat template takes."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content or ""}


class GenerationRequest(Strict):
    """Fields that both kinds of request share. `top_k` is our extension; the last group is accepted and has no
    effect.
    """

    model: str
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_texts)] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Unsupported = None
    min_p: Unsupported = None
    repetition_penalty: Annotated[Any, _unsupported(1)] = None
    ignore_eos: Unsupported = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @classmethod
    @abstractmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """Raise `ApiError` 400 if `data` has more entries or characters than the server can use."""

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(_prompt)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Unsupported = None
    best_of: Annotated[Any, _unsupported(1)] = None
    suffix: Unsupported = None

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        limits.check_completion(data)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several prompts, as text or as token ids."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return self.prompt


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Unsupported = None
    tool_choice: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        limits.check_chat(data)

    @field_validator("response_format")
    @classmethod
    def _text_only(cls, value: dict[str, Any] | None) -> None:
        if value and value != {"type": "text"}:
            raise ValueError('only {"type": "text"} is supported by this server')


def parse_request(kind: type[R], body: bytes, limits: Limits) -> R:
    """Parse a request from a body. Raises `ApiError` 400 that names the field and the remedy."""
    data = _load(body)
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    unknown = next((name for name in data if name not in kind.model_fields), None)
    if unknown is not None:
        raise _unknown_field(kind, unknown)
    kind.check_size(data, limits)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _refusal(first) from None


def _load(body: bytes) -> Any:
    try:
        text = body.decode("utf-8")
        data = json.loads(text)
        if "\\u" in text:  # half of a surrogate pair can be escaped, and is no character that a tokenizer could read
            json.dumps(data, ensure_ascii=False).encode("utf-8")
        return data
    except json.JSONDecodeError as error:
        reason = str(error)
    except UnicodeEncodeError as error:
        reason = f"it has one half of a surrogate pair alone, {error.object[error.start]!r}"
    except (ValueError, RecursionError):
        reason = "it is not UTF-8 text or nested too deep"
    raise ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")


def _unknown_field(kind: type[BaseModel], name: str) -> ApiError:
    known = ", ".join(sorted(kind.model_fields))
    shown = _short(name)
    return ApiError(400, f"Unknown field {shown!r}. Known fields: {known}.", param=shown, code="unknown_parameter")


def _refusal(problem: Any) -> ApiError:
    path = [str(part) for part in problem["loc"]]
    name = path[0] if path else ""
    where = ".".join(part for part in path if part.isdigit() or part.isidentifier())
    if problem["type"] == "missing":
        return ApiError(400, f"Missing required field {where!r}.", param=name, code="missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown field {where!r}; remove it.", param=name, code="unknown_parameter")
    return ApiError(400, f"Invalid value for {where!r}: {_reason(problem)}.", param=name, code="invalid_value")


def _reason(problem: Any) -> str:
    """What is wrong, and the value if it is a short one."""
    value = problem["input"]
    if problem["type"] == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "too_short":
        return "must not be empty"
    expected = "must be an object" if problem["type"] == "model_type" else problem["msg"]
    expected = (
        expected.replace("Input should be a valid ", "must be a ")
        .replace("must be a integer", "must be an integer")
        .replace("Input should be ", "must be ")
    )
    is_scalar = value is None or isinstance(value, (bool, int, float, str))
    return f"{expected}, got {json.dumps(value)}" if is_scalar and len(str(value)) <= SHOWN_CHARACTERS else expected
