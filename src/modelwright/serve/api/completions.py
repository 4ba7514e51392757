"""/v1/completions: continues texts or token ids. Fields that OpenAI does not have are named as in vLLM."""

from functools import partial
from typing import Annotated, Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from modelwright.serve.api.answers import AnswerKind, finite, prompt_logprobs, read_generation, respond, token_name
from modelwright.serve.api.fields import (
    GenerationRequest,
    NumLogprobs,
    PromptEntries,
    Unsupported,
    as_list,
    unsupported,
)
from modelwright.serve.api.parsing import token_ids
from modelwright.serve.generation import Generation, Prompt
from modelwright.serve.load import Delta
from modelwright.serve.service import Lease

OBJECT = "text_completion"

COMPLETION_DEFAULT_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chat may fill the context instead."""


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    PROMPT_FIELDS = ("prompt",)
    MOST_DEFAULT_TOKENS = COMPLETION_DEFAULT_TOKENS

    prompt: PromptEntries
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[Any, unsupported(1)] = None
    suffix: Unsupported = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    """Recognize special tokens in texts, as llama.cpp names it; by default they are plain characters."""

    @model_validator(mode="after")
    def _zero_tokens(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens may be 0 only with echo or prompt_logprobs, which show the prompt alone")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, as text or as token ids."""
        return as_list(self.prompt)

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def texts(self) -> list[str]:
        return [prompt for prompt in self.prompts if isinstance(prompt, str)]

    @property
    def num_prompt_logprobs(self) -> int | None:
        # echoed tokens have log-probabilities like new ones
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


async def create_completion(request: Request) -> Response:
    return await respond(request, COMPLETION)


def _completion_prompts(asked: CompletionRequest, lease: Lease) -> list[Prompt]:
    prompts: list[Prompt] = []
    flags = {"with_begin": asked.add_special_tokens is not False, "parse_special": bool(asked.parse_special)}
    for prompt, ids in zip(asked.prompts, token_ids(asked.prompts, "prompt", lease, **flags), strict=True):
        text = prompt if isinstance(prompt, str) else lease.model.tokenizer.decode(ids) if asked.echo else ""
        prompts.append(Prompt(ids, text))
    return prompts


def _full(generation: Generation) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for index, answer in enumerate(generation.answers):
        piece = Delta(answer.shown, tuple(answer.tokens), answer.finish_reason)
        choices.append(_choice(generation, index, piece, has_prompt=True))
        if generation.request.prompt_logprobs is not None:
            choices[-1]["prompt_logprobs"] = prompt_logprobs(generation, answer)
    return generation.envelope(OBJECT, choices) | {"usage": generation.usage()}


def _chunk(generation: Generation, index: int, piece: Delta) -> dict[str, Any]:
    answer = generation.answers[index]
    is_first = answer.num_tokens == len(answer.unsent)
    return generation.envelope(OBJECT, [_choice(generation, index, piece, has_prompt=is_first)])


def _choice(generation: Generation, index: int, piece: Delta, *, has_prompt: bool) -> dict[str, Any]:
    """Returns the entry of an answer in a body. has_prompt: whether the body contains the ids of the prompt."""
    request, answer = generation.request, generation.answers[index]
    # log-probabilities are those of the text, or as in vLLM, where the client asks for ids, one for each id
    tokens = answer.unsent if request.return_token_ids and not request.echoes else piece.tokens
    logprobs = None
    if request.num_logprobs is not None:
        # Alternatives by text, likeliest first. As in OpenAI's API, the token itself comes last if it is not among
        # them. None for the first token of an echoed prompt.
        alternatives: list[dict[str, float] | None] = []
        for token in tokens:
            by_text: dict[str, float] = {}
            own = [] if token.logprob is None else [(token.token_id, token.logprob)]
            for other, logprob in [*token.alternatives, *own]:
                # several tokens may have the same text, of which the first is the likeliest
                by_text.setdefault(token_name(generation, other), finite(logprob))
            alternatives.append(by_text if own else None)
        logprobs = {
            "tokens": [token_name(generation, token.token_id) for token in tokens],
            "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
            "top_logprobs": alternatives,
            "text_offset": [token.offset for token in tokens],
        }
    choice = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason or None}
    if request.return_token_ids:
        choice |= {"prompt_token_ids": list(answer.prompt.ids)} if has_prompt else {}
        choice["token_ids"] = answer.take_unsent_ids()
    return choice


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
