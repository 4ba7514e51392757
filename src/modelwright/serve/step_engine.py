"""What an engine thread runs: `infer.engine.Engine`, or another program's engine behind the same methods."""

from collections.abc import Sequence
from typing import Protocol

from modelwright.infer.engine import EngineStats, StepOutput
from modelwright.infer.sequence import Pixels, Pooling, SamplingParams, TokenConstraint


class StepEngine(Protocol):
    """Computes the answers of many requests, one step after the other. See `Engine` for what the arguments mean."""

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
        """Queue a request. Raises `ConfigError` for one that cannot be computed."""
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
        """Queue a request for a vector. Raises `ConfigError` for one that cannot be computed."""
        ...

    def abort(self, request_id: str) -> bool:
        """Whether there was such a request."""
        ...

    def step(self) -> list[StepOutput]: ...

    def stats(self) -> EngineStats: ...
