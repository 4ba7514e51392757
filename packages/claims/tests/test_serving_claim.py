"""The load generator on a server whose times are known, the search for the largest rate, and the verdict."""

import asyncio
import contextlib
import json
import math
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from modelwright_claims import open_loop, serving_qps
from modelwright_claims.claim import Measurement, Verdict
from modelwright_claims.judging import judge
from modelwright_claims.open_loop import LOST, Load, arrival_times, run_load
from modelwright_claims.serving_qps import (
    FP32,
    INT8,
    LLAMA_CPP,
    NAIVE,
    OPENVINO,
    RATE,
    USUAL,
    Files,
    largest_rate,
    recovery_s,
    run_elsewhere,
)

SERVICE_S = 0.02


@contextmanager
def one_at_a_time(most_open: int = 1000) -> Iterator[str]:
    """A server that takes `SERVICE_S` for each request, one after the other, in chunks, and refuses more than so many
    at once with 429. Gives its URL."""
    writers, stop, url = list[asyncio.StreamWriter](), threading.Event(), list[str]()
    ready = threading.Event()
    num_open = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                if body["fail"]:
                    break
                if num_open >= most_open:
                    writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}")
                    continue
                num_open += 1
                async with lock:
                    await asyncio.sleep(SERVICE_S / 2)
                    writer.write(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n')
                    await asyncio.sleep(SERVICE_S / 2)
                    writer.write(b'2\r\n":\r\n0\r\n\r\n')
                num_open -= 1
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)
            for writer in writers:
                writer.close()

    lock = asyncio.Lock()
    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    ready.wait()
    try:
        yield url[0]
    finally:
        stop.set()
        thread.join()


def load_on(url: str, **fields) -> Load:
    return Load(**{"url": url, "bodies": ['{"fail": false}'], "rate": 25.0, "num_requests": 25, **fields})


def test_arrivals_have_the_rate_and_the_spread_that_is_asked_for() -> None:
    times = arrival_times(Load(url="", bodies=[], rate=50, num_requests=20_000, seed=3))
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(1.0, rel=0.05)
    assert times != arrival_times(Load(url="", bodies=[], rate=50, num_requests=20_000, seed=4))


def test_latencies_count_from_the_planned_time() -> None:
    """The server has half the capacity, so the last of 25 requests waits for about 12 others, though each is sent at
    once.
    """
    with one_at_a_time() as url:
        result = run_elsewhere(load_on(url, rate=100.0))
    assert result.statuses == {"200": 25}
    assert all(latency > SERVICE_S for latency in result.latencies)
    assert max(result.latencies) > 8 * SERVICE_S
    assert result.elapsed_s > 25 * SERVICE_S
    assert result.answers_per_s < 1 / SERVICE_S


def test_a_closed_loop_finds_the_capacity() -> None:
    with one_at_a_time() as url:
        result = asyncio.run(run_load(load_on(url, rate=0, num_connections=4, num_requests=40)))
    assert result.statuses == {"200": 40}
    assert result.answers_per_s < 1 / SERVICE_S


def test_refusals_and_broken_connections_miss_the_bound() -> None:
    with one_at_a_time(most_open=1) as url:
        refused = asyncio.run(run_load(load_on(url, rate=400.0)))
        broken = asyncio.run(run_load(load_on(url, bodies=['{"fail": true}'], num_requests=3)))
        late = asyncio.run(run_load(load_on(url, num_requests=1, timeout_s=SERVICE_S / 4)))
    assert refused.statuses["429"] == len(refused.misses) == 25 - refused.statuses["200"] > 0
    assert broken.statuses == {LOST: 3}
    assert late.statuses == {LOST: 1}
    assert late.p99_s == math.inf


def test_a_connection_that_the_server_closed_while_it_was_idle_loses_no_request() -> None:
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def run() -> list[int]:
        async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
            connections = open_loop.Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
            statuses = []
            for _ in range(3):
                statuses.append(await connections.post("{}"))
                await asyncio.sleep(0.05)
            await connections.close()
            return statuses

    assert asyncio.run(run()) == [200] * 3


def test_a_load_ends_when_its_outcome_is_known() -> None:
    with one_at_a_time() as url:
        load = load_on(url, rate=40.0, num_requests=4000, bound_s=SERVICE_S / 4, most_missing=2)
        result = asyncio.run(run_load(load))
    assert result.was_stopped
    assert len(result.misses) == 3
    assert result.elapsed_s < 30


def test_how_many_may_miss_a_99th_percentile() -> None:
    for count, allowed in ((1, 0), (99, 0), (100, 1), (250, 2), (1000, 10)):
        assert open_loop.most_missing(count) == allowed
        values = [1.0] * (count - allowed) + [9.0] * allowed
        assert open_loop.percentile(values, open_loop.P99) == 1.0
        assert open_loop.percentile([*values[1:], 9.0], open_loop.P99) == 9.0


