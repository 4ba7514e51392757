"""Which engines get new answers: circuit breakers and ejections by a clock that tests move, and a pool whose engines
are scripted at the other end of the real connection."""

import asyncio
import itertools
import random
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from modelwright.infer.engine import EngineConfig, StepOutput
from modelwright.infer.sequence import SamplingParams
from modelwright.serve.account.metrics import NO_LOAD
from modelwright.serve.engines.client import EngineInfo
from modelwright.serve.engines.handle import EngineHandle
from modelwright.serve.engines.jobs import GenerationJob, output_message
from modelwright.serve.engines.pool import EnginePool
from modelwright.serve.engines.process import BlockingChannel, EngineReport, EngineSetup
from modelwright.serve.engines.routing import (
    EJECTION_S,
    FAILURES_TO_OPEN,
    LONGEST_EJECTION_S,
    STEPS_OF_WINDOW,
    Breaker,
    EngineHealth,
    Router,
)
from modelwright.serve.errors import ApiError


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def health_of(count: int, clock: FakeClock) -> tuple[EngineHealth, list[tuple[int, str]]]:
    """The health of some engines, and the list to which their ejections are added."""
    ejections: list[tuple[int, str]] = []
    return EngineHealth(range(count), lambda number, reason: ejections.append((number, reason)), clock), ejections


def run_steps(health: EngineHealth, clock: FakeClock, seconds: dict[int, float], windows: int = 1) -> None:
    """Let engines compute at the same time, each with steps of so many seconds, until all have so many whole windows
    more. A full step took 0.02 s at the start.
    """
    began = clock.now
    until = began + windows * STEPS_OF_WINDOW * max(seconds.values()) * 1.001
    ends = sorted(
        (began + step_s * count, number)
        for number, step_s in seconds.items()
        for count in range(1, int((until - began) / step_s) + 1)
    )
    for end, number in ends:
        clock.now = end
        health.stepped(number, seconds[number], 0.02)
    clock.now = until


def test_a_breaker_opens_tries_one_and_closes(clock: FakeClock) -> None:
    breaker = Breaker(clock)
    for _ in range(3):
        assert [breaker.fail() for _ in range(FAILURES_TO_OPEN - 1)] == [False] * (FAILURES_TO_OPEN - 1)
        breaker.succeed()
    assert [breaker.fail() for _ in range(FAILURES_TO_OPEN)][-1]
    breaker.open()
    breaker.succeed()
    assert breaker.state == "open", "an answer from before proves nothing"
    clock.now += EJECTION_S - 1
    assert breaker.state == "open"
    clock.now += 1
    assert breaker.state == "half_open"
    assert breaker.fail(), "one failure is enough while it is tried"
    breaker.open()
    clock.now += 2 * EJECTION_S - 1
    assert breaker.state == "open", "longer the second time"
    clock.now += 1
    breaker.succeed()
    assert breaker.state == "closed"
    for _ in range(20):
        breaker.open()
    clock.now += LONGEST_EJECTION_S
    assert breaker.state == "half_open", "never longer than that"
    breaker.succeed()
    clock.now += LONGEST_EJECTION_S + 1
    breaker.open()
    clock.now += EJECTION_S
    assert breaker.state == "half_open", "a good time lets the earlier ejections be forgotten"


def test_a_failing_engine_gets_no_answers_and_comes_back(clock: FakeClock) -> None:
    health, ejections = health_of(4, clock)
    router = Router(health, 16)

    def chosen(loads: dict[int, int]) -> set[int]:
        return {router.choose(loads, GenerationJob([number], SamplingParams())) for number in range(200)}

    for _ in range(FAILURES_TO_OPEN):
        health.answered(2, is_good=False)
    assert ejections == [(2, "failures")]
    assert chosen(dict.fromkeys(range(4), 0)) == {0, 1, 3}
    clock.now += EJECTION_S
    assert health.state(2) == "half_open"
    busy = dict.fromkeys(range(4), 500)
    assert chosen(busy) == {0, 1, 3}, "one request at a time"
    assert 2 in chosen(busy | {2: 0})
    health.answered(2, is_good=True)
    assert chosen(busy) == {0, 1, 2, 3}


