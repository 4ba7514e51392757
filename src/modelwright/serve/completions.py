"""The bodies of /v1/completions."""

from collections.abc import Sequence
from typing import Any

from modelwright.serve.detokenizer import Delta, TokenInfo
from modelwright.serve.generation import Generation


def full(generation: Generation) -> dict[str, Any]:
    """The answer in one piece."""
    choices = [
        _choice(generation, index, answer.shown, answer.tokens, answer.finish_reason)
        for index, answer in enumerate(generation.answers)
    ]
    return generation.envelope("text_completion", choices) | {"usage": generation.usage()}


def opening(generation: Generation) -> list[dict[str, Any]]:
    """A stream of completions has no opening chunk."""
    return []


def chunk(generation: Generation, index: int, piece: Delta) -> dict[str, Any]:
    """One event of a stream."""
    choice = _choice(generation, index, piece.text, piece.tokens, piece.finish_reason)
    return generation.envelope("text_completion", [choice])


def usage_chunk(generation: Generation) -> dict[str, Any]:
    """The usage event at the end of a stream, if the client asked for it."""
    return generation.envelope("text_completion", []) | {"usage": generation.usage()}


def _choice(generation: Generation, index: int, text: str, tokens: Sequence[TokenInfo], reason: str) -> dict[str, Any]:
    requested = getattr(generation.request, "logprobs", None) is not None
    return {
        "index": index,
        "text": text,
        "logprobs": _logprobs(generation, tokens) if requested else None,
        "finish_reason": reason or None,
    }


def _logprobs(generation: Generation, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
    name = generation.codec.token_text
    return {
        "tokens": [name(token.token_id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{name(other): logprob for other, logprob in token.alternatives} for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }
