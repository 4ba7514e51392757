"""The bodies of /v1/completions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from modelwright.serve.generation import Answer, Generation
from modelwright.serve.logprobs import finite, prompt_logprobs, token_name
from modelwright.serve.tokenizer import Delta, TokenInfo

OBJECT = "text_completion"


def full(generation: Generation) -> dict[str, Any]:
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


def opening(generation: Generation) -> list[dict[str, Any]]:
    """A stream of completions has no opening chunk."""
    return []


def chunk(generation: Generation, index: int, piece: Delta) -> dict[str, Any]:
    """One event of a stream."""
    answer = generation.answers[index]
    is_first = answer.num_tokens == len(answer.unsent)
    choice = _choice(generation, index, piece.text, _tokens(generation, answer, piece.tokens), piece.finish_reason)
    choice |= _prompt_ids(generation, answer) if is_first else {}
    return generation.envelope(OBJECT, [choice | _token_ids(generation, answer)])


def usage_chunk(generation: Generation) -> dict[str, Any]:
    """The usage event at the end of a stream, if the client asked for it."""
    return generation.envelope(OBJECT, []) | {"usage": generation.usage()}


def _choice(generation: Generation, index: int, text: str, tokens: Sequence[TokenInfo], reason: str) -> dict[str, Any]:
    requested = generation.request.num_logprobs is not None
    return {
        "index": index,
        "text": text,
        "logprobs": _logprobs(generation, tokens) if requested else None,
        "finish_reason": reason or None,
    }


def _tokens(generation: Generation, answer: Answer, shown: Sequence[TokenInfo]) -> Sequence[TokenInfo]:
    """The tokens whose log-probabilities stand in a body: those of its text, `shown`, or as in vLLM, where the client
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