def test_at_most_half_are_left_out_and_doubtful_ones_are_better_than_none(clock: FakeClock) -> None:
    health, ejections = health_of(4, clock)
    for number in range(4):
        for _ in range(3 * FAILURES_TO_OPEN):
            health.answered(number, is_good=False)
    assert ejections == [(0, "failures"), (1, "failures")]
    assert health.candidates(dict.fromkeys(range(4), 7)) == [2, 3]
    assert health.candidates({0: 7, 1: 7}) == [0, 1], "no other engine runs"
    alone, ejections = health_of(1, clock)
    for _ in range(3 * FAILURES_TO_OPEN):
        alone.answered(0, is_good=False)
    assert (ejections, alone.candidates({0: 3})) == ([], [0])


def test_an_engine_that_was_lost_is_tried_first(clock: FakeClock) -> None:
    health, ejections = health_of(2, clock)
    for _ in range(STEPS_OF_WINDOW - 1):
        health.stepped(0, 0.5, 0.02)
    health.lost(0)
    assert health.state(0) == "half_open"
    assert (health.candidates({0: 0, 1: 9}), health.candidates({0: 5, 1: 9})) == ([0, 1], [1])
    health.answered(0, is_good=True)
    run_steps(health, clock, {0: 0.001, 1: 0.001}, windows=3)
    assert (health.state(0), ejections) == ("closed", []), "the steps of the lost process do not count"


def test_only_an_engine_that_is_slower_than_the_others_is_ejected(clock: FakeClock) -> None:
    health, ejections = health_of(3, clock)
    run_steps(health, clock, {0: 0.002, 1: 0.002, 2: 0.05})
    assert not ejections, "full steps are no sign, though others only decode"
    run_steps(health, clock, {0: 0.2, 1: 0.2, 2: 0.25}, windows=3)
    assert not ejections, "the whole machine is slow"
    run_steps(health, clock, {0: 0.002, 1: 0.002, 2: 0.002})
    for number in range(3 * STEPS_OF_WINDOW):
        health.stepped(2, 3.0 if number % 5 == 0 else 0.002, 0.02)
        run_steps(health, clock, {0: 0.002, 1: 0.002}, windows=2)
    assert not ejections, "less than half of the steps are slow"
    run_steps(health, clock, {0: 0.002, 1: 0.002, 2: 0.07})
    assert ejections == [(2, "slow")]
    run_steps(health, clock, {0: 0.002, 1: 0.002, 2: 0.07})
    assert ejections == [(2, "slow")], "it finishes its answers while it gets no new ones"
    clock.now += EJECTION_S
    run_steps(health, clock, {0: 0.002, 1: 0.002, 2: 0.07}, windows=2)
    assert ejections == [(2, "slow")] * 2, "it is slow with the answer that it is tried with"
    clock.now += EJECTION_S
    assert health.state(2) == "open", "twice as long"


def test_idle_engines_are_no_measure(clock: FakeClock) -> None:
    health, ejections = health_of(2, clock)
    run_steps(health, clock, {0: 0.002, 1: 0.002}, windows=3)
    run_steps(health, clock, {1: 0.5}, windows=3)
    assert not ejections


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

    def engine_ejected(self, reason: str) -> None:
        self.counts[f"ejected: {reason}"] += 1

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


def play(connection: socket.socket, script: Script, asked: list[str], step_s: float) -> None:
    """The engine's side of a connection, until the gateway closes it. step_s: what it says that a step takes."""
    channel = BlockingChannel(connection)
    stats = asdict(NO_LOAD)
    try:
        while True:
            for message in channel.receive(0.2):
                for request_id in message.get("add", {}):
                    asked.append(request_id)
                    for output in script(request_id):
                        plain = [output_message(output)]
                        channel.send(
                            {"outputs": plain, "stats": stats, "refused": {}, "adapters": [], "step_s": step_s}
                        )
            channel.send({"outputs": [], "stats": stats, "refused": {}, "adapters": [], "step_s": 0.0})
    except (EOFError, OSError):
        connection.close()


@contextmanager
def scripted_pool(
    scripts: list[Script], clock: FakeClock, *, steps_s: Sequence[float] = (0.001, 0.001)
) -> Iterator[tuple[EnginePool, list[list[str]]]]:
    """A pool over scripted engines, and the ids of the answers that each was asked for. steps_s: see `play`."""
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
    for script, ids, step_s in zip(scripts, asked, steps_s, strict=True):
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(["sleep", "600"])
        handles.append(EngineHandle(process, ours, report, 0.01))
        threads.append(threading.Thread(target=play, args=(theirs, script, ids, step_s)))
        threads[-1].start()
    pool = EnginePool(setup, handles)
    pool._health = EngineHealth(range(len(scripts)), pool._note_ejection, clock)
    pool._router = Router(pool._health, 16)
    try:
        yield pool, asked
    finally:
        for handle in handles:
            handle.process.kill()
            handle.end()
        for thread in threads:
            thread.join()


