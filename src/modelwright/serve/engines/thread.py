"""An engine in a thread of this process. The event loop puts commands in a queue and receives tokens through
`call_soon_threadsafe`, with one call per engine step.
"""

import asyncio
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from modelwright.core.config import ModelwrightError
from modelwright.infer.engine import Engine
from modelwright.model.adapter_bank import prepare_adapter
from modelwright.ops.tensor_heap import give_back_memory
from modelwright.serve.engines.client import EngineEvents, EngineInfo, Job, StepEngine
from modelwright.serve.errors import ApiError, log

REST_AFTER_S = 10.0
"""Seconds without work after which an engine returns unused memory of a burst of long prompts to the system."""


@dataclass(frozen=True)
class _Add:
    """Starts all answers of one request at once, so that answers with the same prompt share its prefill."""

    jobs: Mapping[str, Job]


@dataclass(frozen=True)
class _Abort:
    request_id: str


@dataclass(frozen=True)
class _Call:
    """Runs a function between two steps. done: future of the caller who waits for it."""

    function: Callable[[], None]
    done: asyncio.Future[None]


@dataclass(frozen=True)
class _Stop:
    pass


def can_do_all(job: Job) -> None:
    """Checks a job for an engine that supports all of them."""


class EngineThread:
    """An `EngineClient` of one engine in this process. check: see `EngineClient.check`."""

    def __init__(self, engine: StepEngine, info: EngineInfo, check: Callable[[Job], None] = can_do_all) -> None:
        self.engine = engine
        self.info = info
        self.check = check
        self.unavailable = ""
        self.is_back_soon = False
        self._name = f"engine-{secrets.token_hex(4)}"
        self._commands: queue.SimpleQueue[_Add | _Abort | _Call | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, events: EngineEvents) -> None:
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        events.deliver(self._name, [], self.engine.stats())
        self._thread.start()

    def add(self, jobs: Mapping[str, Job]) -> None:
        self._commands.put(_Add(jobs))

    def abort(self, request_id: str) -> None:
        self._commands.put(_Abort(request_id))

    async def load_adapter(self, name: str, folder: Path) -> str:
        engine = self.engine
        if not isinstance(engine, Engine):
            raise ApiError(400, "This server's engine has no adapters.", param="lora_path", code="unsupported_task")
        try:
            adapter = await asyncio.to_thread(prepare_adapter, engine.model, folder)
            await self._call(lambda: engine.add_adapter(name, adapter))
        except ModelwrightError as error:
            raise ApiError(400, str(error), param="lora_path", code="invalid_value") from None
        return adapter.digest

    async def unload_adapter(self, name: str) -> None:
        engine = self.engine
        assert isinstance(engine, Engine), "another engine has loaded none"
        await self._call(lambda: engine.remove_adapter(name))

    async def _call(self, function: Callable[[], None]) -> None:
        """Runs a function in the engine's thread and waits for it. Raises what it raises."""
        call = _Call(function, self._loop.create_future())
        self._commands.put(call)
        await asyncio.wait({call.done, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done.done():
            raise ApiError(503, self.unavailable or "The engine has been stopped.", code="engine_failed")
        call.done.result()

    async def stop(self) -> None:
        """Ends the thread after its current step."""
        self._commands.put(_Stop())
        await asyncio.to_thread(self._thread.join)
        self._end()
        self._events.engine_lost(self._name, "stopped")
        del self._events  # the cycle would keep the model in memory until the next garbage collection

    def discard(self) -> None:
        """Does nothing, because the thread has not been started."""

    def _run(self) -> None:
        try:
            while self._obey():
                self._tell(self._events.deliver, self._name, self.engine.step(), self.engine.stats())
        except Exception:
            log.exception("the engine has failed")
            self._tell(self._fail)

    def _obey(self) -> bool:
        """Executes all commands, and waits for one if there is nothing to compute. Returns false to stop."""
        has_rested = False
        while True:
            is_idle = not self.engine.has_work
            # with work, only commands that are in the queue already: the next step must not wait
            try:
                command = self._commands.get(block=is_idle, timeout=None if has_rested else REST_AFTER_S)
            except queue.Empty:
                if not is_idle:
                    return True
                give_back_memory()
                has_rested = True
                continue
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Call):
                try:
                    command.function()
                except Exception as error:  # fails the caller alone, not the engine and all its answers
                    self._tell(command.done.set_exception, error)
                else:
                    self._tell(command.done.set_result, None)
            elif isinstance(command, _Add):
                for request_id, job in command.jobs.items():
                    try:
                        job.submit(self.engine, request_id)
                    except ValueError as error:
                        self._tell(self._events.refuse, request_id, ApiError(400, str(error), code="invalid_value"))
            elif self.engine.abort(command.request_id) and not self.engine.has_work:
                # no step follows that would report the engine's load
                self._tell(self._events.deliver, self._name, [], self.engine.stats())

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _fail(self) -> None:
        self.unavailable = "The engine has failed; restart the server and see its log."
        self._end()
        self._events.fail()
