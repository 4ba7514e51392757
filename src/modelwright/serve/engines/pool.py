"""Engines in separate processes behind one gateway: dispatch of answers, and recovery from lost engines.

The end of its socket shows at once that an engine has died, silence that it hangs. It is restarted, with growing pauses
if that happens often. Engines of one version give the same bits, so its answers continue on another engine: their
tokens are computed again, and those that the client has are compared and not sent again. Engines that are not
batch-invariant retry an answer only if the client has seen nothing of it, within a budget; otherwise it ends with an
error. The same holds for an answer whose first token an engine could not compute.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import math
import random
import secrets
import subprocess
from array import array
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelwright.infer.engine import EngineStats, StepOutput
from modelwright.serve.engines.client import EngineEnd, EngineEvents, Job, output_of
from modelwright.serve.engines.process import SILENCE_S, SILENCE_STEPS, EngineHandle, EngineLink, EngineSetup, relaunch
from modelwright.serve.engines.thread import can_do_all
from modelwright.serve.errors import ENGINE_LOST, ApiError, engine_lost, log

RETRY_SHARE = 0.1
"""Retries per request, as in the budgets of Finagle and Envoy: more would turn a fault into an overload."""
MAX_SAVED_RETRIES = 100.0


def cache_salt(job: Job) -> str:
    """Returns the salt of the prefix cache. Jobs with different salts do not share cached prompts."""
    return f"{job.cache_salt} {job.adapter}"


def prompt_key(prompt_ids: Sequence[int], salt: str, prefill_chunk: int) -> bytes:
    """Returns a key that is equal for prompts which can share the first chunk in the prefix cache."""
    return salt.encode() + array("q", prompt_ids[:prefill_chunk]).tobytes()


def choose_engine(loads: Mapping[int, int], key: bytes, tie_tokens: int, draw: random.Random) -> int:
    """Returns the less loaded of two random engines (power of two choices, Mitzenmacher 2001). If their loads differ by
    at most `tie_tokens`, returns the one that rendezvous hashing assigns to the key, because it may have the prompt in
    its cache. loads: outstanding tokens by engine.
    """
    pair = draw.sample(sorted(loads), min(2, len(loads)))
    lightest, heaviest = min(pair, key=loads.__getitem__), max(pair, key=loads.__getitem__)
    if loads[heaviest] - loads[lightest] > tie_tokens:
        return lightest
    return max(pair, key=lambda number: hashlib.sha256(key + b"%d" % number).digest())


@dataclass
class RetryBudget:
    """Allows one retry at first, and `RETRY_SHARE` of a retry more with every request."""

    _balance: float = 1.0

    def note_request(self) -> None:
        self._balance = min(MAX_SAVED_RETRIES, self._balance + RETRY_SHARE)

    def take(self) -> bool:
        """Returns whether another retry is allowed, and counts it."""
        is_allowed = self._balance >= 1
        self._balance -= is_allowed
        return is_allowed


MAX_MOVES = 2
"""Limits the damage of a request that crashes every engine that computes it."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
STABLE_S = 60.0
"""The pause before a restart doubles each time, until an engine has run for this time."""
ORPHAN_TIMEOUT_S = 60.0
"""Longest time that answers wait for an engine when all are lost."""
ORPHAN_POLL_S = 0.5


AdapterReply = tuple[bool, str]
"""Whether a call of `AdapterLoader` is done, and the digest of the adapter's values or the reason of a failure."""


