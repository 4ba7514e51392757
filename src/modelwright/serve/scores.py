"""/v1/score and /v1/rerank, in vLLM's and Cohere's form: how good texts are as answers to a query, by a reward model.

A pair is scored as the stage `reward` trains it: as a conversation in which the user says the first text and the
assistant the second one, at the last token of the answer.
"""

import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelwright.serve.bodies import parsed
from modelwright.serve.engines.jobs import EmbeddingJob
from modelwright.serve.inputs import admit, require_fitting, require_scorer
from modelwright.serve.keys import Caller
from modelwright.serve.limits import MAX_INPUTS
from modelwright.serve.parsing import parse_request
from modelwright.serve.pooled_outputs import pooled_outputs
from modelwright.serve.protocol import RerankRequest, ScoreRequest
from modelwright.serve.served_model import NamedWeights
from modelwright.serve.service import Lease, service_of, version_header


async def create_score(request: Request) -> Response:
    service = service_of(request)
    caller = service.caller(request, "infer")
    with service.lease() as lease:
        body = await admit(request, lease, num_prompts=MAX_INPUTS)
        asked, inputs = await parsed(lambda: _read_score(body, lease), len(body), lease)
        weights = lease.model.weights_of(asked.model)
        scores = await _scores(request, lease, weights, inputs, asked, caller)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    reply = _envelope("score", asked, inputs) | {"object": "list", "created": int(time.time()), "data": data}
    return JSONResponse(reply, headers=version_header(weights.version))


async def rerank(request: Request) -> Response:
    service = service_of(request)
    caller = service.caller(request, "infer")
    with service.lease() as lease:
        body = await admit(request, lease, num_prompts=MAX_INPUTS)
        asked, inputs = await parsed(lambda: _read_rerank(body, lease), len(body), lease)
        weights = lease.model.weights_of(asked.model)
        scores = await _scores(request, lease, weights, inputs, asked, caller)
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: asked.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if asked.return_documents is not False:
        results = [result | {"document": {"text": asked.documents[result["index"]]}} for result in results]
    return JSONResponse(
        _envelope("rerank", asked, inputs) | {"results": results}, headers=version_header(weights.version)
    )


def _read_score(body: bytes, lease: Lease) -> tuple[ScoreRequest, list[list[int]]]:
    asked = parse_request(ScoreRequest, body, lease.model.limits.of_inputs)
    lease.require_model(asked.model)
    require_scorer(lease, asked.model)
    return asked, _conversations(asked.pairs, "text_2", lease)


def _read_rerank(body: bytes, lease: Lease) -> tuple[RerankRequest, list[list[int]]]:
    asked = parse_request(RerankRequest, body, lease.model.limits.of_inputs)
    lease.require_model(asked.model)
    require_scorer(lease, asked.model)
    return asked, _conversations([(asked.query, document) for document in asked.documents], "documents", lease)


def _conversations(pairs: Sequence[tuple[str, str]], param: str, lease: Lease) -> list[list[int]]:
    inputs = [lease.model.codec.encode_answer(question, answer) for question, answer in pairs]
    return require_fitting(inputs, param, lease)


async def _scores(
    request: Request,
    lease: Lease,
    weights: NamedWeights,
    inputs: Sequence[Sequence[int]],
    asked: ScoreRequest | RerankRequest,
    caller: Caller,
) -> list[float]:
    jobs = [EmbeddingJob(ids, caller.salt, weights.adapter, "score") for ids in inputs]
    outputs = await pooled_outputs(request, lease, jobs, caller)
    scores = [output[0] for output in outputs]
    return scores if asked.use_activation is False else [_sigmoid(score) for score in scores]


def _sigmoid(score: float) -> float:
    """In a form that does not overflow."""
    return 0.5 * (1 + math.tanh(0.5 * score))


def _envelope(kind: str, asked: ScoreRequest | RerankRequest, inputs: Sequence[Sequence[int]]) -> dict[str, Any]:
    num_tokens = sum(map(len, inputs))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"id": f"{kind}-{secrets.token_hex(12)}", "model": asked.model, "usage": usage}
