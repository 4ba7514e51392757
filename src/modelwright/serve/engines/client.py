"""The interface between the event loop and engines, which run in a thread of this process (`EngineThread`) or in
separate processes (`EnginePool`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from modelwright.core.event_log import EventKind
from modelwright.infer.engine import Engine, EngineStats, StepOutput
from modelwright.model.vision.image_prefix import image_prefix
from modelwright.serve.engines.jobs import Job
from modelwright.serve.engines.routing import EjectionReason
from modelwright.serve.errors import ApiError

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

    def engine_ejected(self, reason: EjectionReason) -> None:
        """Called when an engine gets no new answers for a time."""
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


@contextmanager
def discarded_on_error(client: EngineClient) -> Iterator[None]:
    """Discards the engines if an exception leaves the block: no process may outlive a server that was never built."""
    try:
        yield
    except BaseException:
        client.discard()
        raise
