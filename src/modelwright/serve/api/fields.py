"""Fields that requests share, with their validators: prompts, images, and those that constrain the form of an answer.
The texts of errors are for people (see `parsing`).

Images come in the request itself, as `data:` URLs; an address is never fetched. They are decoded once the model that
answers is known.
"""

import json
import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from modelwright.data.tokenizer.chat import IMAGE_MARK
from modelwright.infer.sequence import MAX_TEMPERATURE
from modelwright.serve.engines.grammars import MAX_GRAMMAR_CHARACTERS, GrammarSource, json_source
from modelwright.serve.errors import ApiError
from modelwright.serve.limits import Limits

SHOWN_CHARACTERS = 80
"""Most characters of a client's own text that an error message repeats."""


def unsupported(*neutral: Any) -> AfterValidator:
    """Returns a validator that accepts `neutral` and empty values, which change nothing, and rejects all others."""

    def check(value: Any) -> None:
        if value and value not in neutral:
            raise ValueError("is not supported by this server; remove it")

    return AfterValidator(check)


def prompt_entries(prompt: Any) -> Any:
    """Validates a text, a list of texts, of token ids, or of lists of token ids, and returns it unchanged."""
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
    # without a bytecode per id, of which there may be half a million; `bool` is another type, so true is rejected
    return set(map(type, entries)) <= {int}


def as_list(prompt: Any) -> list[str] | list[list[int]]:
    """Returns prompts as a list, also a single one."""
    return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt


