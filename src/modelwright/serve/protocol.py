"""Requests as OpenAI clients send them, validated strictly: wrong types, values out of range, unknown fields and
features that this server lacks are rejected with the field's name instead of being ignored. Fields that OpenAI does not
have are named as vLLM names them.
"""

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from modelwright.infer.sequence import MAX_TEMPERATURE
from modelwright.serve.engines.grammars import GrammarSource
from modelwright.serve.fields import (
    Content,
    LogitBias,
    NumLogprobs,
    Penalty,
    PromptEntries,
    RequestModel,
    StopTexts,
    Strict,
    Texts,
    TokenIds,
    Unsupported,
    as_list,
    unsupported,
)
from modelwright.serve.limits import Limits
from modelwright.serve.structured import ResponseFormat, StructuredOutputs, only_source
from modelwright.serve.tools import ForcedCall, NamedTool, Tool, ToolCall, forced_call, tool_prompt

COMPLETION_DEFAULT_TOKENS = 16
"""What OpenAI's completions generate when `max_tokens` is left out; chat fills the context instead."""


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


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


class GenerationRequest(RequestModel):
    """Fields that both kinds of request share. The last group is accepted and has no effect."""

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
        """The most new tokens of each answer, if the client says so."""

    @abstractmethod
    def default_tokens(self, room: int) -> int:
        """The most new tokens of each answer, if the client does not; room: what the context has left."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each new token; None if log-probabilities are not asked for."""

    @abstractmethod
    def texts(self) -> list[str]:
        """What the client wrote, prompt by prompt or turn by turn; [] for prompts of token ids."""

    @abstractmethod
    def session_text(self) -> str:
        """The part that all requests of one conversation share; "" if there is none."""

    def grammar(self) -> GrammarSource | None:
        """The grammar of the answers, None for any text. Raises `ApiError` 400 for a bad one and for several."""
        return self.form_of_text()

    def form_of_text(self) -> GrammarSource | None:
        """The grammar that the fields for the form of a text ask for. Raises like `grammar`."""
        formats = [self.response_format, self.structured_outputs]
        return only_source([one.source() for one in formats if one is not None])

    def forced_call(self) -> ForcedCall | None:
        """The functions one of which the answer must call; None for text."""
        return None

    @property
    def has_images(self) -> bool:
        """Whether there are images to decode."""
        return False

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to report with each token of the prompt; None if nothing needs their log-probabilities."""
        return self.prompt_logprobs

    @property
    def echoes(self) -> bool:
        """Whether an answer begins with its prompt."""
        return False

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.wants_usage_chunk and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: PromptEntries
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[Any, unsupported(1)] = None
    suffix: Unsupported = None

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        limits.check_prompts(data, "prompt")

    @model_validator(mode="after")
    def _zero_tokens(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens may be 0 only with echo or prompt_logprobs, which show the prompt alone")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several prompts, as text or as token ids."""
        return as_list(self.prompt)

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    def default_tokens(self, room: int) -> int:
        return min(COMPLETION_DEFAULT_TOKENS, room)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def texts(self) -> list[str]:
        return [prompt for prompt in self.prompts if isinstance(prompt, str)]

    def session_text(self) -> str:
        return ""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Echoed tokens come with log-probabilities like new ones."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


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


class TokenizeRequest(RequestModel):
    """POST /tokenize, in vLLM's form: a text, or a conversation up to where the assistant speaks."""

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


class DetokenizeRequest(RequestModel):
    """POST /detokenize, in vLLM's form."""

    model: str | None = None
    tokens: list[int]

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        limits.check_prompts(data, "tokens")


class EmbeddingRequest(RequestModel):
    """POST /v1/embeddings. The last group is accepted and has no effect."""

    model: str
    input: PromptEntries
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["last", "mean"] = "last"

    user: str | None = None

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """One or several texts, or their token ids."""
        return as_list(self.input)

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        limits.check_prompts(data, "input")


class ScoreRequest(RequestModel):
    """POST /v1/score, in vLLM's form: one text or as many as there are in `text_2` in `text_1`. `use_activation`: false
    for the model's own score, which is a sigmoid's input otherwise.
    """

    model: str
    text_1: Texts
    text_2: Texts
    use_activation: bool | None = None

    user: str | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(first, self.text_2, strict=True))

    @model_validator(mode="after")
    def _fits_together(self) -> "ScoreRequest":
        num_first, num_second = len(self.text_1), len(self.text_2)
        if num_first not in (1, num_second):
            raise ValueError(f"text_1 has {num_first} texts and text_2 has {num_second}; give one, or as many")
        return self

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        for param in ("text_1", "text_2"):
            limits.check_prompts(data, param)


class RerankRequest(RequestModel):
    """POST /v1/rerank, in the form that vLLM has from Jina and Cohere. `top_n`: 0 for all documents; `use_activation`:
    as in a `ScoreRequest`.
    """

    model: str
    query: str
    documents: Annotated[list[str], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=0)] = 0
    return_documents: bool | None = None
    use_activation: bool | None = None

    user: str | None = None

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        for param in ("query", "documents"):
            limits.check_prompts(data, param)


class LoadAdapterRequest(RequestModel):
    """POST /v1/load_lora_adapter, in vLLM's form. `lora_path`: a folder in PEFT's layout on the server's machine."""

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """Short fields need no further check."""


class UnloadAdapterRequest(RequestModel):
    """POST /v1/unload_lora_adapter, in vLLM's form."""

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """One short field needs no further check."""


class ReloadRequest(RequestModel):
    """POST /admin/reload. `path`: a run or model folder on the server's machine; "" is where the model in service came
    from.
    """

    path: Annotated[str, Field(max_length=4096)] = ""

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """One short field needs no further check."""


class FeedbackRequest(RequestModel):
    """POST /v1/feedback. `id`: of the answer, as its body has it; `score`: from -1 (bad) to 1 (good)."""

    id: Annotated[str, Field(pattern="^[A-Za-z0-9-]{1,64}$")]
    score: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)] | None = None
    label: Annotated[str, Field(pattern="^[A-Za-z][A-Za-z_ -]{0,63}$")] | None = None
    text: Annotated[str, Field(max_length=4000)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "FeedbackRequest":
        if self.score is None and self.label is None and not self.text:
            raise ValueError("give a score, a label or a text")
        return self

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        """The fields' own limits are enough."""
