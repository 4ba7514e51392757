"""Generation of text for completions and chat: from the request to the pieces of its answers.

Requests have OpenAI's form and are validated strictly: wrong types, values out of range, unknown fields and unsupported
features are rejected with the field's name instead of being ignored. Fields that OpenAI does not have are named as in
vLLM.
"""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modelwright.core.config import ConfigError, derive_seed
from modelwright.infer.engine import StepOutput
from modelwright.infer.sequence import Pixels, SamplingParams, ScoredToken
from modelwright.serve.agents.reasoning import AnswerReader
from modelwright.serve.api.fields import GenerationRequest
from modelwright.serve.engines.client import GenerationJob
from modelwright.serve.engines.grammars import CompiledGrammar, GrammarSource
from modelwright.serve.errors import ApiError
from modelwright.serve.keys import Caller
from modelwright.serve.limits import too_many_answers
from modelwright.serve.load import Delta, IncrementalDetokenizer, TokenInfo
from modelwright.serve.served_model import ServedModel, Stream


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and the text of its echo. images: pixels for its image tokens, in order."""

    ids: Sequence[int]
    text: str
    images: Sequence[Pixels] = ()


@dataclass(frozen=True)
class AnswerPlan:
    """How the text of an answer is made and read. source: its grammar, None for any text; reader: makes the reader of
    each answer; shows_special: special tokens are part of the text, because a mark that the reader needs is one.
    """

    source: GrammarSource | None = None
    reader: Callable[[], AnswerReader] | None = None
    shows_special: bool = False


@dataclass
class Answer:
    """An answer so far. num_echoed: number of characters of the prompt at the start of `shown`; tokens: tokens of
    `shown`, if `keeps_tokens` (a stream keeps none, so its memory is bounded); num_tokens: number of new tokens, with
    stop tokens and those without text; unsent: new tokens that no event has contained yet, if the client asks for ids.
    """

    prompt: Prompt
    text: IncrementalDetokenizer
    num_echoed: int = 0
    keeps_tokens: bool = False
    shown: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    num_tokens: int = 0
    unsent: list[TokenInfo] = field(default_factory=list)
    prompt_scores: tuple[ScoredToken, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: str = ""
    reader: AnswerReader | None = None
    """Splits the text into thought, answer and calls; None for an answer that is text alone."""

    @property
    def new_text(self) -> str:
        """The text so far without the echoed prompt."""
        return self.shown[self.num_echoed :]

    def take_unsent_ids(self) -> list[int]:
        """Returns the ids of `unsent` and empties it."""
        unsent, self.unsent = self.unsent, []
        return [info.token_id for info in unsent]


@dataclass
class Generation:
    """All answers to one request: prompt by prompt, `n` each. version: version of the weights that compute them."""

    request: GenerationRequest
    model: ServedModel
    version: str
    answer_id: str
    num_prompt_tokens: int
    answers: list[Answer]
    stream: Stream
    created: int = field(default_factory=lambda: int(time.time()))
    first_token: float = 0.0
    """Time of the first token, by `time.perf_counter`; 0 before it arrives."""

    async def pieces(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yields `(answer number, piece)` as pieces become final. Always closes the engine's stream."""
        try:
            async for index, output in self.stream:
                self.first_token = self.first_token or time.perf_counter()
                answer = self.answers[index]
                for piece in self._pieces(answer, output):
                    answer.shown += piece.text
                    answer.tokens += piece.tokens if answer.keeps_tokens else ()
                    answer.finish_reason = piece.finish_reason
                    yield index, piece
                    if piece.finish_reason:
                        # a stop string ends an answer that the engine would continue
                        self.stream.finish(index, piece.finish_reason)
                        break
        finally:
            self.stream.close()

    async def complete(self) -> None:
        """Waits for all answers."""
        async for _ in self.pieces():
            pass

    def envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the body of a reply or of an event. kind: its field `object`."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": self.version,
            "choices": choices,
        }

    @property
    def num_completion_tokens(self) -> int:
        """Number of new tokens of all answers so far."""
        return sum(answer.num_tokens for answer in self.answers)

    def usage(self) -> dict[str, Any]:
        """Returns the numbers of tokens so far."""
        completion = self.num_completion_tokens
        # the tokens of a prompt count once, however many answers it has
        num_cached = sum(answer.num_cached_tokens for answer in self.answers[:: self.request.n or 1])
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _pieces(self, answer: Answer, output: StepOutput) -> list[Delta]:
        """Returns the pieces that one token of the engine produces. The text of a stop token is omitted."""
        if output.finish_reason == "constraint":
            text = "The grammar became too complex, or allowed no token of the vocabulary; simplify it."
            raise ApiError(400, text, code="invalid_grammar")
        if output.finish_reason == "error":
            raise ApiError(500, "The model's output is not finite; its weights are broken.", code="model_failed")
        pieces: list[Delta] = []
        answer.num_cached_tokens = max(answer.num_cached_tokens, output.num_cached_tokens)
        if answer.num_tokens == 0:
            answer.prompt_scores = output.prompt_scores
            if self.request.echoes:
                tokens: list[TokenInfo] = []
                if self.request.num_logprobs is not None:
                    # a character may consist of several tokens, so the offset of each follows from decoding the whole
                    # prompt
                    ids, decoder = answer.prompt.ids, IncrementalDetokenizer(self.model.tokenizer.stream())
                    parts = [decoder.push(token, 0.0, ()) for token in ids] + [decoder.finish("length")]
                    offsets = [info.offset for part in parts for info in part.tokens]
                    offsets += [decoder.num_shown] * (len(ids) - len(offsets))
                    tokens = [TokenInfo(ids[0], None, (), 0)]
                    tokens += [
                        TokenInfo(
                            score.token_id, score.logprob, score.alternatives[: self.request.num_logprobs], offset
                        )
                        for score, offset in zip(answer.prompt_scores, offsets[1:], strict=True)
                    ]
                pieces.append(Delta(answer.prompt.text, tuple(tokens)))
        # the engine computes one token at least, so that the prompt has log-probabilities
        if self.request.asked_tokens == 0:
            return [*pieces, answer.text.finish("length")]
        answer.num_tokens += 1
        if self.request.return_token_ids:
            answer.unsent.append(answer.text.info(output.token_id, output.logprob, output.alternatives))
        if output.finish_reason == "stop":
            return [*pieces, answer.text.finish("stop")]
        pieces.append(answer.text.push(output.token_id, output.logprob, output.alternatives))
        return [*pieces, answer.text.finish("length")] if output.finish_reason else pieces


