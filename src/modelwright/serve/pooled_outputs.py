"""Computes what texts as a whole give: embeddings and scores."""

from collections.abc import Sequence

from starlette.requests import Request

from modelwright.serve.engines.jobs import EmbeddingJob
from modelwright.serve.engines.worker import Stream
from modelwright.serve.errors import ApiError
from modelwright.serve.keys import Caller
from modelwright.serve.service import Lease, service_of
from modelwright.serve.streams import unless_disconnected


async def pooled_outputs(
    request: Request, lease: Lease, jobs: Sequence[EmbeddingJob], caller: Caller
) -> list[Sequence[float]]:
    """One vector for each job, in order. Raises `ApiError`. Call it while the lease is held.

    A request has no more jobs in the queue at a time than a request for answers may have, so that thousands of texts
    neither fill the queue nor keep other requests waiting.
    """
    vectors: dict[int, Sequence[float]] = {}
    size = lease.config.max_completions
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