@pytest.mark.parametrize("capacity", [0.5, 7.0, 55.0, 900.0])
def test_the_largest_rate_is_found_whatever_the_guess(capacity: float) -> None:
    tried = list[float]()

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= capacity

    rate = largest_rate(holds, 20.0, 60.0)
    assert capacity / serving_qps.RESOLUTION <= rate <= capacity
    assert len(tried) < 20
    assert largest_rate(lambda rate: False, 20.0, 60.0) == 0


def test_recovery_ends_with_a_second_without_misses() -> None:
    assert recovery_s([]) == 0
    assert recovery_s([0.1, 0.9, 1.4, 5.0]) == 1.4
    assert recovery_s([2.0]) == 0
    assert recovery_s([0.5 * number for number in range(16)]) == 7.5


def judged(int8: float = 80.0, rival: float | None = 70.0, **overload: float) -> Verdict:
    figures = {
        "p99 at the largest rate": 0.14, "p99 of accepted answers": 0.25, "accepted": 900.0,
        "refused with 429": 2000.0, "anything else": 0.0, "seconds until recovery": 1.0,
    } | {name.replace("_", " "): value for name, value in overload.items()}  # fmt: skip
    samples = {
        f"{RATE}{NAIVE}{USUAL}": [10.0, 10.1, 9.9],
        f"{RATE}{INT8}{USUAL}": [int8, 1.01 * int8, 0.99 * int8],
        f"{RATE}{FP32}{USUAL}": [50.0, 51.0, 49.0],
        f"{RATE}{LLAMA_CPP}{USUAL}": [60.0, 61.0, 59.0],
        **{f"overload: {name}": [value, 0.99 * value, 1.01 * value] for name, value in figures.items()},
    } | ({f"{RATE}{OPENVINO}{USUAL}": [rival] * 3} if rival else {})
    return judge(serving_qps.CLAIM, Measurement(samples=samples))


def test_the_verdict_asks_for_the_rate_and_an_orderly_overload() -> None:
    met = judged()
    assert met.kind == "met"
    assert met.figures["times the naive rate, INT8"].value == pytest.approx(8.0, rel=0.01)
    assert set(serving_qps.CLAIM.headline) <= met.figures.keys()
    assert judged(int8=70.0).kind == "short"
    assert "neither 200 nor 429" in judged(anything_else=1.0).reason
    assert judged(p99_of_accepted_answers=0.3).kind == "short"
    assert judged(seconds_until_recovery=6.0).kind == "short"


def test_a_rival_that_bears_more_makes_it_short() -> None:
    assert judged(rival=70.0).kind == "met"
    assert judged(rival=None).kind == "not judged", "a rival that was not measured is none that was beaten"
    beaten = judged(rival=100.0)
    assert beaten.kind == "short"
    assert f"INT8 over the rate of {OPENVINO} 0.8x (lower bound" in beaten.reason
    assert judged(rival=79.8).kind == "short", "level by the mean alone"
    assert beaten.figures[f"times the rate of {OPENVINO}, INT8"].value == pytest.approx(0.8, rel=0.01)


def test_every_side_that_is_installed_is_measured_in_every_round(monkeypatch) -> None:
    measured = list[str]()
    monkeypatch.setattr(serving_qps.Bench, "measure_rate", lambda _, side: measured.append(side))
    overloaded = list[str]()
    monkeypatch.setattr(serving_qps.Bench, "overload", lambda _, side: overloaded.append(side))
    urls: dict[str, str] = dict.fromkeys((NAIVE, INT8, FP32, OPENVINO), "")
    files = Files(model=Path(), int8=Path(), gguf=Path(), prompts=[])
    serving_qps.run_all(serving_qps.Bench(MagicMock(), serving_qps.FULL, files, urls))
    assert {side: measured.count(side) for side in urls} == dict.fromkeys(urls, serving_qps.FULL.rounds)
    assert overloaded == [INT8] * serving_qps.FULL.rounds


def test_one_overload_gives_no_bound() -> None:
    rates = {NAIVE: [10.0, 10.1], INT8: [80.0, 80.1], OPENVINO: [70.0, 70.1], LLAMA_CPP: [60.0, 60.1]}
    samples = {f"{RATE}{side}{USUAL}": values for side, values in rates.items()}
    names = ("p99 at the largest rate", "p99 of accepted answers", "seconds until recovery", "anything else")
    samples |= {f"overload: {name}": [value] for name, value in zip(names, (0.1, 0.15, 1.0, 0.0), strict=True)}
    assert "repeats of overload" in judge(serving_qps.CLAIM, Measurement(samples=samples)).reason


def test_a_missing_overload_is_lacking() -> None:
    samples = {f"{RATE}{side}{USUAL}": [rate, rate] for side, rate in ((NAIVE, 10.0), (INT8, 80.0))}
    assert judge(serving_qps.CLAIM, Measurement(samples=samples)).kind == "not judged"
