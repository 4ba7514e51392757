"""From a validated request to the pieces of its answers, for completions and chat."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modelwright.core.errors import ConfigError
from modelwright.core.seeds import derive_seed
from modelwright.infer.sequence import SamplingParams
from modelwright.serve.detokenizer import Delta, IncrementalDetokenizer, TokenInfo
from modelwright.serve.errors import ApiError
from modelwright.serve.limits import too_many_answers
from modelwright.serve.protocol import GenerationRequest
from modelwright.serve.tokenizer import Codec
from modelwright.serve.worker import EngineWorker, GenerationJob, Stream


@dataclass
class Answer:
    """One answer, so far."""

    text: IncrementalDetokenizer
    shown: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str = ""


@dataclass
class Generation:
    """All answers to one request: prompt by prompt, `n` each."""

    request: GenerationRequest
    model: str
    answer_id: str
    codec: Codec
    num_prompt_tokens: int
    answers: list[Answer]
    stream: Stream
    created: int = field(default_factory=lambda: int(time.time()))

    async def pieces(self) -> AsyncIterator[tuple[int, Delta]]:
        """`(answer number, piece)` as pieces become final; always closes the engine's stream."""
        try:
            async for index, output in self.stream:
                answer = self.answers[index]
                if output.finish_reason == "error":
                    raise ApiError(
                        500, "The model's output is not finite; its weights are broken.", code="model_failed"
                    )
                answer.num_tokens += 1
                for piece in _pieces(answer.text, output):
                    answer.shown += piece.text
                    answer.tokens += piece.tokens
                    answer.finish_reason = piece.finish_reason
                    yield index, piece
                    if piece.finish_reason:
                        self.stream.finish(index, piece.finish_reason)
                        break
        finally:
            self.stream.close()

    async def complete(self) -> None:
        """Wait for all answers."""
        async for _ in self.pieces():
            pass

    def envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The body of a reply or of an event; kind: its `object`."""
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}

    def usage(self) -> dict[str, Any]:
        completion = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
        }


def start(
    request: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    *,
    worker: EngineWorker,
    codec: Codec,
    model: str,
    kind: str,
    max_tokens: int | None,
    default_max_tokens: int,
    num_logprobs: int,
    max_choices: int,
) -> Generation:
    """Check the lengths and submit the engine's jobs. Raises `ApiError` if that is not possible."""
    num_choices = request.n or 1
    if num_choices * len(prompts) > max_choices:
        raise too_many_answers(max_choices)
    seed = secrets.randbits(62) if request.seed is None else request.seed
    jobs = []
    for prompt in prompts:
        limit = _answer_limit(len(prompt), max_tokens, default_max_tokens, worker.engine.max_seq_len)
        params = _sampling(request, codec, limit, num_logprobs)
        seeds = [seed, *(derive_seed(seed, "choice", index) for index in range(1, num_choices))]
        jobs += [GenerationJob(prompt, replace(params, seed=choice_seed)) for choice_seed in seeds]
    stream = worker.submit(jobs)
    num_prompt_tokens = sum(len(prompt) for prompt in prompts)
    worker.metrics.prompt_tokens.inc(num_prompt_tokens)
    answers = [Answer(IncrementalDetokenizer(codec.stream(), request.stop)) for _ in jobs]
    answer_id = f"{kind}-{secrets.token_hex(12)}"
    return Generation(request, model, answer_id, codec, num_prompt_tokens, answers, stream)


def _pieces(text: IncrementalDetokenizer, output: Any) -> list[Delta]:
    """The pieces that one token of the engine produces; a stop token itself is not shown."""
    if output.finish_reason == "stop":
        return [text.finish("stop")]
    pieces = [text.push(output.token_id, output.logprob, output.alternatives)]
    return [*pieces, text.finish("length")] if output.finish_reason else pieces


def _answer_limit(num_prompt: int, max_tokens: int | None, default: int, context: int) -> int:
    room = context - num_prompt
    if room < 1 or (max_tokens or 0) > room:
        asked = f" and {max_tokens} for the answer" if max_tokens else ""
        raise ApiError(
            400,
            f"This model's context is {context} tokens. The request has {num_prompt} tokens in the prompt{asked}. "
            "Shorten the prompt or lower max_tokens.",
            param="prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    return max_tokens or min(default, room)


def _sampling(request: GenerationRequest, codec: Codec, max_tokens: int, num_logprobs: int) -> SamplingParams:
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k,
            stop_ids=codec.stop_ids,
            num_logprobs=num_logprobs,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
        )
    except ConfigError as error:
        raise ApiError(400, str(error), param=str(error).partition(":")[0], code="invalid_value") from None
