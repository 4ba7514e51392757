"""The bodies of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from modelwright.serve.generation import Answer, Generation
from modelwright.serve.logprobs import finite, prompt_logprobs, token_name
from modelwright.serve.tokenizer import Delta, TokenInfo
from modelwright.serve.tools import CallDelta, CallText

CHUNK = "chat.completion.chunk"


def full(generation: Generation) -> dict[str, Any]:
    """The answer in one piece."""
    choices = [
        {
            "index": index,
            "message": _message(generation, answer),
            "logprobs": _logprobs(generation, answer.tokens),
            "finish_reason": _reason(generation, answer.finish_reason),
            **_token_ids(generation, index),
        }
        for index, answer in enumerate(generation.answers)
    ]
    body = generation.envelope("chat.completion", choices) | {"usage": generation.usage()} | _prompt_ids(generation)
    if generation.request.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(generation, generation.answers[0])
    return body


def opening(generation: Generation) -> list[dict[str, Any]]:
    """The first events of a stream: the role of the speaker."""
    delta = {"role": "assistant", "content": "" if generation.call is None else None}
    return [
        generation.envelope(CHUNK, [_choice(index, delta, None, None)]) | _prompt_ids(generation)
        for index in range(len(generation.answers))
    ]


def chunk(generation: Generation, index: int, piece: Delta) -> dict[str, Any]:
    """One event of a stream."""
    call = generation.answers[index].call
    delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
    if call is not None:
        part = call.push(piece.text)
        delta = {"tool_calls": [_call_delta(call, part)]} if part.name or part.arguments else {}
    logprobs = _logprobs(generation, piece.tokens)
    choice = _choice(index, delta, logprobs, _reason(generation, piece.finish_reason) or None)
    return generation.envelope(CHUNK, [choice | _token_ids(generation, index)])


def _message(generation: Generation, answer: Answer) -> dict[str, Any]:
    if answer.call is None:
        return {"role": "assistant", "content": answer.shown, "refusal": None}
    part = answer.call.push(answer.shown)
    function = {"name": part.name, "arguments": part.arguments}
    calls = [{"id": answer.call.call_id, "type": "function", "function": function}] if part.name else []
    return {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}


def _call_delta(call: CallText, part: CallDelta) -> dict[str, Any]:
    if part.name:
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": 0, "id": call.call_id, "type": "function", "function": function}
    return {"index": 0, "function": {"arguments": part.arguments}}


def _reason(generation: Generation, reason: str) -> str:
    """A finished call has a reason of its own."""
    return "tool_calls" if generation.call is not None and reason == "stop" else reason


def usage_chunk(generation: Generation) -> dict[str, Any]:
    """The last event, if the client asked for it."""
    return generation.envelope(CHUNK, []) | {"usage": generation.usage()}


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _prompt_ids(generation: Generation) -> dict[str, Any]:
    wanted = generation.request.return_token_ids
    return {"prompt_token_ids": list(generation.answers[0].prompt.ids)} if wanted else {}


def _token_ids(generation: Generation, index: int) -> dict[str, Any]:
    return {"token_ids": generation.answers[index].take_unsent_ids()} if generation.request.return_token_ids else {}


def _logprobs(generation: Generation, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
    if generation.request.num_logprobs is None:
        return None
    entries = []
    for token in tokens:
        assert token.logprob is not None, "an answer of a chat begins after its prompt"
        others = [_entry(generation, other, logprob) for other, logprob in token.alternatives]
        entries.append(_entry(generation, token.token_id, token.logprob) | {"top_logprobs": others})
    return {"content": entries, "refusal": None}


def _entry(generation: Generation, token_id: int, logprob: float) -> dict[str, Any]:
    name, data = token_name(generation, token_id), generation.codec.token_bytes(token_id)
    return {"token": name, "logprob": finite(logprob), "bytes": list(data)}
