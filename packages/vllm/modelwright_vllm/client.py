"""`EngineClient` for vLLM.

vLLM runs as a child process, `vllm serve`, and serves token ids over its OpenAI-compatible API. It could run in this
process, too (as an AsyncLLM), but does not for three reasons: vLLM pins a version of PyTorch, so that it is usually
installed in a separate environment; an error that ends a CUDA context must not end the gateway with all its
connections; and its HTTP fields are documented and change less than its classes.

Each answer is a task with a connection, and closing the connection ends the answer in vLLM. A vLLM that has ended or
does not respond is started again with growing pauses. Its open answers end with the error `engine_lost`, because a
second attempt could produce other tokens.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from modelwright.core.config import ModelError
from modelwright.infer.engine import EngineStats, StepOutput
from modelwright.serve.account.monitoring import NO_LOAD
from modelwright.serve.engines.client import EngineEnd, EngineEvents, EngineInfo, Job, refuse_lacking
from modelwright.serve.engines.pool import FIRST_PAUSE_S, LONGEST_PAUSE_S, STABLE_S
from modelwright.serve.errors import ApiError, engine_lost
from modelwright_vllm.process import BASE_URL, VllmLaunch, VllmProcess
from modelwright_vllm.wire import AnswerReader, VllmFigures, body_of, read_figures, refusal

log = logging.getLogger("modelwright.serve")

LACKS = ("embeddings", "images")
ROUTE = "/v1/completions"
DATA = "data: "
DONE = "[DONE]"

WATCH_PERIOD_S = 0.2
POLL_PERIOD_S = 1.0
POLL_TIMEOUT_S = 5.0
MOST_FAILED_POLLS = 3
"""Number of failed polls in a row after which vLLM counts as hung. Its event loop may be busy for a second or two."""


class VllmClient:
    """A vLLM process with one version of the model. fingerprint: computes the fingerprint of the weights again."""

    def __init__(
        self, launch: VllmLaunch, process: VllmProcess, info: EngineInfo, fingerprint: Callable[[], str]
    ) -> None:
        """Creates a client of a process that is ready."""
        self.info = info
        self.unavailable = ""
        self.is_back_soon = False  # it takes minutes to start
        self.check = partial(refuse_lacking, "vllm", LACKS)
        self._launch = launch
        self._process = process
        self._fingerprint = fingerprint
        self._figures = VllmFigures()
        self._answers: dict[str, asyncio.Task[None]] = {}

    def start(self, events: EngineEvents) -> None:
        self._events = events
        self._connect()
        self._events.deliver(self._name, [], self._stats())
        self._keeping = asyncio.get_running_loop().create_task(self._keep_running())

    def add(self, jobs: Mapping[str, Job]) -> None:
        loop = asyncio.get_running_loop()
        for request_id, job in jobs.items():
            self._answers[request_id] = loop.create_task(self._answer(request_id, job))

    def abort(self, request_id: str) -> None:
        task = self._answers.pop(request_id, None)
        if task is not None:
            task.cancel()
            self._events.deliver(self._name, [], self._stats())

    async def load_adapter(self, name: str, folder: Path) -> str:
        raise ApiError(400, "The back-end vllm serves no adapters.", param="lora_path", code="unsupported_task")

    async def unload_adapter(self, name: str) -> None:
        raise AssertionError("a back-end without adapters has loaded none")

    async def stop(self) -> None:
        for task in (self._keeping, *self._answers.values()):
            task.cancel()
        await asyncio.gather(self._keeping, *self._answers.values(), return_exceptions=True)
        self._answers.clear()
        await self._http.aclose()
        await asyncio.to_thread(self._process.end)
        self._events.engine_lost(self._name, "stopped")

    def discard(self) -> None:
        self._process.end()

    def _connect(self) -> None:
        """Connects to the current process under a new name."""
        self._name = f"vllm-{secrets.token_hex(4)}"
        self._figures = VllmFigures()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.info.max_num_seqs)
        transport = httpx.AsyncHTTPTransport(uds=str(self._process.socket), limits=limits)
        timeout = httpx.Timeout(POLL_TIMEOUT_S, read=None)  # an answer may wait for long until its first token
        self._http = httpx.AsyncClient(transport=transport, base_url=BASE_URL, timeout=timeout)

    async def _answer(self, request_id: str, job: Job) -> None:
        """Computes an answer and reports it to the end."""
        error: ApiError | None = None
        try:
            body = body_of(job, self.info.max_seq_len)
            reader = AnswerReader(request_id, body)
            async with self._http.stream("POST", ROUTE, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise refusal(_error_of(await response.aread()), response.status_code)
                if not body.get("stream"):
                    self._report(reader.read(json.loads(await response.aread())))
                else:
                    async for line in response.aiter_lines():
                        if line.startswith(DATA) and line != DATA + DONE:
                            self._report(reader.read(json.loads(line.removeprefix(DATA))))
            last = reader.end()
        except ApiError as refused:
            error = refused
        except httpx.HTTPError as broken:
            log.warning("an answer of vLLM was lost: %s: %s", type(broken).__name__, broken)
            error = engine_lost()
        except Exception:
            log.exception("a reply of vLLM could not be read")
            error = ApiError(500, "A reply of vLLM could not be read; see the server's log.", code="engine_failed")
        if self._answers.pop(request_id, None) is None:
            return  # it was aborted or lost meanwhile
        if error is None:
            self._events.deliver(self._name, [last], self._stats())
            return
        self._refuse(request_id, error)

    def _report(self, outputs: Sequence[StepOutput]) -> None:
        if outputs:
            self._events.deliver(self._name, outputs, self._stats())

    def _refuse(self, request_id: str, error: ApiError) -> None:
        if error.code == "engine_lost":
            self._events.answer_moved("lost")
        self._events.refuse(request_id, error)

    def _stats(self) -> EngineStats:
        figures, num_open = self._figures, len(self._answers)
        num_running = min(num_open, self.info.max_num_seqs)
        return replace(
            NO_LOAD,
            num_running=num_running,
            num_waiting=num_open - num_running,
            num_blocks=figures.num_blocks,
            num_free_blocks=figures.num_blocks - round(figures.used_share * figures.num_blocks),
            num_preemptions=figures.num_preemptions,
            num_prefix_queries=figures.num_prefix_queries,
            num_prefix_hits=figures.num_prefix_hits,
        )

    async def _keep_running(self) -> None:
        """Watches vLLM, and starts it again when it is lost."""
        pause_s, loop = FIRST_PAUSE_S, asyncio.get_running_loop()
        while True:
            started = loop.time()
            end = await self._watch()
            log.error("vLLM (guarded by process %d) %s", self._process.pid, end)
            # All open answers end with an error.
            self.unavailable = "vLLM is being started again; try again soon."
            self._events.engine_lost(self._name, end)
            answers, self._answers = self._answers, {}
            for request_id, task in answers.items():
                task.cancel()
                self._refuse(request_id, engine_lost())
            await self._http.aclose()
            await asyncio.to_thread(self._process.end)
            pause_s = FIRST_PAUSE_S if loop.time() - started > STABLE_S else pause_s
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                if await self._restarted():
                    break

    async def _watch(self) -> EngineEnd:
        """Waits until vLLM has ended or hangs; returns which. Reads its figures meanwhile."""
        loop, num_failed = asyncio.get_running_loop(), 0
        polled_at = loop.time()
        while not self._process.has_ended:
            await asyncio.sleep(WATCH_PERIOD_S)
            if loop.time() - polled_at < POLL_PERIOD_S:
                continue
            num_failed = 0 if await self._poll() else num_failed + 1
            polled_at = loop.time()
            if num_failed >= MOST_FAILED_POLLS:
                return "wedged"
        return "died"

    async def _poll(self) -> bool:
        """Reads vLLM's figures; returns False if its health check fails."""
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                if (await self._http.get("/health")).status_code != httpx.codes.OK:
                    return False
                text = (await self._http.get("/metrics")).text
        except (httpx.HTTPError, TimeoutError):
            return False
        try:
            self._figures = read_figures(text)
        except ValueError:
            log.exception("vLLM's metrics could not be read")  # answers do not depend on them
        self._events.deliver(self._name, [], self._stats())
        return True

    async def _restarted(self) -> bool:
        """Starts another process; returns False if that failed. `stop` ends one that is still starting."""
        try:
            found = await asyncio.to_thread(self._fingerprint)
            if found != self.info.fingerprint:
                log.error("vLLM is not started again: the weights are %s now; reload the model", found)
                return False
            self._process = VllmProcess(self._launch)
            await asyncio.to_thread(self._process.await_ready)
        except (ModelError, OSError) as error:
            log.error("vLLM could not be started again: %s", error)
            with suppress(OSError):
                await asyncio.to_thread(self._process.end)
            return False
        self._connect()
        self.unavailable = ""
        self._events.deliver(self._name, [], self._stats())
        return True


def _error_of(content: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {"message": content.decode(errors="replace")[:300]}