def run_requests(pool: EnginePool, events: Events, count: int, *, between: Callable[[int], object] = bool) -> None:
    """Requests one after the other through a started pool. between: called before each."""

    async def run() -> None:
        pool.start(events)
        while sum(slot.link is not None for slot in pool._slots) < len(pool._slots):
            await asyncio.sleep(0.01)
        for number in range(count):
            between(number)
            pool.add({f"{number}.0": GenerationJob([1, 2, number], SamplingParams(max_tokens=2))})
            async with asyncio.timeout(30):
                while not any(one.finished for one in events.outputs.get(f"{number}.0", [])):
                    await asyncio.sleep(0.002)
        for task in pool._tasks:
            task.cancel()
        await asyncio.gather(*pool._tasks, return_exceptions=True)

    asyncio.run(run())


def test_an_answer_that_an_engine_cannot_begin_is_tried_on_another(clock: FakeClock) -> None:
    events = Events()
    with scripted_pool([broken, good], clock) as (pool, asked):
        pool._budget._balance = 50

        def wait_for_trial(number: int) -> None:
            if number == 40:
                assert len(asked[0]) == FAILURES_TO_OPEN
                clock.now += EJECTION_S

        run_requests(pool, events, 60, between=wait_for_trial)
        assert all([one.token_id for one in outputs] == [5, 6] for outputs in events.outputs.values())
        assert len(events.outputs) == 60
        assert len(asked[0]) == FAILURES_TO_OPEN + 1, "five failures, and one when it was tried again"
        assert set(asked[0]) <= set(asked[1])
        assert events.counts == {"ejected: failures": 2, "moved: retried": FAILURES_TO_OPEN + 1}


def test_a_pool_ejects_an_engine_whose_steps_are_slow(clock: FakeClock) -> None:
    """A full step took 0.01 s at the start. The engines answer in turn, two steps to an answer."""
    events = Events()
    with scripted_pool([good, good], clock, steps_s=(0.001, 0.05)) as (pool, asked):
        run_requests(pool, events, 200)
        assert events.counts == {"ejected: slow": 1}
        assert pool._health.state(1) == "open"
        assert len(asked[1]) < 2 * STEPS_OF_WINDOW
        assert asked[0][-50:] == [f"{number}.0" for number in range(150, 200)]


def test_retries_stay_within_the_budget_and_before_the_first_token(clock: FakeClock) -> None:
    """Two broken engines, so that every retry fails, too."""
    events = Events()
    with scripted_pool([broken, broken], clock) as (pool, asked):
        run_requests(pool, events, 40)
        reasons = [[one.finish_reason for one in outputs] for outputs in events.outputs.values()]
        assert reasons == [["error"]] * 40, "the client gets the error once"
        assert events.counts["moved: retried"] == sum(map(len, asked)) - 40
        assert events.counts["moved: retried"] in (4, 5), "one at first, and a tenth of 40"
    events = Events()
    with scripted_pool([cut, cut], clock) as (pool, asked):
        run_requests(pool, events, 5)
        assert sum(map(len, asked)) == 5, "the client has seen a token"
        assert not events.counts["moved: retried"]


def test_ties_and_two_choices_hold_among_the_healthy(clock: FakeClock) -> None:
    health, _ = health_of(6, clock)
    for _ in range(FAILURES_TO_OPEN):
        health.answered(0, is_good=False)
        health.answered(4, is_good=False)
    router, draw = Router(health, 16), random.Random(5)
    loads: Counter[int] = Counter(dict.fromkeys(range(6), 0))
    for number in itertools.count():
        job = GenerationJob([number], SamplingParams(max_tokens=1))
        loads[router.choose(loads, job)] += draw.randrange(1, 3)
        if number == 4000:
            break
    assert loads[0] == loads[4] == 0
    busy = [loads[number] for number in (1, 2, 3, 5)]
    assert max(busy) - min(busy) < 10
    prompt = list(range(40))
    even = dict.fromkeys(range(6), 100)
    homes = Counter(router.choose(even, GenerationJob(prompt, SamplingParams())) for _ in range(300))
    assert homes.most_common(1)[0][1] > 120, "of two drawn engines the prompt's favorite, half of the draws have it"
