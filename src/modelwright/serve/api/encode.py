"""Routes that encode texts: /v1/embeddings (see `Engine.embed`), /v1/score and /v1/rerank in vLLM's and Cohere's form,
which score texts as answers to a query with a reward model, and /tokenize and /detokenize in vLLM's form.

A pair is scored in the way the stage `reward` trains it: as a conversation in which the user says the first text and
the assistant the second, at the last token of the answer.
"""

import base64
import math
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelwright.serve.api.answers import unless_disconnected
from modelwright.serve.api.chat import Message, Tool, render_prompt
from modelwright.serve.api.fields import PromptEntries, RequestModel, Texts, as_list
from modelwright.serve.api.parsing import admit, known_ids, parse_request, parsed, read_body, require_fitting, token_ids
from modelwright.serve.engines.client import EmbeddingJob
from modelwright.serve.errors import ApiError
from modelwright.serve.keys import Caller
from modelwright.serve.limits import MAX_INPUTS, Limits
from modelwright.serve.served_model import Stream
from modelwright.serve.service import VERSION_HEADER, Lease, service_of


class EmbeddingRequest(RequestModel):
    """POST /v1/embeddings. The last group is accepted and ignored."""

    PROMPT_FIELDS = ("input",)

    model: str
    input: PromptEntries
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["last", "mean"] = "last"

    user: str | None = None


async def create_embeddings(request: Request) -> Response:
    service = service_of(request)
    caller = service.caller(request, "infer")
    with service.lease() as lease:
        body = await admit(request, lease, num_prompts=MAX_INPUTS)

        def read() -> tuple[EmbeddingRequest, list[list[int]]]:
            asked = parse_request(EmbeddingRequest, body, lease.model.limits.of_inputs)
            lease.require_model(asked.model)
            most = lease.model.info.model_dim
            if asked.dimensions and asked.dimensions > most:
                text = f"An embedding of this model has {most} dimensions, fewer than {asked.dimensions}."
                raise ApiError(400, text, param="dimensions", code="invalid_value")
            return asked, require_fitting(token_ids(as_list(asked.input), "input", lease), "input", lease)

        asked, inputs = await parsed(read, len(body), lease)
        weights = lease.model.weights_of(asked.model)
        jobs = [EmbeddingJob(ids, caller.salt, weights.adapter, asked.pooling) for ids in inputs]
        vectors = await pooled_outputs(request, lease, jobs, caller)
    data: list[dict[str, Any]] = []
    for index, vector in enumerate(vectors):
        if asked.dimensions is not None:
            # as OpenAI shortens embeddings: the first dimensions, scaled to unit length
            vector = vector[: asked.dimensions]
            length = math.hypot(*vector) or 1.0
            vector = [value / length for value in vector]
        embedding: list[float] | str = list(vector)
        if asked.encoding_format == "base64":  # of little-endian FP32, as OpenAI's client expects
            embedding = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    reply = {"object": "list", "data": data, "model": asked.model, "usage": _usage(inputs)}
    return JSONResponse(reply, headers={VERSION_HEADER: weights.version})


class ScoreRequest(RequestModel):
    """POST /v1/score, in vLLM's form. `text_1`: one text, or as many as `text_2` has; `use_activation`: false returns
    the model's output without a sigmoid.
    """

    PROMPT_FIELDS = ("text_1", "text_2")

    model: str
    text_1: Texts
    text_2: Texts
    use_activation: bool | None = None

    user: str | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(first, self.text_2, strict=True))

    @model_validator(mode="after")
    def _fits_together(self) -> "ScoreRequest":
        num_first, num_second = len(self.text_1), len(self.text_2)
        if num_first not in (1, num_second):
            raise ValueError(f"text_1 has {num_first} texts and text_2 has {num_second}; give one, or as many")
        return self


class InputUsage(BaseModel):
    """Number of tokens of the inputs."""

    prompt_tokens: int
    total_tokens: int


