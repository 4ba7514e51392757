"""Load on an HTTP server by an open loop: requests are sent at times that were drawn before, whatever the answers do.

`python -m modelwright_claims.open_loop` reads a `Load` as JSON and writes a `LoadResult`, so that the load comes from
a separate process. Latencies count from the time at which a request was to be sent, so a server that falls behind, or
this process, cannot hide it ("coordinated omission"). The client speaks just enough HTTP/1.1 to cost a small part of
the cores that it shares with the server.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from urllib.parse import urlsplit

P99 = 0.99
LOST = "lost"
"""The status of a request whose connection broke, or that had no answer in time."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests to one server."""

    url: str
    """Address of the route that requests go to."""
    bodies: Sequence[str]
    """JSON, sent in turn."""
    rate: float
    """Requests per second on average; 0 for a closed loop, in which each connection sends the next request when it has
    its answer."""
    num_requests: int
    seed: int = 0
    bound_s: float = math.inf
    """A request misses it with a longer latency, or with another status than 200."""
    most_missing: int = -1
    """Stop when more requests than this have missed the bound: the outcome is known then. -1: never."""
    num_connections: int = 0
    """Connections of a closed loop; 0 for an open one."""
    timeout_s: float = 15.0


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """The outcome of a load. Times are in seconds; lists are in the order of the requests answered with 200."""

    arrivals: Sequence[float] = ()
    """Scheduled times of the requests."""
    latencies: Sequence[float] = ()
    misses: Sequence[float] = ()
    """Arrivals of those that missed the bound."""
    statuses: dict[str, int] = field(default_factory=dict)
    elapsed_s: float = 0.0
    lag_s: float = 0.0
    """99th percentile of how late this process was in sending."""
    was_stopped: bool = False

    @property
    def p99_s(self) -> float:
        return percentile(self.latencies, P99)

    @property
    def answers_per_s(self) -> float:
        return len(self.latencies) / self.elapsed_s


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share does not exceed; infinity for none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.inf


def most_missing(num_requests: int) -> int:
    """Return how many requests may miss a bound that the 99th percentile keeps."""
    return num_requests - math.ceil(P99 * num_requests)


def arrival_times(load: Load) -> list[float]:
    """Draw the times of a Poisson process."""
    draw = random.Random(load.seed)
    return list(accumulate(draw.expovariate(load.rate) for _ in range(load.num_requests)))


class Connections:
    """Connections to one server that are used again."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, body: str) -> int:
        """Return the status once the whole answer has arrived. Raises `OSError` and `EOFError`."""
        reader, writer = self._take_free() or await asyncio.open_connection(self._host, self._port)
        is_reusable = False
        try:
            data = body.encode()
            writer.write(f"{self._head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await _read_body(reader, head)
            is_reusable = b"connection: close" not in head
            return int(head[9:12])
        finally:
            if is_reusable:
                self._free.append((reader, writer))
            else:
                writer.close()

    def _take_free(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A free connection that the server has not closed: uvicorn closes those that are idle for 5 s, which would
        count as lost requests of the slower servers.
        """
        while self._free:
            reader, writer = self._free.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            writer.close()
        return None

    async def close(self) -> None:
        """Close those that are free."""
        for _, writer in self._free:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> None:
    if b"transfer-encoding: chunked" in head:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    else:
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))


class _Run:
    """A single load in progress."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.connections = Connections(load.url)
        self.answered: dict[int, tuple[float, float]] = {}
        self.misses: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.lags: list[float] = []
        self.is_decided = asyncio.Event()
        self.began = time.perf_counter()

    async def send(self, number: int, at: float) -> None:
        """A single request; at: its time since the beginning."""
        load, due = self.load, self.began + at
        self.lags.append(time.perf_counter() - due)
        try:
            async with asyncio.timeout(load.timeout_s):
                status = await self.connections.post(load.bodies[number % len(load.bodies)])
        except (OSError, EOFError, ValueError):  # TimeoutError is an OSError
            self.statuses[LOST] += 1
            self._miss(at)
            return
        latency = time.perf_counter() - due
        self.statuses[str(status)] += 1
        if status == 200:
            self.answered[number] = (at, latency)
        if status != 200 or latency > load.bound_s:
            self._miss(at)

    def _miss(self, at: float) -> None:
        self.misses.append(at)
        if 0 <= self.load.most_missing < len(self.misses):
            self.is_decided.set()

    async def open_loop(self) -> None:
        async def at_time(number: int, at: float) -> None:
            await asyncio.sleep(self.began + at - time.perf_counter())
            await self.send(number, at)

        tasks = [asyncio.create_task(at_time(number, at)) for number, at in enumerate(arrival_times(self.load))]
        everything, decided = asyncio.gather(*tasks), asyncio.create_task(self.is_decided.wait())
        await asyncio.wait({everything, decided}, return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, decided):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await everything

    async def closed_loop(self) -> None:
        numbers = iter(range(self.load.num_requests))

        async def one_connection() -> None:
            for number in numbers:
                await self.send(number, time.perf_counter() - self.began)

        await asyncio.gather(*(one_connection() for _ in range(self.load.num_connections)))

    def result(self) -> LoadResult:
        answered = [self.answered[number] for number in sorted(self.answered)]
        return LoadResult(
            arrivals=[at for at, _ in answered],
            latencies=[latency for _, latency in answered],
            misses=sorted(self.misses),
            statuses=dict(self.statuses),
            elapsed_s=time.perf_counter() - self.began,
            lag_s=percentile(self.lags, P99),
            was_stopped=self.is_decided.is_set(),
        )


async def run_load(load: Load) -> LoadResult:
    run = _Run(load)
    await (run.open_loop() if load.rate else run.closed_loop())
    await run.connections.close()
    return run.result()


def main() -> None:
    result = asyncio.run(run_load(Load(**json.load(sys.stdin))))
    json.dump(dataclasses.asdict(result), sys.stdout)


if __name__ == "__main__":
    main()
