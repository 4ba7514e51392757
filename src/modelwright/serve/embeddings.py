"""/v1/embeddings: texts as vectors, see `Engine.embed`."""

import base64
import math
import struct
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from modelwright.serve.bodies import parsed
from modelwright.serve.engines.jobs import EmbeddingJob
from modelwright.serve.errors import ApiError
from modelwright.serve.inputs import admit, not_empty, require_fitting, token_ids
from modelwright.serve.limits import MAX_INPUTS
from modelwright.serve.parsing import parse_request
from modelwright.serve.pooled_outputs import pooled_outputs
from modelwright.serve.protocol import EmbeddingRequest
from modelwright.serve.service import Lease, service_of, version_header


async def create_embeddings(request: Request) -> Response:
    service = service_of(request)
    caller = service.caller(request, "infer")
    with service.lease() as lease:
        body = await admit(request, lease, num_prompts=MAX_INPUTS)
        asked, inputs = await parsed(lambda: _read(body, lease), len(body), lease)
        weights = lease.model.weights_of(asked.model)
        jobs = [EmbeddingJob(ids, caller.salt, weights.adapter, asked.pooling) for ids in inputs]
        vectors = await pooled_outputs(request, lease, jobs, caller)
    num_tokens = sum(map(len, inputs))
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(shortened(vector, asked.dimensions), asked)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    reply = {"object": "list", "data": data, "model": asked.model, "usage": usage}
    return JSONResponse(reply, headers=version_header(weights.version))


def _read(body: bytes, lease: Lease) -> tuple[EmbeddingRequest, list[list[int]]]:
    asked = parse_request(EmbeddingRequest, body, lease.model.limits.of_inputs)
    lease.require_model(asked.model)
    most = lease.model.info.model_dim
    if asked.dimensions and asked.dimensions > most:
        text = f"An embedding of this model has {most} dimensions, fewer than {asked.dimensions}."
        raise ApiError(400, text, param="dimensions", code="invalid_value")
    inputs = [token_ids(one, "input", lease) for one in not_empty(asked.inputs, "input")]
    return asked, require_fitting(inputs, "input", lease)


def shortened(vector: Sequence[float], num_dimensions: int | None) -> Sequence[float]:
    """The first dimensions of a vector, scaled to unit length, as OpenAI shortens embeddings; None keeps all."""
    if num_dimensions is None:
        return vector
    first = vector[:num_dimensions]
    length = math.hypot(*first) or 1.0
    return [value / length for value in first]


def _encoded(vector: Sequence[float], asked: EmbeddingRequest) -> str | list[float]:
    """Numbers, or the base64 of little-endian FP32, which OpenAI's client asks for."""
    if asked.encoding_format == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