class PairScore(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreReply(BaseModel):
    """The scores of all pairs, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: InputUsage


class RerankRequest(RequestModel):
    """POST /v1/rerank, in vLLM's form, which is that of Jina and Cohere. `top_n`: 0 for all documents;
    `use_activation`: as in a `ScoreRequest`.
    """

    PROMPT_FIELDS = ("query", "documents")

    model: str
    query: str
    documents: Annotated[list[str], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=0)] = 0
    return_documents: bool | None = None
    use_activation: bool | None = None

    user: str | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, document) for document in self.documents]


class RankedText(BaseModel):
    """The text of a document of the request."""

    text: str


class RankedDocument(BaseModel):
    """A document's index in the request and its score."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankReply(BaseModel):
    """The documents, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: InputUsage


S = TypeVar("S", ScoreRequest, RerankRequest)


async def create_score(request: Request) -> Response:
    asked, inputs, scores, version = await _scored(request, ScoreRequest, "text_2")
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    head = {"id": f"score-{secrets.token_hex(12)}", "model": asked.model, "usage": _usage(inputs)}
    reply = head | {"object": "list", "created": int(time.time()), "data": data}
    return JSONResponse(reply, headers={VERSION_HEADER: version})


async def rerank(request: Request) -> Response:
    asked, inputs, scores, version = await _scored(request, RerankRequest, "documents")
    # documents of equal score stay in the order of the request
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: asked.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if asked.return_documents is not False:
        results = [result | {"document": {"text": asked.documents[result["index"]]}} for result in results]
    head = {"id": f"rerank-{secrets.token_hex(12)}", "model": asked.model, "usage": _usage(inputs)}
    return JSONResponse(head | {"results": results}, headers={VERSION_HEADER: version})


async def _scored(request: Request, kind: type[S], param: str) -> tuple[S, list[list[int]], list[float], str]:
    """Returns the request, its pairs in tokens, their scores, and the weights' version. param: field in errors."""
    service = service_of(request)
    caller = service.caller(request, "infer")
    with service.lease() as lease:
        body = await admit(request, lease, num_prompts=MAX_INPUTS)

        def read() -> tuple[S, list[list[int]]]:
            asked = parse_request(kind, body, lease.model.limits.of_inputs)
            lease.require_model(asked.model)
            if not lease.model.info.scores:
                text = f"The model {asked.model!r} generates text and has no head that scores it"
                raise ApiError(400, f"{text}; serve a reward model for that.", param="model", code="unsupported_task")
            inputs = [lease.model.tokenizer.encode_answer(question, text) for question, text in asked.pairs]
            return asked, require_fitting(inputs, param, lease)

        asked, inputs = await parsed(read, len(body), lease)
        weights = lease.model.weights_of(asked.model)
        jobs = [EmbeddingJob(ids, caller.salt, weights.adapter, "score") for ids in inputs]
        scores = [output[0] for output in await pooled_outputs(request, lease, jobs, caller)]
    if asked.use_activation is not False:
        scores = [0.5 * (1 + math.tanh(0.5 * score)) for score in scores]  # a sigmoid that does not overflow
    return asked, inputs, scores, weights.version


def _usage(inputs: Sequence[Sequence[int]]) -> dict[str, int]:
    num_tokens = sum(map(len, inputs))
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def pooled_outputs(
    request: Request, lease: Lease, jobs: Sequence[EmbeddingJob], caller: Caller
) -> list[Sequence[float]]:
    """Returns one vector per job, in order. Raises `ApiError`. Call it while the lease is held."""
    vectors: dict[int, Sequence[float]] = {}
    # no more jobs at a time than a request for answers may have, so that thousands of texts neither fill the queue nor
    # keep other requests waiting
    size = lease.service.config.max_completions
    for first in range(0, len(jobs), size):
        stream = lease.model.worker.submit(jobs[first : first + size], caller)

        async def collect(stream: Stream = stream, first: int = first) -> None:
            async for index, output in stream:
                vectors[first + index] = output.embedding

        await unless_disconnected(request, collect(), stream)
    if not all(vectors.values()):
        raise ApiError(500, "The model's output is not finite; its weights are broken.", code="model_failed")
    service_of(request).metrics.answers.prompt_tokens.inc(sum(len(job.prompt_ids) for job in jobs))
    return [vectors[number] for number in range(len(jobs))]


class TokenizeRequest(RequestModel):
    """POST /tokenize, in vLLM's form: a text, or a conversation up to the start of the assistant's turn."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False
    add_generation_prompt: Literal[True] = True
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    @classmethod
    def check_size(cls, data: dict[str, Any], limits: Limits) -> None:
        if data.get("messages") is None:
            limits.check_prompts(data, "prompt")
        else:
            limits.check_chat(data)


class TokenizeReply(BaseModel):
    """Token ids of a text or conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class DetokenizeRequest(RequestModel):
    """POST /detokenize, in vLLM's form."""

    PROMPT_FIELDS = ("tokens",)

    model: str | None = None
    tokens: list[int]


class DetokenizeReply(BaseModel):
    """Text of token ids."""

    prompt: str


async def tokenize(request: Request) -> Response:
    def read(body: bytes, lease: Lease) -> dict[str, Any]:
        asked = parse_request(TokenizeRequest, body, lease.model.limits)
        lease.require_model(asked.model)
        tokenizer = lease.model.tokenizer
        if asked.messages is not None:
            ids = render_prompt(asked.messages, asked.tools or [], asked.chat_template_kwargs or {}, lease.model)
        else:
            ids = tokenizer.encode(
                asked.prompt or "", with_begin=asked.add_special_tokens, parse_special=asked.parse_special
            )
        texts = {"token_strs": [tokenizer.token_text(token) for token in ids]} if asked.return_token_strs else {}
        return {"count": len(ids), "max_model_len": lease.model.limits.context, "tokens": ids, **texts}

    return await _without_engine(request, read)


async def detokenize(request: Request) -> Response:
    def read(body: bytes, lease: Lease) -> dict[str, Any]:
        asked = parse_request(DetokenizeRequest, body, lease.model.limits)
        lease.require_model(asked.model)
        return {"prompt": lease.model.tokenizer.decode(known_ids(asked.tokens, "tokens", lease))}

    return await _without_engine(request, read)


async def _without_engine(request: Request, read: Callable[[bytes, Lease], dict[str, Any]]) -> Response:
    service = service_of(request)
    service.caller(request, "infer")
    with service.lease() as lease:
        body = await read_body(request, lease, num_prompts=1)
        reply = await parsed(lambda: read(body, lease), len(body), lease)
        return JSONResponse(reply, headers={VERSION_HEADER: lease.model.fingerprint})
