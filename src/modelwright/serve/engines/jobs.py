"""Jobs for an engine, the interface of the engine that computes them, and their form in messages to a process."""

import base64
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from modelwright.infer.engine import EngineStats, StepOutput
from modelwright.infer.sequence import Pixels, Pooling, SamplingParams, ScoredToken, TokenConstraint
from modelwright.serve.engines.grammars import CompiledGrammar, GrammarSource
from modelwright.serve.errors import ApiError

ABILITIES = {
    "alternatives": "log-probabilities of other tokens",
    "prompt_scores": "log-probabilities of the prompt",
    "logit_bias": "biases of tokens",
    "constraints": "constrained output",
    "embeddings": "embeddings and scores",
    "images": "images in prompts",
}
"""Features that some engines lack, and their names in errors."""


class StepEngine(Protocol):
    """Computes the answers of many requests step by step. `Engine` documents the arguments."""

    @property
    def has_work(self) -> bool: ...

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        constraint: TokenConstraint | None = None,
        *,
        cache_salt: str = "",
        adapter: str = "",
        images: Sequence[Pixels] = (),
    ) -> None:
        """Queues a request. Raises `ConfigError` for one that cannot be computed."""
        ...

    def embed(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        pooling: Pooling = "last",
        cache_salt: str = "",
        adapter: str = "",
    ) -> None:
        """Queues a request for a vector. Raises `ConfigError` for one that cannot be computed."""
        ...

    def abort(self, request_id: str) -> bool:
        """Aborts a request. Returns false for an unknown one."""
        ...

    def step(self) -> list[StepOutput]: ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class GenerationJob:
    """An answer to generate. grammar: None allows any text; cache_salt: see `Engine.add`; adapter: the engines' name of
    the adapter, "" for the model itself; images: images of the prompt, in order; wants_logprobs: false allows an engine
    to omit the log-probabilities of new tokens.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    grammar: CompiledGrammar | None = None
    cache_salt: str = ""
    adapter: str = ""
    images: tuple[Pixels, ...] = ()
    wants_logprobs: bool = True

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return len(self.prompt_ids) + self.params.max_tokens

    def asks(self) -> Mapping[str, str]:
        """Returns the `ABILITIES` that the job needs, with the fields of the request that ask for them."""
        params, grammar = self.params, self.grammar
        return {
            **({"alternatives": "logprobs"} if params.num_logprobs else {}),
            **({"prompt_scores": "prompt_logprobs"} if params.num_prompt_logprobs is not None else {}),
            **({"logit_bias": "logit_bias"} if params.logit_bias else {}),
            **({"constraints": grammar.source.param} if grammar else {}),
            **({"images": "messages"} if self.images else {}),
        }

    def submit(self, engine: StepEngine, request_id: str) -> None:
        """Queues the job in an engine. Raises `ConfigError` if the engine rejects it."""
        constraint = self.grammar.constraint() if self.grammar else None
        engine.add(
            request_id,
            self.prompt_ids,
            self.params,
            constraint,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            images=self.images,
        )

    def to_message(self) -> dict[str, Any]:
        """Returns plain data, from which `job_of` restores the job."""
        return {
            "prompt_ids": list(self.prompt_ids),
            "params": vars(self.params),
            "grammar": asdict(self.grammar.source) if self.grammar else None,
            "cache_salt": self.cache_salt,
            "adapter": self.adapter,
            "images": [base64.b64encode(one.tobytes()).decode() for one in self.images],
            "wants_logprobs": self.wants_logprobs,
        }


@dataclass(frozen=True)
class EmbeddingJob:
    """A text to embed or to score. Its methods are those of `GenerationJob`."""

    prompt_ids: Sequence[int]
    cache_salt: str = ""
    adapter: str = ""
    pooling: Pooling = "last"

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_ids)

    def asks(self) -> Mapping[str, str]:
        return {"embeddings": "input"}

    def submit(self, engine: StepEngine, request_id: str) -> None:
        engine.embed(
            request_id, self.prompt_ids, pooling=self.pooling, cache_salt=self.cache_salt, adapter=self.adapter
        )

    def to_message(self) -> dict[str, Any]:
        return asdict(self) | {"prompt_ids": list(self.prompt_ids)}


Job = GenerationJob | EmbeddingJob


def refusing(backend: str, lacks: Collection[str]) -> Callable[[Job], None]:
    """Returns a check that raises `ApiError` 400 for jobs that need an ability that a back-end lacks."""

    def check(job: Job) -> None:
        for ability, param in job.asks().items():
            if ability in lacks:
                text = f"The back-end {backend} does not support {ABILITIES[ability]}; leave out {param}."
                raise ApiError(400, text, param=param, code="unsupported_task")

    return check


def job_of(message: Mapping[str, Any], compile_grammar: Callable[[GrammarSource], CompiledGrammar]) -> Job:
    """Restores a job from its message. Raises what `compile_grammar` raises."""
    if "params" not in message:  # an `EmbeddingJob` has none
        return EmbeddingJob(**message)
    fields = message["params"]
    stop_ids, bias = tuple(fields["stop_ids"]), tuple((token, value) for token, value in fields["logit_bias"])
    params = SamplingParams(**{**fields, "stop_ids": stop_ids, "logit_bias": bias})
    source = message["grammar"]
    grammar = compile_grammar(GrammarSource(**source)) if source else None
    images: list[Pixels] = []
    for text in message["images"]:
        # [3, S, S]; a `bytearray`, because torch warns about arrays that are not writable
        data = np.frombuffer(bytearray(base64.b64decode(text)), dtype=np.uint8)
        side = math.isqrt(len(data) // 3)
        images.append(data.reshape(3, side, side))
    salt, adapter, wants_logprobs = (message[name] for name in ("cache_salt", "adapter", "wants_logprobs"))
    return GenerationJob(message["prompt_ids"], params, grammar, salt, adapter, tuple(images), wants_logprobs)


def output_message(output: StepOutput) -> list[Any]:
    """Returns an output as plain data."""
    # a list, not an object: there is one for every token
    scores = [[score.token_id, score.logprob, score.rank, score.alternatives] for score in output.prompt_scores]
    return [
        output.request_id,
        output.token_id,
        output.logprob,
        output.alternatives,
        output.finish_reason,
        scores,
        output.embedding,
        output.num_cached_tokens,
    ]


def output_of(message: Sequence[Any]) -> StepOutput:
    """Restores an output from its `output_message`."""
    request_id, token_id, logprob, alternatives, reason, scores, embedding, num_cached = message
    return StepOutput(
        request_id,
        token_id,
        logprob,
        _alternatives(alternatives),
        reason,
        tuple(ScoredToken(token, value, rank, _alternatives(others)) for token, value, rank, others in scores),
        tuple(embedding),
        num_cached,
    )


def _alternatives(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((token, logprob) for token, logprob in pairs)
