"""The bodies of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from modelwright.serve.detokenizer import Delta, TokenInfo
from modelwright.serve.generation import Generation

CHUNK = "chat.completion.chunk"


def full(generation: Generation) -> dict[str, Any]:
    """The answer in one piece."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": answer.shown, "refusal": None},
            "logprobs": _logprobs(generation, answer.tokens),
            "finish_reason": answer.finish_reason,
        }
        for index, answer in enumerate(generation.answers)
    ]
    return generation.envelope("chat.completion", choices) | {"usage": generation.usage()}


def opening(generation: Generation) -> list[dict[str, Any]]:
    """The first events of a stream: the role of the speaker."""
    delta = {"role": "assistant", "content": ""}
    return [generation.envelope(CHUNK, [_choice(index, delta, None, None)]) for index in range(len(generation.answers))]


def chunk(generation: Generation, index: int, piece: Delta) -> dict[str, Any]:
    """One event of a stream."""
    delta = {"content": piece.text} if piece.text else {}
    logprobs = _logprobs(generation, piece.tokens)
    return generation.envelope(CHUNK, [_choice(index, delta, logprobs, piece.finish_reason or None)])


def usage_chunk(generation: Generation) -> dict[str, Any]:
    """The last event, if the client asked for it."""
    return generation.envelope(CHUNK, []) | {"usage": generation.usage()}


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(generation: Generation, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
    if not getattr(generation.request, "logprobs", None):
        return None
    entries = []
    for token in tokens:
        others = [_entry(generation, other, logprob) for other, logprob in token.alternatives]
        entries.append(_entry(generation, token.token_id, token.logprob) | {"top_logprobs": others})
    return {"content": entries, "refusal": None}


def _entry(generation: Generation, token_id: int, logprob: float) -> dict[str, Any]:
    codec = generation.codec
    return {"token": codec.token_text(token_id), "logprob": logprob, "bytes": list(codec.token_bytes(token_id))}
