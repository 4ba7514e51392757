"""Which engines get new answers, and which answers are tried again: a pool whose engines are scripted at the other end
of the real connection."""

import asyncio
import random
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from modelwright.infer.engine import EngineConfig, StepOutput
from modelwright.infer.sequence import SamplingParams
from modelwright.serve.account.monitoring import NO_LOAD
from modelwright.serve.engines.client import EngineInfo, GenerationJob, output_message
from modelwright.serve.engines.pool import EnginePool, choose_engine, prompt_key
from modelwright.serve.engines.process import BlockingChannel, EngineHandle, EngineReport, EngineSetup
from modelwright.serve.errors import ApiError


@dataclass
class Events:
    """What a pool reports."""

    outputs: dict[str, list[StepOutput]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    errors: dict[str, ApiError] = field(default_factory=dict)

    def deliver(self, engine_name: str, outputs: Any, stats: Any) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def engine_lost(self, engine_name: str, reason: str) -> None:
        self.counts[f"lost: {reason}"] += 1

    def answer_moved(self, outcome: str) -> None:
        self.counts[f"moved: {outcome}"] += 1

    def refuse(self, request_id: str, error: ApiError) -> None:
        self.errors[request_id] = error

    def fail(self) -> None:
        self.counts["failed"] += 1


Script = Callable[[str], list[StepOutput]]
"""The outputs of an answer, by its id."""


def broken(request_id: str) -> list[StepOutput]:
    """What an engine says whose output is not finite."""
    return [StepOutput(request_id, 0, 0.0, (), "error")]


def good(request_id: str) -> list[StepOutput]:
    return [StepOutput(request_id, 5, -1.0, (), ""), StepOutput(request_id, 6, -1.0, (), "length")]


def cut(request_id: str) -> list[StepOutput]:
    """An engine that fails after the first token."""
    return [StepOutput(request_id, 5, -1.0, (), ""), *broken(request_id)]


def play(connection: socket.socket, script: Script, asked: list[str]) -> None:
    """The engine's side of a connection, until the gateway closes it."""
    channel = BlockingChannel(connection)
    stats = asdict(NO_LOAD)
    try:
        while True:
            for message in channel.receive(0.2):
                for request_id in message.get("add", {}):
                    asked.append(request_id)
                    for output in script(request_id):
                        plain = [output_message(output)]
                        channel.send({"outputs": plain, "stats": stats, "refused": {}, "adapters": []})
            channel.send({"outputs": [], "stats": stats, "refused": {}, "adapters": []})
    except (EOFError, OSError):
        connection.close()


@contextmanager
def scripted_pool(scripts: list[Script]) -> Iterator[tuple[EnginePool, list[list[str]]]]:
    """A pool over scripted engines, and the ids of the answers that each was asked for."""
    info = EngineInfo(
        fingerprint="fp", vocab_size=9, max_seq_len=99, num_parameters=1, max_num_seqs=4, model_dim=2, scores=False,
        adapters={},
    )  # fmt: skip
    report = EngineReport(
        info=info, is_batch_invariant=True, row_multiple=1, head="plain", int8_backend="auto", decodes_by_operator=False
    )
    setup = EngineSetup(
        folder="none", engine=asdict(EngineConfig()), num_threads=1, heads=("plain",), int8_backend="auto"
    )
    asked: list[list[str]] = [[] for _ in scripts]
    handles, threads = [], []
    for script, ids in zip(scripts, asked, strict=True):
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(["sleep", "600"])
        handles.append(EngineHandle(process, ours, report, 0.01))
        threads.append(threading.Thread(target=play, args=(theirs, script, ids)))
        threads[-1].start()
    pool = EnginePool(setup, handles)
    try:
        yield pool, asked
    finally:
        for handle in handles:
            handle.process.kill()
            handle.end()
        for thread in threads:
            thread.join()


def run_requests(pool: EnginePool, events: Events, count: int) -> None:
    """Requests one after the other through a started pool."""

    async def run() -> None:
        pool.start(events)
        while sum(slot.link is not None for slot in pool._slots) < len(pool._slots):
            await asyncio.sleep(0.01)
        for number in range(count):
            pool.add({f"{number}.0": GenerationJob([1, 2, number], SamplingParams(max_tokens=2))})
            async with asyncio.timeout(30):
                while not any(one.finished for one in events.outputs.get(f"{number}.0", [])):
                    await asyncio.sleep(0.002)
        for task in pool._tasks:
            task.cancel()
        await asyncio.gather(*pool._tasks, return_exceptions=True)

    asyncio.run(run())


def test_an_answer_that_an_engine_cannot_begin_is_tried_on_another() -> None:
    events = Events()
    with scripted_pool([broken, good]) as (pool, asked):
        pool._budget._balance = 50
        run_requests(pool, events, 60)
        assert all([one.token_id for one in outputs] == [5, 6] for outputs in events.outputs.values())
        assert len(events.outputs) == 60
        assert 10 < len(asked[0]) <= 50
        assert set(asked[0]) <= set(asked[1])
        assert events.counts == {"moved: retried": len(asked[0])}


def test_retries_stay_within_the_budget_and_before_the_first_token() -> None:
    """Two broken engines, so that every retry fails, too."""
    events = Events()
    with scripted_pool([broken, broken]) as (pool, asked):
        run_requests(pool, events, 40)
        reasons = [[one.finish_reason for one in outputs] for outputs in events.outputs.values()]
        assert reasons == [["error"]] * 40, "the client gets the error once"
        assert events.counts["moved: retried"] == sum(map(len, asked)) - 40
        assert events.counts["moved: retried"] in (4, 5), "one at first, and a tenth of 40"
    events = Events()
    with scripted_pool([cut, cut]) as (pool, asked):
        run_requests(pool, events, 5)
        assert sum(map(len, asked)) == 5, "the client has seen a token"
        assert not events.counts["moved: retried"]


def test_ties_and_two_choices() -> None:
    def choose(loads: dict[int, int], prompt: list[int]) -> int:
        return choose_engine(loads, prompt_key(prompt, "salt", 16), 16 if len(prompt) > 16 else 0, draw)

    draw = random.Random(5)
    loads: Counter[int] = Counter(dict.fromkeys(range(4), 0))
    for number in range(4000):
        loads[choose(loads, [number])] += draw.randrange(1, 3)
    assert max(loads.values()) - min(loads.values()) < 10
    even = dict.fromkeys(range(6), 100)
    homes = Counter(choose(even, list(range(40))) for _ in range(300))
    assert homes.most_common(1)[0][1] > 80, "of two drawn engines the prompt's favorite: a third of the draws have it"
