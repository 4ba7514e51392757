"""Latency and rate of TCP over loopback, and of gloo over it, between this process and a child process (`peer.py`)."""

import datetime
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np
from torch._C._distributed_c10d import TCPStore

from modelwright.pipeline.estimate.probes import peer
from modelwright.pipeline.estimate.probes.peer import HOST, MESSAGE_BYTES, NUM_WARMUPS, ping, start_gloo
from modelwright.pipeline.estimate.probes.probe import (
    Probe,
    ProbeResult,
    ProbeSetting,
    ProbeUnavailable,
    rate_text,
    time_text,
)

START_S = 20.0
"""Seconds until the second process must be ready: it imports PyTorch in 2 to 5 seconds, more on a busy machine."""
T = TypeVar("T")

MOST_PINGS = 2000
MOST_MESSAGES = 50


def _measure_loopback(setting: ProbeSetting) -> ProbeResult:
    def accepted() -> socket.socket | None:
        with suppress(TimeoutError):
            return server.accept()[0]
        return None

    with socket.create_server((HOST, 0)) as server, _peer("loopback", server.getsockname()[1]) as check:
        server.settimeout(0.05)
        with _wait(accepted, check) as connection:
            connection.settimeout(START_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = _repeat(lambda: ping(connection, b"x"), setting.budget_s / 2, most=MOST_PINGS)
            message = bytes(MESSAGE_BYTES)
            transfers = _repeat(lambda: ping(connection, message), setting.budget_s / 2, most=MOST_MESSAGES)
    return _result([trip / 2 for trip in trips], transfers)


def _measure_gloo(setting: ProbeSetting) -> ProbeResult:
    timeout = datetime.timedelta(seconds=START_S)
    store = TCPStore(HOST, 0, world_size=2, is_master=True, wait_for_workers=False, timeout=timeout)
    with _peer("gloo", store.port) as check:
        _wait(lambda: store.check(["ready"]), check)
        session = start_gloo(store, 0)
        times: list[list[float]] = []
        for tensor, most in ((session.small, MOST_PINGS), (session.large, MOST_MESSAGES)):
            warm = [session.seconds(tensor) for _ in range(NUM_WARMUPS)]
            # Both ranks must reduce equally often, so the number is settled before.
            count = max(3, min(most, int(setting.budget_s / 2 / min(warm))))
            store.set(f"num_{len(times)}", str(count))
            times.append([session.seconds(tensor) for _ in range(count)])
    return _result(*times)


@contextmanager
def _peer(kind: str, port: int) -> Iterator[Callable[[], None]]:
    """Runs a second process for the block. Yields a function that raises `ProbeUnavailable` if it has died."""
    command = [sys.executable, "-P", peer.__file__, kind, str(port)]
    with tempfile.TemporaryFile() as errors:
        # In a new session, so that Ctrl-C reaches this process alone, which then ends the other.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )

        def check() -> None:
            if process.poll() is not None:
                errors.seek(0)
                last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
                raise ProbeUnavailable(f"the second process ended ({' '.join(last) or process.returncode})")

        try:
            yield check
        finally:
            process.kill()
            process.wait()


def _wait(attempt: Callable[[], T | None], check: Callable[[], None]) -> T:
    """Returns the first true result of `attempt`."""
    deadline = time.monotonic() + START_S
    while not (result := attempt()):
        check()
        if time.monotonic() > deadline:
            raise ProbeUnavailable(f"the second process was not ready in {START_S:.0f} s")
        time.sleep(0.02)
    return result


def _repeat(call: Callable[[], object], budget_s: float, *, most: int) -> list[float]:
    call()  # untimed: TCP windows and buffers are still small
    times, deadline = list[float](), time.perf_counter() + budget_s
    while not times or (len(times) < most and time.perf_counter() < deadline):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _result(latencies: Sequence[float], transfers: Sequence[float]) -> ProbeResult:
    figures = {
        "latency_s": float(np.median(latencies)),
        "latency_p95_s": float(np.percentile(latencies, 95)),
        "bytes_per_s": MESSAGE_BYTES / float(np.median(transfers)),
    }
    return ProbeResult(state="measured", figures=figures)


def _text(result: ProbeResult, what: str) -> str:
    return (
        f"{time_text(result, 'latency_s')} {what} (p95 {time_text(result, 'latency_p95_s')}), "
        f"{rate_text(result, 'bytes_per_s')}, two processes here"
    )


LOOPBACK = Probe(
    name="loopback", budget_s=1.0, measure=_measure_loopback, text=lambda result: _text(result, "one way over TCP")
)
GLOO = Probe(
    name="gloo", budget_s=1.5, measure=_measure_gloo, text=lambda result: _text(result, "an all-reduce of one number")
)