class AdapterCalls:
    """Loading and unloading of adapters in engine processes (`AdapterLoader`). A lost engine never replies."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[str, asyncio.Future[AdapterReply | None]]] = {}

    async def ask(self, links: Mapping[str, EngineLink], name: str, folder: str) -> dict[str, AdapterReply]:
        """Calls `AdapterLoader.begin` in engines, by name. Returns the replies of those that are not lost meanwhile."""
        loop, futures = asyncio.get_running_loop(), dict[str, asyncio.Future[AdapterReply | None]]()
        for engine_name, link in links.items():
            number = next(self._numbers)
            futures[engine_name] = loop.create_future()
            self._waiting[number] = (engine_name, futures[engine_name])
            link.send({"adapters": [[number, name, folder]]})
        replies = dict(zip(futures, await asyncio.gather(*futures.values()), strict=True))
        return {engine_name: reply for engine_name, reply in replies.items() if reply is not None}

    def take(self, number: int, reply: AdapterReply) -> None:
        """Ends the wait for a reply."""
        _, future = self._waiting.pop(number, ("", None))
        if future is not None and not future.done():
            future.set_result(reply)

    def lose(self, engine_name: str) -> None:
        """Ends the wait for the replies of a lost engine."""
        for number in [number for number, (name, _) in self._waiting.items() if name == engine_name]:
            _, future = self._waiting.pop(number)
            if not future.done():
                future.set_result(None)


@dataclass(eq=False)
class PooledAnswer:
    """An answer in progress. token_ids: tokens that the client has; num_repeated: how many of them the current engine
    has computed again; orphaned_at: time since which it has no engine, 0 while it has one.
    """

    request_id: str
    job: Job
    engine: "Slot | None" = None
    token_ids: list[int] = field(default_factory=list)
    num_repeated: int = 0
    num_moves: int = 0
    orphaned_at: float = 0.0


@dataclass(eq=False)
class Slot:
    """A place for an engine. name: name of its current process; link: None while it is not connected."""

    number: int
    handle: EngineHandle
    name: str = ""
    link: EngineLink | None = None
    is_lost: bool = False
    answers: dict[str, PooledAnswer] = field(default_factory=dict)


class EnginePool:
    """An `EngineClient` of engine processes with one version of the model."""

    def __init__(self, setup: EngineSetup, handles: Sequence[EngineHandle]) -> None:
        self._setup, self._report = setup, handles[0].report
        self._is_reproducible = self._report.is_batch_invariant
        self.info = replace(self._report.info, max_num_seqs=self._report.info.max_num_seqs * len(handles))
        self._slots = [Slot(number, handle) for number, handle in enumerate(handles)]
        self._answers: dict[str, PooledAnswer] = {}
        self._orphans: dict[str, PooledAnswer] = {}
        self._budget = RetryBudget()
        self._chunk = setup.engine["prefill_chunk_size"]
        self._draw = random.Random(0)
        self._tasks: list[asyncio.Task[None]] = []
        self._lost_at = -math.inf
        self._starting: dict[int, subprocess.Popen[bytes]] = {}
        self._adapter_calls = AdapterCalls()

    @property
    def unavailable(self) -> str:
        return "All engines are being started again; try again soon." if all(s.is_lost for s in self._slots) else ""

    @property
    def is_back_soon(self) -> bool:
        """True while the outage may be a restart, so that requests wait in the queue."""
        return asyncio.get_running_loop().time() - self._lost_at < ORPHAN_TIMEOUT_S

    def start(self, events: EngineEvents) -> None:
        self._events = events
        self._tasks = [
            asyncio.create_task(one) for one in (*map(self._keep_running, self._slots), self._watch_orphans())
        ]

    check = staticmethod(can_do_all)

    def add(self, jobs: Mapping[str, Job]) -> None:
        answers = [PooledAnswer(request_id, job) for request_id, job in jobs.items()]
        self._answers |= {answer.request_id: answer for answer in answers}
        self._budget.note_request()
        self._place_all(answers)

    def abort(self, request_id: str) -> None:
        if (answer := self._answers.get(request_id)) is not None:
            self._forget(answer)
            if answer.engine is not None and answer.engine.link is not None:
                answer.engine.link.send({"abort": [request_id]})

    async def load_adapter(self, name: str, folder: Path) -> str:
        digests: dict[str, str] = {}
        # in rounds, because other engines may be connected or restarted while these load the adapter
        while links := {slot.name: slot.link for slot in self._slots if slot.link and slot.name not in digests}:
            replies = await self._adapter_calls.ask(links, name, str(folder))
            problems = [text for is_done, text in replies.values() if not is_done]
            digests |= {engine: text for engine, (_, text) in replies.items()}
            if len(set(digests.values())) > 1 and not problems:
                problems = [f"{folder}: its files have changed while engines read them; try again"]
            if problems:
                await self.unload_adapter(name)
                raise ApiError(400, problems[0], param="lora_path", code="invalid_value")
        if not digests:
            raise ApiError(503, "All engines are being started again; try again soon.", code="engine_lost")
        digest = next(iter(digests.values()))
        self._expect({**self._report.info.adapters, name: digest}, {**self._setup.adapters, name: str(folder)}, digests)
        return digest

    async def unload_adapter(self, name: str) -> None:
        adapters = {other: digest for other, digest in self._report.info.adapters.items() if other != name}
        folders = {other: folder for other, folder in self._setup.adapters.items() if other != name}
        links = {slot.name: slot.link for slot in self._slots if slot.link}
        self._expect(adapters, folders, links)  # first: an engine that is restarted meanwhile must not have it
        await self._adapter_calls.ask(links, name, "")

    def _expect(self, adapters: Mapping[str, str], folders: Mapping[str, str], engines: Collection[str]) -> None:
        """Sets the adapters that engines have from now on. engines: names of those that have them; all others are
        restarted, because their report differs.
        """
        self._setup = replace(self._setup, adapters=folders)
        self._report = replace(self._report, info=replace(self._report.info, adapters=adapters))
        for slot in self._slots:
            if slot.link is not None and slot.name in engines:
                slot.handle.report = self._report

    async def stop(self) -> None:
        for task in self._tasks:  # first: they would restart engines that end
            task.cancel()
        for process in self._starting.values():
            process.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(slot.handle.end) for slot in self._slots))
        for slot in self._slots:
            self._events.engine_lost(slot.name, "stopped")

    def discard(self) -> None:
        for slot in self._slots:
            slot.handle.end()

    async def _keep_running(self, slot: Slot) -> None:
        """Stays connected to a slot's engine, and restarts it whenever it is lost."""
        pause_s, loop = FIRST_PAUSE_S, asyncio.get_running_loop()
        while True:
            started = loop.time()
            slot.name = f"engine-{slot.number}-{secrets.token_hex(4)}"
            link = EngineLink(functools.partial(self._receive, slot))
            slot.handle.connection.setblocking(False)
            await loop.create_unix_connection(lambda link=link: link, sock=slot.handle.connection)
            end: EngineEnd = "outdated"
            try:
                if slot.handle.report == self._report:  # otherwise adapters changed while it started
                    if slot.is_lost:
                        log.warning("engine %s (process %d) has taken its place", slot.name, slot.handle.process.pid)
                    slot.link, slot.is_lost = link, False
                    self._place_all(list(self._orphans.values()))
                    end = await link.watch(max(SILENCE_S, SILENCE_STEPS * slot.handle.full_step_s))
            finally:
                slot.link = None
                link.close()
            log.error("engine %s (process %d) %s", slot.name, slot.handle.process.pid, end)
            self._lose(slot, end)
            with contextlib.suppress(ProcessLookupError):  # a process that hangs does not end when its socket closes
                slot.handle.process.kill()
            await asyncio.to_thread(slot.handle.end)
            pause_s = FIRST_PAUSE_S if loop.time() - started > STABLE_S else pause_s
            handle = None
            while handle is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                note = functools.partial(self._starting.__setitem__, slot.number)  # for `stop`, which kills it
                try:
                    handle = await asyncio.to_thread(relaunch, self._setup, lambda: self._report, note)
                finally:
                    self._starting.pop(slot.number, None)
            slot.handle = handle

    def _receive(self, slot: Slot, message: Mapping[str, Any]) -> None:
        outputs = [output for plain in message["outputs"] if self._take(slot, output := output_of(plain))]
        self._events.deliver(slot.name, outputs, EngineStats(**message["stats"]))
        for request_id, (status, text, code) in message["refused"].items():
            if request_id in slot.answers:
                self._forget(slot.answers[request_id])
                self._events.refuse(request_id, ApiError(status, text, code=code))
        for number, is_done, text in message["adapters"]:
            self._adapter_calls.take(number, (is_done, text))

    def _take(self, slot: Slot, output: StepOutput) -> bool:
        """Records an output. Returns whether it is new to the client."""
        answer = slot.answers.get(output.request_id)
        if answer is None:
            return False
        # an answer that has moved repeats the tokens that the client has; a difference means damaged weights or memory
        if answer.num_repeated < len(answer.token_ids):
            if output.token_id != answer.token_ids[answer.num_repeated]:
                self._give_up(answer)
            answer.num_repeated += 1
            return False
        if output.finished:
            self._forget(answer)
            # "error" means an output that is not finite, which may come from damaged memory of this process alone
            if output.finish_reason == "error" and self._may_retry(answer):
                self._answers[answer.request_id] = answer
                self._place([answer], avoided=slot)
                return False
        answer.token_ids.append(output.token_id)
        answer.num_repeated += 1
        return True

    def _place_all(self, answers: Sequence[PooledAnswer]) -> None:
        # neighbors with the same prompt go to the same engine, which computes the prompt once
        for _, group in itertools.groupby(answers, key=lambda one: (cache_salt(one.job), tuple(one.job.prompt_ids))):
            self._place(list(group))

    def _place(self, group: Sequence[PooledAnswer], avoided: Slot | None = None) -> None:
        running = {slot.number: slot for slot in self._slots if slot.link is not None}
        slots = {number: slot for number, slot in running.items() if slot is not avoided} or running
        if not slots:
            # the time of the first loss counts, also if an engine that took over is lost as well
            for answer in group:
                answer.orphaned_at = answer.orphaned_at or asyncio.get_running_loop().time()
                self._orphans[answer.request_id] = answer
            return
        # most tokens that are still to be computed
        loads = {
            number: sum(answer.job.max_total_tokens - len(answer.token_ids) for answer in slot.answers.values())
            for number, slot in slots.items()
        }
        job = group[0].job
        # a prompt within one chunk is not cached, so its place does not matter
        tie_tokens = self._chunk if len(job.prompt_ids) > self._chunk else 0
        key = prompt_key(job.prompt_ids, cache_salt(job), self._chunk)
        slot = slots[choose_engine(loads, key, tie_tokens, self._draw)]
        for answer in group:
            self._orphans.pop(answer.request_id, None)
            answer.engine, answer.num_repeated, answer.orphaned_at = slot, 0, 0.0
            slot.answers[answer.request_id] = answer
        assert slot.link is not None
        slot.link.send({"add": {answer.request_id: answer.job.to_message() for answer in group}})

    def _lose(self, slot: Slot, end: EngineEnd) -> None:
        if not slot.is_lost:  # one that was outdated before it took answers ends no outage and begins none
            self._lost_at = asyncio.get_running_loop().time()
        slot.is_lost = True
        answers, slot.answers = list(slot.answers.values()), {}
        self._events.engine_lost(slot.name, end)
        self._adapter_calls.lose(slot.name)
        # where engines give the same bits, an answer continues elsewhere; otherwise only an unseen one starts anew
        for answer in answers:
            answer.engine = None
            if self._is_reproducible and answer.num_moves < MAX_MOVES:
                answer.num_moves += 1
                self._events.answer_moved("continued")
            elif not self._may_retry(answer):
                self._give_up(answer)
        self._place_all([answer for answer in answers if answer.request_id in self._answers])

    def _may_retry(self, answer: PooledAnswer) -> bool:
        """Counts a retry and returns true if an answer, of which the client has seen nothing, may be computed again."""
        if answer.token_ids or answer.num_moves >= MAX_MOVES or not self._budget.take():
            return False
        answer.num_moves += 1
        self._events.answer_moved("retried")
        return True

    def _give_up(self, answer: PooledAnswer, text: str = ENGINE_LOST) -> None:
        self.abort(answer.request_id)
        self._events.answer_moved("lost")
        self._forget(answer)
        self._events.refuse(answer.request_id, engine_lost(text))

    def _forget(self, answer: PooledAnswer) -> None:
        self._answers.pop(answer.request_id, None)
        self._orphans.pop(answer.request_id, None)
        if answer.engine is not None:
            answer.engine.answers.pop(answer.request_id, None)

    async def _watch_orphans(self) -> None:
        while True:
            await asyncio.sleep(ORPHAN_POLL_S)
            oldest = asyncio.get_running_loop().time() - ORPHAN_TIMEOUT_S
            for answer in [one for one in self._orphans.values() if one.orphaned_at < oldest]:
                waited = f"No engine was ready within {ORPHAN_TIMEOUT_S:g} s; send the request again later."
                self._give_up(answer, ENGINE_LOST if answer.token_ids else waited)


def launch_pool(setup: EngineSetup, count: int) -> EnginePool:
    """Starts `count` engine processes. Raises `ModelError` or `ConfigError` if one does not become ready."""
    # the first one measures which kernels are fastest; the others use the same ones, so that all give the same bits
    first = EngineHandle.launch(setup)
    setup = replace(setup, heads=(first.report.head,), int8_backend=first.report.int8_backend)
    with ThreadPoolExecutor(count) as threads:
        launching = [threads.submit(EngineHandle.launch, setup) for _ in range(count - 1)]
    problems = [problem for one in launching if (problem := one.exception())]
    handles = [first, *(one.result() for one in launching if not one.exception())]
    if problems:
        for handle in handles:
            handle.end()
        raise problems[0]
    return EnginePool(setup, handles)
