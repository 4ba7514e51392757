"""Waits for what texts as a whole give: embeddings and scores."""

from collections.abc import Sequence

from starlette.requests import Request

from modelwright.serve.errors import ApiError
from modelwright.serve.service import Lease, service_of
from modelwright.serve.streams import unless_disconnected
from modelwright.serve.worker import Stream


async def pooled_outputs(request: Request, lease: Lease, stream: Stream, num_tokens: int) -> list[Sequence[float]]:
    """One vector for each job of a stream, in order. num_tokens: of all inputs. Raises `ApiError`."""
    vectors: dict[int, Sequence[float]] = {}

    async def collect() -> None:
        async for index, output in stream:
            vectors[index] = output.embedding

    await unless_disconnected(request, collect(), stream)
    if not all(vectors.values()):
        raise ApiError(500, "The model's output is not finite; its weights are broken.", code="model_failed")
    service_of(request).metrics.answers.prompt_tokens.inc(num_tokens)
    return [vectors[index] for index in sorted(vectors)]