def start(
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    model: ServedModel,
    caller: Caller,
    *,
    kind: str,
    max_choices: int,
    grammar: CompiledGrammar | None = None,
    plan: "AnswerPlan | None" = None,
) -> Generation:
    """Checks the lengths and submits the engine's jobs. kind: prefix of the answer's id; grammar: None allows any text.
    plan: how texts become answers. Raises `ApiError` if the request cannot be computed.
    """
    num_choices = request.n or 1
    if num_choices * len(prompts) > max_choices:
        raise too_many_answers(max_choices)
    seed = secrets.randbits(62) if request.seed is None else request.seed
    jobs, answers, plan = [], [], plan or AnswerPlan()
    weights = model.weights_of(request.model)
    # the key is part of the salt, so that no client can find out by timing which prompts others have cached
    salt = f"{caller.salt} {request.cache_salt}" if request.cache_salt else caller.salt
    for prompt in prompts:
        params = _sampling(request, model, len(prompt.ids))
        # the first answer has the seed itself, so that it does not depend on `n`
        seeds = [seed, *(derive_seed(seed, "choice", index) for index in range(1, num_choices))]
        jobs += [
            GenerationJob(
                prompt.ids,
                replace(params, seed=one),
                grammar,
                salt,
                weights.adapter,
                tuple(prompt.images),
                wants_logprobs=request.num_logprobs is not None,
            )
            for one in seeds
        ]
        num_echoed = len(prompt.text) if request.echoes else 0
        answers += [
            Answer(
                prompt,
                IncrementalDetokenizer(
                    model.tokenizer.stream(skip_special=not plan.shows_special),
                    request.stop,
                    num_echoed,
                    request.min_tokens or 0,
                ),
                num_echoed=num_echoed,
                keeps_tokens=request.num_logprobs is not None and not request.stream,
                reader=plan.reader() if plan.reader else None,
            )
            for _ in seeds
        ]
    stream = model.worker.submit(jobs, caller)
    num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
    model.worker.metrics.answers.prompt_tokens.inc(num_prompt_tokens)
    answer_id = f"{kind}-{secrets.token_hex(12)}"
    return Generation(request, model, weights.version, answer_id, num_prompt_tokens, answers, stream)


def _sampling(request: GenerationRequest, model: ServedModel, num_prompt: int) -> SamplingParams:
    size = model.info.vocab_size
    named = {"logit_bias": [token for token, _ in request.logit_bias], "stop_token_ids": request.stop_token_ids or []}
    for param, ids in named.items():
        if any(not 0 <= token < size for token in ids):
            raise ApiError(400, f"Token ids must be between 0 and {size - 1}.", param=param, code="invalid_value")
    end_ids = () if request.ignore_eos else model.tokenizer.stop_ids
    context, asked = model.limits.context, request.asked_tokens
    room = context - num_prompt
    if asked and request.CLAMPS_TOKENS and model.clamps and room >= 1:
        asked = min(asked, room)
    if room < 1 or (asked or 0) > room:
        and_answer = f" and {asked} for the answer" if asked else ""
        raise ApiError(
            400,
            f"This model's context is {context} tokens. The request has {num_prompt} tokens in the prompt{and_answer}. "
            "Shorten the prompt or lower max_tokens.",
            param="prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    try:
        return SamplingParams(
            max_tokens=min(request.MOST_DEFAULT_TOKENS, room) if asked is None else max(asked, 1),
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(request.top_k or 0, 0),
            min_p=request.min_p or 0.0,
            stop_ids=tuple(sorted({*end_ids, *(request.stop_token_ids or ())})),
            min_tokens=request.min_tokens or 0,
            num_logprobs=request.num_logprobs or 0,
            num_prompt_logprobs=request.num_prompt_logprobs,
            logit_bias=request.logit_bias,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
        )
    except ConfigError as error:
        raise ApiError(400, str(error), param=str(error).partition(":")[0], code="invalid_value") from None
