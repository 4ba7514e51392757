"""A version of the model in service: its engines, tokenizer and limits, and its answers in progress with the streams
through which engines report to the event loop, which never waits for an engine (see `EngineClient`).
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from modelwright.infer.engine import EngineStats, StepOutput
from modelwright.serve.account.monitoring import Metrics, RequestTimer
from modelwright.serve.agents.calls import CallForm
from modelwright.serve.agents.forms import OWN_FORM, choose_form
from modelwright.serve.agents.reasoning import END_THINK
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.client import EngineClient, EngineEnd, EngineInfo, Job, MoveOutcome
from modelwright.serve.engines.grammars import GrammarCompiler
from modelwright.serve.errors import ApiError, limit_reached, log, shutting_down
from modelwright.serve.keys import Caller, Reservation
from modelwright.serve.limits import Limits
from modelwright.serve.load import ModelSource, ServedTokenizer, adapted_fingerprint

TYPICAL_SHARE = 0.1
"""Weight of the newest answer in the running average of the duration of answers."""
ROUNDS_SEEN = 4
"""Number of times that all places of the engines become free, over which the pace of answers is taken: answers that
began together end together, so a shorter time may have all ends or none."""

LOOP_WAITS = 4
"""Times that the first token of an answer waits for the event loop: the request is read and handled, the token is read
from the engine and sent. Where the loop is late, it is so each time."""


class Stream:
    """The tokens of the answers to one request, in order of arrival. Iterate inside the event loop, and call `close` at
    the end, also after an early exit.
    """

    def __init__(self, worker: "EngineWorker", jobs: Mapping[str, Job], reservation: Reservation) -> None:
        self._worker = worker
        self._reservation = reservation
        self._num_used_tokens = sum(len(job.prompt_ids) for job in jobs.values())
        self._open = dict(enumerate(jobs))
        self._clocks = [RequestTimer(worker.metrics.answers) for _ in jobs]
        self._inbox: asyncio.Queue[tuple[int, StepOutput] | ApiError] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, StepOutput]]:
        """Yields `(number of the answer, token)` until all are finished. Raises `ApiError` if the engine fails."""
        while self._open:
            item = await self._inbox.get()
            if isinstance(item, ApiError):
                self.close("error")
                raise item
            index, output = item
            if index not in self._open:  # tokens that arrived before the answer was finished by a stop string
                continue
            yield index, output
            if output.finished:
                self.finish(index, output.finish_reason)

    def put_token(self, index: int, output: StepOutput) -> None:
        if index in self._open:
            if not output.embedding:  # a pooled output is not a generated token
                self._clocks[index].token()
                self._num_used_tokens += 1
            self._inbox.put_nowait((index, output))

    def put_error(self, error: ApiError) -> None:
        self._inbox.put_nowait(error)

    def finish(self, index: int, reason: str) -> None:
        """Marks an answer as finished, and aborts it in an engine that still computes it."""
        request_id = self._open.pop(index, "")
        if request_id:
            self._worker.release(request_id, self._clocks[index].end(reason))
            if not self._open:
                self._reservation.settle(self._num_used_tokens)

    def close(self, reason: str = "aborted") -> None:
        """Aborts running answers and frees their slots."""
        for index in list(self._open):
            self.finish(index, reason)


class EngineWorker:
    """The answers that the engines of `client` compute for one version of the model. Belongs to the event loop."""

    def __init__(
        self, client: EngineClient, metrics: Metrics, *, max_queue: int, max_tokens: int, max_wait_s: float
    ) -> None:
        self.client = client
        self.metrics = metrics
        self.failed = False
        self.typical_answer_s = 1.0
        self.num_held = 0
        self._max_wait_s = max_wait_s
        self._ends: deque[float] = deque(maxlen=ROUNDS_SEEN * client.info.max_num_seqs)
        """Monotonic times at which answers have ended since others wait."""
        self._capacity = client.info.max_num_seqs + max_queue
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._streams: dict[str, tuple[Stream, int]] = {}
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count()
        self.idle = asyncio.Event()
        """Set while no answer is open."""
        self.idle.set()

    @property
    def num_open(self) -> int:
        """Number of answers that are running or waiting."""
        return len(self._streams)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the engines running while a request is read, before its answers are open."""
        self.num_held += 1
        try:
            yield
        finally:
            self.num_held -= 1

    @property
    def pace_s(self) -> float:
        """Seconds from the end of one answer to that of the next while all places are taken."""
        if len(self._ends) < self.client.info.max_num_seqs:  # those wait too shortly to tell
            return self.typical_answer_s / self.client.info.max_num_seqs
        # Until now, not until the last end, because an engine may have stopped
        return (time.monotonic() - self._ends[0]) / len(self._ends)

    def require_room(self, count: int, num_tokens: int = 0, *, loop_lag_s: float = 0.0) -> None:
        """Raises `ApiError` 429 if `count` more answers with `num_tokens` in all do not fit in the queue or would wait
        too long, 503 without a running engine. An empty queue accepts a request of any size. loop_lag_s: how late the
        event loop is.
        """
        if self.failed:
            raise ApiError(503, self.client.unavailable, code="engine_failed")
        if self.client.unavailable and not self.client.is_back_soon:
            raise shutting_down(self.client.unavailable)
        excess = self.num_open + count - self._capacity
        if excess > 0:
            raise limit_reached("The queue is full.", self.pace_s * excess)
        wait_s = self.pace_s * max(0, self.num_open + count - self.client.info.max_num_seqs) + LOOP_WAITS * loop_lag_s
        if self.num_open and wait_s > self._max_wait_s:
            text = f"The answer would begin in {wait_s:.2g} s, later than allowed."
            raise limit_reached(text, wait_s - self._max_wait_s)
        if self.num_open and self._num_tokens + num_tokens > self._max_tokens:
            raise limit_reached("The queue holds as many tokens as it may.", self.typical_answer_s)

    def submit(self, jobs: Sequence[Job], caller: Caller) -> Stream:
        """Starts all answers of a request, or raises like `EngineClient.check`, `require_room`, `Caller.reserve`."""
        for job in jobs:
            self.client.check(job)
        num_tokens = sum(job.max_total_tokens for job in jobs)
        self.require_room(len(jobs), num_tokens)
        # last of the checks: what it takes from the key's limits is given back only by the stream
        reservation = caller.reserve(len(jobs), num_tokens, typical_answer_s=self.typical_answer_s)
        number = next(self._numbers)
        named = {f"{number}.{index}": job for index, job in enumerate(jobs)}
        stream = Stream(self, named, reservation)
        # registered before `add`, because an engine may deliver as soon as it has the jobs
        self.idle.clear()
        self._jobs |= named
        self._num_tokens += num_tokens
        self._streams |= {request_id: (stream, index) for index, request_id in enumerate(named)}
        self.client.add(named)
        return stream

    def release(self, request_id: str, answer_s: float) -> None:
        """Forgets an answer, and aborts it if an engine still computes it. answer_s: its duration."""
        if self._streams.pop(request_id, None) is None:
            return
        self._num_tokens -= self._jobs.pop(request_id).max_total_tokens
        # an exponential moving average, from which waits for a free place are estimated
        self.typical_answer_s += TYPICAL_SHARE * (answer_s - self.typical_answer_s)
        if self.num_open >= self.client.info.max_num_seqs:
            self._ends.append(time.monotonic())
        else:
            self._ends.clear()
        self.client.abort(request_id)
        if not self._streams:
            self.idle.set()

    def abort_all(self, error: ApiError) -> None:
        """Ends every open answer with `error`."""
        for stream in {stream for stream, _ in self._streams.values()}:
            stream.put_error(error)

    def deliver(self, engine_name: str, outputs: Sequence[StepOutput], stats: EngineStats) -> None:
        self.metrics.engines.observe(engine_name, stats)
        for output in outputs:
            if output.request_id in self._streams:
                stream, index = self._streams[output.request_id]
                stream.put_token(index, output)

    def engine_lost(self, engine_name: str, reason: EngineEnd) -> None:
        self.metrics.engines.forget(engine_name)
        if reason != "stopped":
            self.metrics.engines.failures.labels(reason).inc()

    def answer_moved(self, outcome: MoveOutcome) -> None:
        self.metrics.engines.moved_answers.labels(outcome).inc()

    def refuse(self, request_id: str, error: ApiError) -> None:
        if request_id in self._streams:
            self._streams[request_id][0].put_error(error)

    def fail(self) -> None:
        self.failed = True
        self.abort_all(ApiError(500, "The engine has failed; see the server's log.", code="engine_failed"))


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter in service. `key`: its name in the engines, which no other adapter has ever had; `fingerprint`:
    version of the weights of model and adapter together.
    """

    folder: Path
    key: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class NamedWeights:
    """The weights that a name stands for: the engines' name of the adapter ("" for the model itself), and the version
    of the weights. A request looks them up once, so that loading and unloading adapters meanwhile does not affect it.
    """

    adapter: str
    version: str


@dataclass(frozen=True)
class ServedModel:
    """A model with a running worker. `source`: its origin, None for a model that exists in memory only; `adapters`:
    adapters by their names in requests; `aliases`: names by alias.
    """

    worker: EngineWorker
    tokenizer: ServedTokenizer
    limits: Limits
    grammars: GrammarCompiler
    source: ModelSource | None = None
    adapters: dict[str, ServedAdapter] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    unloaded: set[str] = field(default_factory=set)
    """Names of unloaded adapters. A request that was read before must get an error instead of the model itself."""
    created: int = field(default_factory=lambda: int(time.time()))
    form: CallForm = OWN_FORM
    """Form of the calls of functions."""
    thinks: bool = False
    """Answers may begin with a thought."""
    clamps: bool = True
    """`max_tokens` of chat requests is lowered to the room in the context."""

    @property
    def info(self) -> EngineInfo:
        return self.worker.client.info

    @property
    def image_text(self) -> str:
        """Text of an image's tokens in a prompt; "" for a text-only model."""
        info = self.info
        return self.tokenizer.token_text(info.image_token) * info.image_patches if info.reads_images else ""

    @property
    def fingerprint(self) -> str:
        """Version of the weights: "fp_" and 12 hex digits."""
        return self.info.fingerprint

    def adapter_of(self, name: str | None) -> ServedAdapter | None:
        """Returns the adapter of a name or alias, None for the model itself. Raises `ApiError` 404 if unloaded."""
        name = self.aliases.get(name or "", name or "")
        if name in self.unloaded:
            raise ApiError(404, f"The adapter {name!r} is no longer loaded.", param="model", code="model_not_found")
        return self.adapters.get(name)

    def weights_of(self, name: str) -> NamedWeights:
        """Returns the current weights of a name. Raises like `adapter_of`."""
        adapter = self.adapter_of(name)
        return NamedWeights(adapter.key, adapter.fingerprint) if adapter else NamedWeights("", self.fingerprint)


