"""Fields that requests share, with their validators. Reasons are written for people (see `parsing`)."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from modelwright.serve.contents import CONTENT_SCHEMA, Said, read_content
from modelwright.serve.limits import Limits


def unsupported(*neutral: Any) -> AfterValidator:
    """Accepts the values that ask for nothing, `neutral` and empty ones, and refuses all others."""

    def check(value: Any) -> None:
        if value and value not in neutral:
            raise ValueError("is not supported by this server; remove it")

    return AfterValidator(check)


def prompt_entries(prompt: Any) -> Any:
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
    return set(map(type, entries)) <= {int}  # without a line of Python per id: there may be half a million


def as_list(prompt: Any) -> list[str] | list[list[int]]:
    """Prompts as a list, a single one included."""
    return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt


def stop_texts(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else cast(list[Any], stop or [])
    is_known = isinstance(texts, list) and len(texts) <= 16
    if not is_known or not all(isinstance(text, str) and 0 < len(text) <= 1000 for text in texts):
        raise ValueError("give at most 16 stop strings of 1 to 1000 characters")
    return tuple(texts)


def text_list(texts: Any) -> list[str]:
    """One text or several, as a list."""
    entries = cast(list[Any], texts) if isinstance(texts, list) else [texts]
    if not entries or not all(isinstance(entry, str) for entry in entries):
        raise ValueError("must be a text or a list of texts")
    return entries


Penalty = Annotated[float, Field(ge=-2, le=2)]
Unsupported = Annotated[Any, unsupported(), WithJsonSchema({"type": "null"})]
"""A field of the API for something that this server lacks."""


class Strict(BaseModel):
    """Refuses unknown fields. A field that is null asks for nothing, so it is read as one that is left out."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class RequestModel(Strict):
    """A kind of request."""

    @classmethod
    @abstractmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """Raise `ApiError` 400 if `data` has more entries or characters than the server can use."""


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """`{"token id": bias}` as pairs; ids are texts, because they are keys of a JSON object."""
    entries: Mapping[Any, Any] = cast(Mapping[Any, Any], value) if isinstance(value, dict) else {}
    is_known = value is None or isinstance(value, dict)
    is_known = is_known and all(isinstance(key, str) and key.isascii() and key.isdigit() for key in entries)
    if not is_known or not all(_is_bias(bias) for bias in entries.values()):
        raise ValueError('must be an object of token ids and numbers from -100 to 100, such as {"50256": -100}')
    return tuple((int(key), float(bias)) for key, bias in entries.items())


def _is_bias(bias: Any) -> bool:
    return isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100


PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 16}]}
TEXTS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
BIAS_SCHEMA = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}

PromptEntries = Annotated[Any, BeforeValidator(prompt_entries), WithJsonSchema(PROMPT_SCHEMA)]
Content = Annotated[Said | None, BeforeValidator(read_content), WithJsonSchema(CONTENT_SCHEMA)]
StopTexts = Annotated[tuple[str, ...], BeforeValidator(stop_texts), WithJsonSchema(STOP_SCHEMA)]
Texts = Annotated[list[str], BeforeValidator(text_list), WithJsonSchema(TEXTS_SCHEMA)]
LogitBias = Annotated[tuple[tuple[int, float], ...], BeforeValidator(_biases), WithJsonSchema(BIAS_SCHEMA)]
TokenIds = Annotated[list[int], Field(max_length=64)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]
