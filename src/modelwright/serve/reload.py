"""Replaces the model in service without a failed request: the new version is loaded while the old one serves, tried,
and then gets all new requests, while open answers finish on the old one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.infer.sequence import SamplingParams
from modelwright.serve.account.monitoring import Metrics
from modelwright.serve.engines.client import EmbeddingJob, GenerationJob, Job
from modelwright.serve.errors import ApiError, log
from modelwright.serve.keys import ANYONE, Caller
from modelwright.serve.load import ModelSource
from modelwright.serve.served_model import ServedModel
from modelwright.serve.service import Service

SMOKE_TEXT = "The quick brown fox"
SMOKE_TOKENS = 8
SMOKE_TIMEOUT_S = 60.0
RETIRE_POLL_S = 0.02

Locate = Callable[[str], ModelSource]
"""Returns the model at an administrator's path, or for "" the model at the origin of the current one."""


def same_place(source: ModelSource | None, path: str) -> ModelSource:
    """Returns the model in the folder `path`, for "" the `source`."""
    if path:
        return ModelSource(name=Path(path).name, folder=Path(path))
    if source is None:
        raise ConfigError("path: the model in service came from no folder; name one")
    return source


class Reloader:
    """Changes the model or adapters in service, one change at a time. load: creates a version whose worker has not been
    started. It may take long and is called in another thread.
    """

    def __init__(self, service: Service, locate: Locate, load: Callable[[ModelSource, Metrics], ServedModel]) -> None:
        self._service = service
        self._locate = locate
        self._load = load
        self._lock = asyncio.Lock()
        self._retirements: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def exclusively(self) -> AsyncIterator[None]:
        """Excludes other changes during the block. Raises `ApiError` 409 if another one is in progress."""
        if self._lock.locked():
            text = "Another reload, test or change of adapters is under way; wait until it has ended."
            raise ApiError(409, text, code="reload_running")
        async with self._lock:
            yield

    @asynccontextmanager
    async def without_test(self) -> AsyncIterator[None]:
        """Works like `exclusively`, and raises `ApiError` 409 also while an A/B test runs."""
        async with self.exclusively():
            if self._service.arms is not None:
                text = "An A/B test compares the version in service with another one; end it first."
                raise ApiError(409, text, code="test_running")
            yield

    async def reload(self, path: str = "") -> ServedModel:
        """Puts the model at `path` in service and returns it. Raises `ApiError` 409 while another change is in progress
        or an A/B test runs, and 400 with the reason if the new version cannot be loaded or fails its test; the old one
        then stays in service.
        """
        async with self.without_test():
            outcome = "failed"
            try:
                fresh = await self.prepare(path, self._service.metrics)
                self.switch(fresh)
                outcome = "done"
                return fresh
            finally:
                self._service.metrics.versions.reloads.labels(outcome).inc()

    async def reload_and_log(self) -> None:
        """Reloads the model and logs an error, for a signal, which has no caller."""
        try:
            await self.reload()
        except ApiError as error:
            log.error("%s", error.message)

    async def close(self) -> None:
        """Waits for versions that are being stopped."""
        await asyncio.gather(*self._retirements)

    async def prepare(self, path: str, metrics: Metrics) -> ServedModel:
        """Returns a started version that has passed its test. metrics: those of its answers. Raises `ApiError`."""
        try:
            fresh = await asyncio.to_thread(lambda: self._load(self._locate(path), metrics))
        except ModelwrightError as error:
            raise self._refusal(str(error)) from None
        except Exception as error:
            log.exception("a new model could not be loaded")
            raise self._refusal(f"{type(error).__name__}: {error}") from error
        fresh.worker.client.start(fresh.worker)
        # before any user gets it, because damaged weights can load without an error
        problem = await _smoke_test(fresh)
        if not problem and self._service.is_draining:
            problem = "the server is shutting down"
        if problem:
            await fresh.worker.client.stop()
            raise self._refusal(problem)
        return fresh

    def _refusal(self, reason: str) -> ApiError:
        old = self._service.model.fingerprint
        text = f"The new model was not put in service, and {old} goes on: {reason}"
        return ApiError(400, text, param="path", code="reload_failed")

    def switch(self, fresh: ServedModel) -> None:
        """Gives new requests this version, and stops the one before when its last answer is finished."""
        service = self._service
        # in one step of the event loop, so that every request gets one version or the other
        old, service.model = service.model, fresh
        service.metrics.versions.show(fresh.fingerprint)
        log.info("new requests get %s instead of %s", fresh.fingerprint, old.fingerprint)
        self.retire(old)

    def retire(self, old: ServedModel, *, before: Coroutine[Any, Any, None] | None = None) -> None:
        """Stops a version that gets no more requests when its last answer is finished. before: awaited first."""
        self._service.retiring.append(old)
        # the set keeps the task alive: the event loop has only weak references to tasks
        task = asyncio.get_running_loop().create_task(self._retire(old, before))
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    async def _retire(self, old: ServedModel, before: Coroutine[Any, Any, None] | None) -> None:
        if before is not None:
            await before
        while old.worker.num_open or old.worker.num_held:
            await asyncio.sleep(RETIRE_POLL_S)
        await old.worker.client.stop()
        self._service.retiring.remove(old)


async def _smoke_test(model: ServedModel) -> str:
    """Lets a version answer. Returns the problem, or "" for a good answer."""
    # a context of a few tokens leaves room for one new token
    prompt_ids = model.tokenizer.encode(SMOKE_TEXT)[: model.limits.context - 1]
    job: Job = EmbeddingJob(prompt_ids, pooling="score")
    if not model.info.scores:
        params = SamplingParams(max_tokens=SMOKE_TOKENS, temperature=0.0, stop_ids=model.tokenizer.stop_ids)
        job = GenerationJob(prompt_ids, params)
    reason, token_ids = "", list[int]()
    try:
        stream = model.worker.submit([job], Caller(ANYONE))
        try:
            async with asyncio.timeout(SMOKE_TIMEOUT_S):
                async for _, output in stream:
                    token_ids.append(output.token_id)
                    reason = output.finish_reason
        finally:
            stream.close()
    except TimeoutError:
        return f"it gave no answer within {SMOKE_TIMEOUT_S:g} s"
    except ApiError as error:
        return error.message
    if reason not in ("stop", "length"):
        return "its output is not finite; its weights are broken"
    model.tokenizer.decode(token_ids)
    return ""