def serve_model(
    client: EngineClient, tokenizer: ServedTokenizer, config: ServeConfig, metrics: Metrics, source: ModelSource | None
) -> ServedModel:
    """Returns a version whose worker has not been started."""
    info, images = client.info, config.images
    limits = Limits(
        context=info.max_seq_len,
        max_choices=config.max_completions,
        max_token_bytes=tokenizer.max_token_bytes,
        max_body_bytes=config.max_body_bytes,
        # base64 has four characters for each three bytes
        image_bytes=images.max_count * (images.max_bytes // 3 + 1) * 4 if info.reads_images else 0,
    )
    worker = EngineWorker(
        client, metrics, max_queue=config.max_queued, max_tokens=config.max_queued_tokens, max_wait_s=config.max_wait_s
    )
    grammars = GrammarCompiler(tokenizer.definition, info.vocab_size, tokenizer.stop_ids)
    adapters = {
        name: ServedAdapter(Path(config.adapters[name]), name, adapted_fingerprint(info.fingerprint, digest))
        for name, digest in info.adapters.items()
    }
    form = choose_form(config.tool_parser, tokenizer.template, takes_tools=tokenizer.takes_tools)
    if form is OWN_FORM and not tokenizer.takes_tools:
        log.info("the chat template has no place for tools; requests with tools use the form `own` (docs/serving.md)")
    marks = END_THINK in tokenizer.template or len(tokenizer.mark_ids(END_THINK)) == 1
    return ServedModel(
        worker, tokenizer, limits, grammars, source, adapters, config.aliases, form=form,
        thinks=config.reasoning_parser == "think" or (config.reasoning_parser == "auto" and marks),
        clamps=config.clamp_max_tokens,
    )  # fmt: skip
