"""The interface between the event loop and engines, which run in a thread of this process (`EngineThread`) or in
separate processes (`EnginePool`): jobs and their form in messages to a process, events, and clients.
"""

import base64
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from modelwright.core.records import EventKind
from modelwright.infer.engine import Engine, EngineStats, StepOutput
from modelwright.infer.sequence import Pixels, Pooling, SamplingParams, ScoredToken, TokenConstraint
from modelwright.model.vision.llava import image_prefix
from modelwright.serve.engines.grammars import CompiledGrammar, GrammarSource, source_of
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


def refuse_lacking(backend: str, lacks: Collection[str], job: Job) -> None:
    """Raises `ApiError` 400 for a job that needs an ability that a back-end lacks."""
    for ability, param in job.asks().items():
        if ability in lacks:
            text = f"The back-end {backend} does not support {ABILITIES[ability]}; leave out {param}."
            raise ApiError(400, text, param=param, code="unsupported_task")


def job_of(message: Mapping[str, Any], compile_grammar: Callable[[GrammarSource], CompiledGrammar]) -> Job:
    """Restores a job from its message. Raises what `compile_grammar` raises."""
    if "params" not in message:  # an `EmbeddingJob` has none
        return EmbeddingJob(**message)
    fields = message["params"]
    stop_ids, bias = tuple(fields["stop_ids"]), tuple((token, value) for token, value in fields["logit_bias"])
    params = SamplingParams(**{**fields, "stop_ids": stop_ids, "logit_bias": bias})
    source = message["grammar"]
    grammar = compile_grammar(source_of(source)) if source else None
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
        tuple((token, logprob) for token, logprob in alternatives),
        reason,
        tuple(
            ScoredToken(token, value, rank, tuple((other, logprob) for other, logprob in others))
            for token, value, rank, others in scores
        ),
        tuple(embedding),
        num_cached,
    )


EngineEnd = Literal["stopped", "died", "wedged", "outdated"]
"""Reason for the end of an engine: stopped by the server; the process has ended; it gave no sign of life for too long;
adapters were loaded or unloaded while it started."""

ENGINE_LOSSES: Mapping[EngineEnd, EventKind] = {
    "died": EventKind(
        "an engine's process has ended",
        "Most often the system has killed it for lack of memory; another process takes its place. Lower "
        "serve.engine.kv_cache_tokens or serve.engines.",
    ),
    "wedged": EventKind(
        "an engine gave no sign of life and was replaced",
        "A step takes much longer than those measured at the start: the machine swaps, or other processes take its "
        "cores. Look at memory and load (modelwright doctor), and lower serve.engine.prefill_chunk_size.",
    ),
    "outdated": EventKind(
        "an engine was started anew, because adapters were loaded or unloaded while it started",
        "Nothing needs to be done. To load adapters before the first request, name them when the server is started "
        "(modelwright serve).",
        is_ordinary=True,
    ),
}
"""Unintended ends, as named in the log and the metric modelwright_engine_failures."""
MoveOutcome = Literal["continued", "retried", "lost"]
"""Outcome for an answer of a lost engine: continued with the same tokens; restarted before the client has seen any of
it; ended with an error."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """Facts about a server's engines. `fingerprint`: version of the weights; `max_num_seqs`: number of answers that all
    engines together compute at once; `scores`: true for a model that scores texts instead of generating text;
    `adapters`: digests of the adapters at the start, by the engines' names; `image_size`: side of the model's images in
    pixels, 0 for a text-only model; `image_token`: token that represents an image, repeated `image_patches` times;
    `crops_images`: true if the model sees the center of an image that is not square, false if it sees it stretched.
    """

    fingerprint: str
    vocab_size: int
    max_seq_len: int
    num_parameters: int
    max_num_seqs: int
    model_dim: int
    scores: bool
    adapters: Mapping[str, str]
    image_size: int = 0
    image_token: int = 0
    image_patches: int = 0
    crops_images: bool = False

    @property
    def reads_images(self) -> bool:
        return self.image_size > 0


def engine_info(engine: Engine, fingerprint: str) -> EngineInfo:
    """Returns the facts about one engine. fingerprint: version of its weights."""
    prefix = image_prefix(engine.model)
    images: dict[str, Any] = {}
    if prefix is not None:
        shape, tokens = prefix.tower.config, prefix.tokens
        images = {
            "image_size": shape.image_size,
            "image_token": tokens.token_id,
            "image_patches": tokens.num_patches,
            "crops_images": shape.fit == "crop",
        }
    return EngineInfo(
        fingerprint=fingerprint,
        vocab_size=engine.vocab_size,
        max_seq_len=engine.max_seq_len,
        num_parameters=engine.num_parameters,
        max_num_seqs=engine.config.max_num_seqs,
        model_dim=engine.model.config.model_dim,
        scores=engine.score_head is not None,
        adapters=dict(engine.adapters.digests),
        **images,
    )


class EngineEvents(Protocol):
    """Receives the reports of engines, inside the event loop."""

    def deliver(self, engine_name: str, outputs: Sequence[StepOutput], stats: EngineStats) -> None:
        """Receives new tokens, and the load of one engine. A restarted engine has another name."""
        ...

    def engine_lost(self, engine_name: str, reason: EngineEnd) -> None:
        """Called when an engine is gone. Its load no longer counts."""
        ...

    def answer_moved(self, outcome: MoveOutcome) -> None:
        """Called for each answer of an engine that was lost or failed."""
        ...

    def refuse(self, request_id: str, error: ApiError) -> None:
        """Called for an answer that cannot be computed."""
        ...

    def fail(self) -> None:
        """Called when answers can no longer be computed."""
        ...


class EngineClient(Protocol):
    """Computes answers with one or several engines. Belongs to the event loop; only `stop` waits for an engine."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def unavailable(self) -> str:
        """Reason why new requests cannot be computed now, "" if they can."""
        ...

    @property
    def is_back_soon(self) -> bool:
        """True if requests that come while it is unavailable wait for an engine instead of being refused."""
        ...

    def start(self, events: EngineEvents) -> None:
        """Starts the engines. Call it inside the running event loop."""
        ...

    def check(self, job: Job, /) -> None:
        """Raises `ApiError` 400 for a job that these engines do not support."""
        ...

    def add(self, jobs: Mapping[str, Job]) -> None:
        """Starts the answers of one request by their ids, which are new."""
        ...

    def abort(self, request_id: str) -> None:
        """Stops an answer, if it has not finished."""
        ...

    async def load_adapter(self, name: str, folder: Path) -> str:
        """Loads the adapter in a folder while answers continue, and returns the digest of its values. name: its name in
        jobs, which no other adapter has had. Raises `ApiError` 400 if it cannot be used.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Later jobs may not name it; earlier ones finish with it."""
        ...

    async def stop(self) -> None: ...

    def discard(self) -> None:
        """Ends engines that were loaded and never started."""
        ...
