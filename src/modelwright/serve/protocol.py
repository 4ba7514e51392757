"""Requests as OpenAI clients send them, validated strictly: wrong types, values out of range, unknown fields and
features that this server lacks are rejected with the field's name instead of being ignored.
"""

import json
from abc import abstractmethod
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from modelwright.serve.errors import ApiError
from modelwright.serve.limits import Limits

R = TypeVar("R", bound="GenerationRequest")

Penalty = Annotated[float, Field(ge=-2, le=2)]
Ids = Annotated[list[int], Field(fail_fast=True)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn. Content in parts must be text; it is joined by line breaks. An assistant's turn may have none."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    annotations: list[Any] | None = None
    function_call: None = None
    tool_calls: None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is missing; only an assistant's turn may leave it out, not a {self.role}'s")
        return self

    def plain(self) -> dict[str, str]:
        """Role and content in the form that the chat template takes."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class GenerationRequest(Strict):
    """Fields that both kinds of request share. `top_k` is our extension; the last group is accepted and has no
    effect.
    """

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        texts = [stop] if isinstance(stop, str) else stop or []
        if len(texts) > 16 or any(not 0 < len(text) <= 1000 for text in texts):
            raise ValueError("give at most 16 stop strings of 1 to 1000 characters")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _no_bias(cls, bias: dict[str, float] | None) -> None:
        if bias:
            raise ValueError("is not supported by this server; remove it")

    @classmethod
    @abstractmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """Raise `ApiError` 400 if `data` has more entries or characters than the server can use."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | Ids | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Ids], Field(fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        limits.check_completion(data)

    @property
    def prompts(self) -> list[str] | list[Ids]:
        """One or several prompts, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        limits.check_chat(data)

    @field_validator("tools")
    @classmethod
    def _no_tools(cls, tools: list[Any] | None) -> None:
        if tools:
            raise ValueError("are not supported by this server; remove them")

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
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
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
    shown = name if len(name) <= 80 else f"{name[:80]}..."
    return ApiError(400, f"Unknown field {shown!r}. Known fields: {known}.", param=shown, code="unknown_parameter")


def _refusal(problem: Any) -> ApiError:
    path = [str(part) for part in problem["loc"]]
    name = path[0] if path else ""
    where = ".".join(part for part in path if part.isdigit() or part.isidentifier())
    if problem["type"] == "missing":
        return ApiError(400, f"Missing required field {where!r}.", param=name, code="missing_required_parameter")
    message = problem["msg"].removeprefix("Value error, ")
    return ApiError(400, f"Invalid value for {where!r}: {message}.", param=name, code="invalid_value")
