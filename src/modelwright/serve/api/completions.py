"""/v1/completions: texts or token ids that are continued. Fields that OpenAI lacks are named as vLLM names them."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from modelwright.serve.api.answers import AnswerKind, finite, prompt_logprobs, read_generation, respond, token_name
from modelwright.serve.api.fields import NumLogprobs, PromptEntries, Unsupported, as_list, unsupported
from modelwright.serve.api.parsing import not_empty, token_ids
from modelwright.serve.generation import Answer, Generation, GenerationRequest, Prompt
from modelwright.serve.limits import Limits
from modelwright.serve.service import Lease
from modelwright.serve.tokenizer import Delta, TokenInfo

OBJECT = "text_completion"

COMPLETION_DEFAULT_TOKENS = 16
"""What OpenAI's completions generate when `max_tokens` is left out; chat fills the context instead."""


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


async def create_completion(request: Request) -> Response:
    return await respond(request, COMPLETION)


def _completion_prompts(asked: CompletionRequest, lease: Lease) -> list[Prompt]:
    prompts: list[Prompt] = []
    for prompt in not_empty(asked.prompts, "prompt"):
        ids = token_ids(prompt, "prompt", lease)
        text = prompt if isinstance(prompt, str) else lease.model.tokenizer.decode(ids) if asked.echo else ""
        prompts.append(Prompt(ids, text))
    return prompts


def _full(generation: Generation) -> dict[str, Any]:
    """The answer in one piece."""
    choices = []
    for index, answer in enumerate(generation.answers):
        choice = _choice(
            generation, index, answer.shown, _tokens(generation, answer, answer.tokens), answer.finish_reason
        )
        choices.append(choice | _prompt_ids(generation, answer) | _token_ids(generation, answer))
        if generation.request.prompt_logprobs is not None:
            choices[-1]["prompt_logprobs"] = prompt_logprobs(generation, answer)
    return generation.envelope(OBJECT, choices) | {"usage": generation.usage()}


def _chunk(generation: Generation, index: int, piece: Delta) -> dict[str, Any]:
    """One event of a stream."""
    answer = generation.answers[index]
    is_first = answer.num_tokens == len(answer.unsent)
    choice = _choice(generation, index, piece.text, _tokens(generation, answer, piece.tokens), piece.finish_reason)
    choice |= _prompt_ids(generation, answer) if is_first else {}
    return generation.envelope(OBJECT, [choice | _token_ids(generation, answer)])


def _choice(generation: Generation, index: int, text: str, tokens: Sequence[TokenInfo], reason: str) -> dict[str, Any]:
    requested = generation.request.num_logprobs is not None
    return {
        "index": index,
        "text": text,
        "logprobs": _logprobs(generation, tokens) if requested else None,
        "finish_reason": reason or None,
    }


def _tokens(generation: Generation, answer: Answer, shown: Sequence[TokenInfo]) -> Sequence[TokenInfo]:
    """The tokens whose log-probabilities are in a body: those of its text, `shown`, or as in vLLM, where the client
    asks for ids, one for each id.
    """
    if not generation.request.return_token_ids or generation.request.echoes:
        return shown
    return answer.unsent


def _prompt_ids(generation: Generation, answer: Answer) -> dict[str, Any]:
    return {"prompt_token_ids": list(answer.prompt.ids)} if generation.request.return_token_ids else {}


def _token_ids(generation: Generation, answer: Answer) -> dict[str, Any]:
    return {"token_ids": answer.take_unsent_ids()} if generation.request.return_token_ids else {}


def _logprobs(generation: Generation, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
    name = partial(token_name, generation)
    return {
        "tokens": [name(token.token_id) for token in tokens],
        "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else _alternatives(generation, token, token.logprob) for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def _alternatives(generation: Generation, token: TokenInfo, logprob: float) -> dict[str, float]:
    """Likeliest first, and the token itself if it is none of them, as OpenAI has it. Of tokens with the same text the
    likeliest counts.
    """
    entries: dict[str, float] = {}
    for other, its_logprob in [*token.alternatives, (token.token_id, logprob)]:
        entries.setdefault(token_name(generation, other), finite(its_logprob))
    return entries


COMPLETION = AnswerKind(
    route="completion",
    id_prefix="cmpl",
    read=partial(read_generation, CompletionRequest),
    prompts=_completion_prompts,
    many=True,
    full=_full,
    opening=lambda generation: [],
    chunk=_chunk,
    event_object=OBJECT,
)