def stop_texts(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else cast(list[Any], stop or [])
    is_known = isinstance(texts, list) and len(texts) <= 16
    if not is_known or not all(isinstance(text, str) and 0 < len(text) <= 1000 for text in texts):
        raise ValueError("give at most 16 stop strings of 1 to 1000 characters")
    return tuple(texts)


def text_list(texts: Any) -> list[str]:
    """Validates a text or a list of texts, and returns a list."""
    entries = cast(list[Any], texts) if isinstance(texts, list) else [texts]
    if not entries or not all(isinstance(entry, str) for entry in entries):
        raise ValueError("must be a text or a list of texts")
    return entries


Penalty = Annotated[float, Field(ge=-2, le=2)]
Unsupported = Annotated[Any, unsupported(), WithJsonSchema({"type": "null"})]
"""A field of the API for a feature that this server does not support."""


Ignored = Annotated[Any, WithJsonSchema({})]
"""A field that is accepted and changes nothing."""


class Strict(BaseModel):
    """A model that rejects unknown fields. A null field is treated as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class RequestModel(Strict):
    """The body of a request."""

    HARMLESS_FIELDS: ClassVar[frozenset[str]] = frozenset()
    """Fields of other servers that change no answer here: they are accepted, and a header of the reply names them."""

    NEUTRAL_VALUES: ClassVar[Mapping[str, Any]] = {}
    """Fields of features that this server lacks, with the value that does not ask for them."""

    PROMPT_FIELDS: ClassVar[tuple[str, ...]] = ()
    """Fields that may be as long as the context. All others need limits of their own, in their types."""

    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of the body that were accepted and ignored."""
        return self._ignored

    def ignore(self, *names: str) -> None:
        """Adds fields that change nothing for this model."""
        self._ignored = (*self._ignored, *names)

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """Raises `ApiError` 400 if `data` has more entries or characters than the server can use."""
        for param in cls.PROMPT_FIELDS:
            limits.check_prompts(data, param, cls.PROMPT_FIELDS)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Converts `{"token id": bias}` to pairs. Ids are strings, because they are keys of a JSON object."""
    entries: Mapping[Any, Any] = cast(Mapping[Any, Any], value) if isinstance(value, dict) else {}
    is_known = value is None or isinstance(value, dict)
    is_known = is_known and all(isinstance(key, str) and key.isascii() and key.isdigit() for key in entries)
    is_known = is_known and all(
        isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        for bias in entries.values()
    )
    if not is_known:
        raise ValueError('must be an object of token ids and numbers from -100 to 100, such as {"50256": -100}')
    return tuple((int(key), float(bias)) for key, bias in entries.items())


@dataclass(frozen=True)
class ImagePart:
    """An image in a message. number: index of the part; data: base64."""

    number: int
    data: str


@dataclass(frozen=True)
class Said:
    """The content of a message. marked: its text with a mark in place of each image."""

    marked: str
    images: tuple[ImagePart, ...] = ()

    @property
    def text(self) -> str:
        """The text without images."""
        return self.marked.replace(IMAGE_MARK, "").strip("\n") if self.images else self.marked


_HINTS = {"cache_control"}
"""Fields of a part that are accepted and change nothing."""


def read_content(content: Any) -> Said | None:
    """Validates the content of a message. Parts are joined by line breaks."""
    if content is None:
        return None
    # the mark is a Unicode noncharacter; one in a client's text would stand for an image that does not exist
    if isinstance(content, str):
        return Said(content.replace(IMAGE_MARK, ""))
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of parts")
    images: list[ImagePart] = []
    texts: list[str] = []
    for number, part in enumerate(cast(list[Any], content)):
        kind = cast(Mapping[str, Any], part).get("type") if isinstance(part, dict) else None
        if kind == "image_url":
            image = part.get("image_url")
            url = cast(Mapping[str, Any], image).get("url") if isinstance(image, dict) else None
            fields = set(cast(Any, image)) if isinstance(image, dict) else set[str]()
            if (
                set(part) - _HINTS != {"type", "image_url"}
                or not isinstance(url, str)
                or not fields <= {"url", "detail"}
            ):
                form = '{"type": "image_url", "image_url": {"url": "data:image/..."}}'
                raise ValueError(f"part {number}: an image must be {form}")
            head, comma, data = url.partition(",")
            if not head.lower().startswith("data:"):
                raise ValueError(
                    f"part {number}: this server fetches nothing, so {short(url)!r} is not read; send the image itself "
                    "as data:image/png;base64,..."
                )
            if not comma or not head.lower().endswith(";base64"):
                text = "a data: URL must have its image in base64: data:image/png;base64,..."
                raise ValueError(f"part {number}: {text}")
            images.append(ImagePart(number, data))
            texts.append(IMAGE_MARK)
        elif isinstance(kind, str) and kind != "text":
            text = f"parts of type {short(kind)!r} are not supported by this server"
            raise ValueError(f"{text}, which reads text and images")
        elif kind != "text" or set(part) - _HINTS != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('each part must be {"type": "text", "text": "..."}')
        else:
            texts.append(part["text"].replace(IMAGE_MARK, ""))
    return Said("\n".join(texts), tuple(images))


def short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


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

_IMAGE_SCHEMA = {
    "type": "object",
    "properties": {
        "url": {"type": "string", "pattern": "^data:[^,]*;base64,"},
        "detail": {"enum": ["auto", "low", "high"]},
    },
    "required": ["url"],
    "additionalProperties": False,
}
_PART_SCHEMAS = [
    {
        "type": "object",
        "properties": {"type": {"const": name}, name: schema, "cache_control": {}},
        "required": ["type", name],
        "additionalProperties": False,
    }
    for name, schema in (("text", {"type": "string"}), ("image_url", _IMAGE_SCHEMA))
]
CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": _PART_SCHEMAS}}, {"type": "null"}]}


PromptEntries = Annotated[Any, BeforeValidator(prompt_entries), WithJsonSchema(PROMPT_SCHEMA)]
Content = Annotated[Said | None, BeforeValidator(read_content), WithJsonSchema(CONTENT_SCHEMA)]
StopTexts = Annotated[tuple[str, ...], BeforeValidator(stop_texts), WithJsonSchema(STOP_SCHEMA)]
Texts = Annotated[list[str], BeforeValidator(text_list), WithJsonSchema(TEXTS_SCHEMA)]
LogitBias = Annotated[tuple[tuple[int, float], ...], BeforeValidator(_biases), WithJsonSchema(BIAS_SCHEMA)]
TokenIds = Annotated[list[int], Field(max_length=64)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]


FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(Strict):
    """A function. `parameters`: JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Ignored = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": False} if self.parameters is None else self.parameters


GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class JsonSchemaFormat(Strict):
    """A JSON schema with a name. Answers conform to it with and without `strict`."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, which needs it")
        return self

    def source(self, param: str = "response_format") -> GrammarSource | None:
        """Returns the grammar, or None for plain text. Raises `ApiError`."""
        if self.type == "text":
            return None
        schema = self.json_schema.json_schema if self.json_schema else None
        return json_source({"type": "object"} if schema is None else schema, param)


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: one of a JSON schema, a regular expression, a list of texts, a Lark grammar."""

    json_schema: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Annotated[list[GrammarText], Field(min_length=1, max_length=1024)] | None = None
    grammar: GrammarText | None = None

    @model_validator(mode="after")
    def _has_one(self) -> "StructuredOutputs":
        if sum(value is not None for value in (self.json_schema, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("give exactly one of json, regex, choice and grammar")
        return self

    def source(self) -> GrammarSource:
        """Returns the grammar. Raises `ApiError`."""
        param = "structured_outputs"
        if self.json_schema is not None:
            return json_source(self.json_schema, param)
        if self.choice is not None:
            texts = [json.dumps(text, ensure_ascii=False) for text in self.choice]
            return GrammarSource("lark", f"start: {' | '.join(texts)}", param)
        if self.regex is not None:
            return GrammarSource("regex", self.regex, param)
        return GrammarSource("lark", self.grammar or "", param)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


HARMLESS_FIELDS = frozenset(
    (
        *("prediction", "prompt_cache_retention", "moderation"),  # OpenAI: speed, price
        *("cache_control", "provider", "route", "session_id", "usage"),  # Anthropic, OpenRouter
        *("keep_alive", "num_ctx", "priority", "request_id"),  # Ollama, vLLM
    )
)
"""Fields of other servers that are accepted and change nothing; docs/serving.md lists them."""
NEUTRAL_VALUES: Mapping[str, Any] = {
    "verbosity": "medium",
    "transforms": [],
    "use_beam_search": False,
    "length_penalty": 1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
}
"""Fields that change answers elsewhere and are not supported here, with the one value that changes nothing."""


class GenerationRequest(RequestModel):
    """Fields that completions and chat share. The last group is accepted and ignored."""

    HARMLESS_FIELDS = HARMLESS_FIELDS
    NEUTRAL_VALUES = NEUTRAL_VALUES
    CLAMPS_TOKENS: ClassVar[bool] = False
    """Whether `max_tokens` above the room is lowered to it, where the server's settings allow."""
    MOST_DEFAULT_TOKENS: ClassVar[int] = sys.maxsize
    """Most new tokens of an answer if the client sets no limit; the room in the context limits it further."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopTexts = ()
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: LogitBias = ()
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    @abstractmethod
    def asked_tokens(self) -> int | None:
        """The client's limit on new tokens of each answer; None without one."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of alternatives to report with each new token; None if the client asks for no log-probabilities."""

    @abstractmethod
    def texts(self) -> list[str]:
        """Returns the client's texts by prompt or turn, [] for prompts of token ids."""

    def session_text(self) -> str:
        """Returns the part that all requests of one conversation share, or ""."""
        return ""

    def grammar(self) -> GrammarSource | None:
        """Returns the grammar of the answers, None for any text. Raises `ApiError` 400 for a bad one or several."""
        forms = (self.response_format, self.structured_outputs)
        sources = [source for form in forms if form is not None and (source := form.source())]
        if len(sources) > 1:
            text = f"{sources[0].param} and {sources[1].param} cannot be combined; give one of them."
            raise ApiError(400, text, param=sources[1].param, code="invalid_value")
        return sources[0] if sources else None

    @property
    def has_images(self) -> bool:
        """True if the prompt has images, which take long to decode."""
        return False

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives to report with each token of the prompt; None if nothing needs them."""
        return self.prompt_logprobs

    @property
    def echoes(self) -> bool:
        """True if answers begin with their prompt."""
        return False

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)
