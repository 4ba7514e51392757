"""The interface between the event loop and engines, wherever they run: in a thread of this process (`EngineThread`) or
in processes of their own (`EnginePool`).
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
"""On purpose; the process has ended; it gave no sign of life for too long; adapters were loaded or unloaded while it
started."""

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
"""Those that are not on purpose; the log and the metric modelwright_engine_failures name them."""

MoveOutcome = Literal["continued", "retried", "lost"]
"""With the same tokens; from its beginning, of which the client has seen nothing; not at all."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What the server has to know of its engines. `fingerprint`: of the weights; `max_num_seqs`: answers that are
    computed at once, by all of them together; `scores`: the model scores texts instead of generating any; `adapters`:
    digests of those that were loaded at the start, by what engines call them; `image_size`: pixels of a side of the
    images that the model reads, 0 if it reads none; `image_token` stands `image_patches` times for an image;
    `crops_images`: it sees the center of an image that is no square, else all of it stretched.
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
    """fingerprint: of the weights of its model."""
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
    """Where an engine reports, inside the event loop."""

    def deliver(self, engine_name: str, outputs: Sequence[StepOutput], stats: EngineStats) -> None:
        """New tokens, and the load of one engine; an engine that is started again has another name."""
        ...

    def engine_lost(self, engine_name: str, reason: EngineEnd) -> None:
        """An engine is gone; its load counts no more."""
        ...

    def engine_ejected(self, reason: EjectionReason) -> None:
        """An engine gets no new answers for a time."""
        ...

    def answer_moved(self, outcome: MoveOutcome) -> None:
        """An answer of an engine that was lost or failed is continued by another one, or not."""
        ...

    def refuse(self, request_id: str, error: ApiError) -> None:
        """One answer cannot be computed."""
        ...

    def fail(self) -> None:
        """No answer can be computed any more."""
        ...


class EngineClient(Protocol):
    """Takes answers to compute. All methods belong to the event loop; none waits for an engine but `stop`."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def unavailable(self) -> str:
        """Why new requests cannot be computed now, "" if they can."""
        ...

    @property
    def is_back_soon(self) -> bool:
        """Whether requests that come while it is unavailable wait for an engine instead of being refused."""
        ...

    def start(self, events: EngineEvents) -> None:
        """Call inside the running event loop."""
        ...

    def check(self, job: Job, /) -> None:
        """Raise `ApiError` 400 for what these engines cannot do."""
        ...

    def add(self, jobs: Mapping[str, Job]) -> None:
        """Start the answers of one request by their ids; the ids are new."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop an answer, if it has not finished."""
        ...

    async def load_adapter(self, name: str, folder: Path) -> str:
        """Let answers be computed with the adapter in a folder; returns the digest of its values. Running answers go on
        meanwhile. name: what jobs call it; no other adapter has had it. Raises `ApiError` 400 if it cannot be used.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """No later job may name the adapter; those before finish with it."""
        ...

    async def stop(self) -> None: ...

    def discard(self) -> None:
        """End engines that were loaded and never started."""
        ...


@contextmanager
def discarded_on_error(client: EngineClient) -> Iterator[None]:
    """Nothing outlives a server that could not be built."""
    try:
        yield
    except BaseException:
        client.discard()
        raise
