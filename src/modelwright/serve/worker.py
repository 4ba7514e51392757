"""The thread that owns the engine, and the streams by which it reports to the event loop.

The event loop never waits for the engine: it puts commands on a queue and receives tokens by `call_soon_threadsafe`,
one call per engine step.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from modelwright.infer.engine import Engine, EngineStats, StepOutput
from modelwright.infer.sequence import SamplingParams, TokenConstraint
from modelwright.serve.errors import ApiError, limit_reached
from modelwright.serve.keys import Caller, Reservation
from modelwright.serve.metrics import Metrics, RequestTimer

log = logging.getLogger("modelwright.serve")

RETRY_AFTER_S = 2
"""For a server that is shutting down or has no connection left: another one may answer."""

TYPICAL_SHARE = 0.1
"""Weight of the newest answer in the running average of how long answers take."""


class Job(Protocol):
    """One answer to compute."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def max_total_tokens(self) -> int:
        """Tokens of prompt and answer at most."""
        ...

    def submit(self, engine: Engine, request_id: str) -> None:
        """Queue it in the engine. Raises `ConfigError` for what the engine rejects."""
        ...


@dataclass(frozen=True)
class GenerationJob:
    """New tokens after a prompt. cache_salt: see `Engine.add`."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    constraint: TokenConstraint | None = None
    cache_salt: str = ""

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_ids) + self.params.max_tokens

    def submit(self, engine: Engine, request_id: str) -> None:
        engine.add(request_id, self.prompt_ids, self.params, self.constraint, cache_salt=self.cache_salt)


@dataclass(frozen=True)
class EmbeddingJob:
    """The embedding of a text. cache_salt: see `Engine.add`."""

    prompt_ids: Sequence[int]
    cache_salt: str = ""

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_ids)

    def submit(self, engine: Engine, request_id: str) -> None:
        engine.embed(request_id, self.prompt_ids, cache_salt=self.cache_salt)


@dataclass(frozen=True)
class _Add:
    """All answers of one request at once, so that those with the same prompt start together."""

    jobs: Mapping[str, Job]


@dataclass(frozen=True)
class _Abort:
    request_id: str


@dataclass(frozen=True)
class _Stop:
    pass


class Stream:
    """The tokens of the answers to one request, in order of arrival. Iterate inside the event loop; call `close` at the
    end, also after an early exit.
    """

    def __init__(self, worker: "EngineWorker", jobs: Mapping[str, Job], reservation: Reservation) -> None:
        self._worker = worker
        self._reservation = reservation
        self._num_used_tokens = sum(len(job.prompt_ids) for job in jobs.values())
        self._open = dict(enumerate(jobs))
        self._clocks = [RequestTimer(worker.metrics) for _ in jobs]
        self._inbox: asyncio.Queue[tuple[int, StepOutput] | ApiError] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, StepOutput]]:
        """`(number of the answer, token)` until all are finished. Raises `ApiError` if the engine fails."""
        while self._open:
            item = await self._inbox.get()
            if isinstance(item, ApiError):
                self._close_all("error")
                raise item
            index, output = item
            if index not in self._open:
                continue
            yield index, output
            if output.finished:
                self.finish(index, output.finish_reason)

    def put_token(self, index: int, output: StepOutput) -> None:
        if index in self._open:
            if not output.embedding:
                self._clocks[index].token()
                self._num_used_tokens += 1
            self._inbox.put_nowait((index, output))

    def put_error(self, error: ApiError) -> None:
        self._inbox.put_nowait(error)

    def finish(self, index: int, reason: str) -> None:
        """Mark one answer as finished; the engine is told to stop if it has not."""
        request_id = self._open.pop(index, "")
        if request_id:
            self._worker.release(request_id, self._clocks[index].end(reason))
            if not self._open:
                self._reservation.settle(self._num_used_tokens)

    def close(self) -> None:
        """Abort what is still running and free the slots."""
        self._close_all("aborted")

    def _close_all(self, reason: str) -> None:
        for index in list(self._open):
            self.finish(index, reason)


class EngineWorker:
    """Runs an engine in its own thread. All public methods belong to the event loop."""

    def __init__(self, engine: Engine, metrics: Metrics, *, max_queue: int, max_tokens: int) -> None:
        self.engine = engine
        self.metrics = metrics
        self.failed = False
        self.typical_answer_s = 1.0
        self._capacity = engine.config.max_num_seqs + max_queue
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._commands: queue.SimpleQueue[_Add | _Abort | _Stop] = queue.SimpleQueue()
        self._streams: dict[str, tuple[Stream, int]] = {}
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stats = engine.stats()
        self.metrics.observe(self._stats, self._stats)

    def start(self) -> None:
        """Call inside the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Answers that are running or waiting."""
        return len(self._streams)

    def require_room(self, count: int, num_tokens: int = 0) -> None:
        """Raises `ApiError` 429 if `count` more answers with so many tokens do not fit in the queue, 503 if the engine
        has failed. One request fits in an empty queue, whatever its tokens.
        """
        if self.failed:
            raise ApiError(503, "The engine has failed; restart the server and see its log.", code="engine_failed")
        excess = self.num_open + count - self._capacity
        if excess > 0:
            raise limit_reached("The queue is full.", self.typical_answer_s * excess / self.engine.config.max_num_seqs)
        if self.num_open and self._num_tokens + num_tokens > self._max_tokens:
            raise limit_reached("The queue holds as many tokens as it may.", self.typical_answer_s)

    def submit(self, jobs: Sequence[Job], caller: Caller) -> Stream:
        """Start the answers of one request, all or none. Raises like `require_room` and `Caller.reserve`."""
        num_tokens = sum(job.max_total_tokens for job in jobs)
        self.require_room(len(jobs), num_tokens)
        reservation = caller.reserve(len(jobs), num_tokens, typical_answer_s=self.typical_answer_s)
        number = next(self._numbers)
        named = {f"{number}.{index}": job for index, job in enumerate(jobs)}
        stream = Stream(self, named, reservation)
        self._idle.clear()
        self._jobs |= named
        self._num_tokens += num_tokens
        self._streams |= {request_id: (stream, index) for index, request_id in enumerate(named)}
        self._commands.put(_Add(named))
        return stream

    def release(self, request_id: str, answer_s: float) -> None:
        """Forget an answer; it is aborted if the engine is still working on it. answer_s: how long it took."""
        if self._streams.pop(request_id, None) is None:
            return
        self._num_tokens -= self._jobs.pop(request_id).max_total_tokens
        self.typical_answer_s += TYPICAL_SHARE * (answer_s - self.typical_answer_s)
        self._commands.put(_Abort(request_id))
        if not self._streams:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no answer is open; false if that takes longer than `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def abort_all(self, error: ApiError) -> None:
        """End every open answer with `error`."""
        for stream in {stream for stream, _ in self._streams.values()}:
            stream.put_error(error)

    async def stop(self) -> None:
        """End the thread after its current step."""
        self._commands.put(_Stop())
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while self._obey():
                outputs = self.engine.step()
                self._tell(outputs)
        except Exception:
            log.exception("the engine has failed")
            self._loop.call_soon_threadsafe(self._fail)

    def _obey(self) -> bool:
        """Execute all commands; waits for one if there is nothing to compute. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Add):
                for request_id, job in command.jobs.items():
                    self._add(request_id, job)
            elif self.engine.abort(command.request_id) and not self.engine.has_work:
                self._tell([])

    def _add(self, request_id: str, job: Job) -> None:
        try:
            job.submit(self.engine, request_id)
        except ValueError as error:
            refusal = ApiError(400, str(error), code="invalid_value")
            self._loop.call_soon_threadsafe(self._refuse, request_id, refusal)

    def _tell(self, outputs: list[StepOutput]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, outputs, self.engine.stats())

    def _deliver(self, outputs: list[StepOutput], stats: EngineStats) -> None:
        self.metrics.observe(stats, self._stats)
        self._stats = stats
        for output in outputs:
            if output.request_id in self._streams:
                stream, index = self._streams[output.request_id]
                stream.put_token(index, output)

    def _refuse(self, request_id: str, error: ApiError) -> None:
        if request_id in self._streams:
            self._streams[request_id][0].put_error(error)

    def _fail(self) -> None:
        self.failed = True
        self.abort_all(ApiError(500, "The engine has failed; see the server's log.", code="engine_failed"))
