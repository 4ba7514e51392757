"""Whether a server that runs for long under load grows.

    python benchmarks/soak.py [--minutes 10] [--engines 1] [--clients 4]

The real server runs in processes of its own on the loopback interface, with a small random model; clients in a process
beside it send what servers meet: whole answers and streams, several answers at once, scored prompts, embeddings, bodies
that are refused, clients that leave in the middle of an answer, and connections that send nothing. Resident memory
and open file descriptors of the server and its engines are sampled every few seconds while no connection is opened on
purpose. Growth is the slope of a line by least squares through the samples after the first fifth of the time, in which
caches and pools fill.

Exits with 1 if memory grows by 1 MB per minute or more, if there are more descriptors at the end than after the first
fifth, or if any request gets another status than it should. Runs under 5 minutes prove nothing about the slope.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from modelwright.infer.engine import EngineConfig
from modelwright.pipeline.stages.serve import start_server
from modelwright.serve.config import ServeConfig
from noisy_neighbor import ROUTE, connect, write_model

MODEL = "small"
MOST_GROWTH_MB = 1.0
"""Per minute."""
SLACK_DESCRIPTORS = 4
"""Connections that are being closed while samples are taken."""
WARM_UP_SHARE = 0.2
SAMPLE_PERIOD_S = 3.0
CONTEXT = 512


@dataclass(frozen=True)
class Sample:
    """What the server and all processes that it has started use. at: seconds since the beginning."""

    at: float
    resident_bytes: int
    num_descriptors: int


def descendants(pid: int) -> list[int]:
    """A process and all that come from it."""
    pids = [pid]
    for parent in pids:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                pids += [int(word) for word in task.read_text().split()]
    return pids


def sample(pid: int, at: float) -> Sample:
    page = os.sysconf("SC_PAGE_SIZE")
    resident = descriptors = 0
    for one in descendants(pid):
        try:
            resident += page * int(Path(f"/proc/{one}/statm").read_text().split()[1])
            descriptors += len(os.listdir(f"/proc/{one}/fd"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return Sample(at, resident, descriptors)


def slope(points: list[tuple[float, float]]) -> float:
    """The slope of a line through the points, by least squares."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def post(url: str, body: bytes, route: str = ROUTE) -> int:
    """The status of an answer, which is read to its end."""
    connection = connect(url)
    try:
        connection.request("POST", route, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


def leave_early(url: str, number: int) -> int:
    """Read the first event of a stream and close the connection."""
    body = json.dumps(completion(number, max_tokens=300, stream=True)).encode()
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=120) as connection:
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return int(connection.recv(65_536).split()[1])


def say_nothing(url: str, number: int) -> int:
    """Open a connection and close it again."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=120):
        time.sleep(0.05)
    return 0


def completion(number: int, **fields: Any) -> dict[str, Any]:
    prompt = f"def function_{number}(" if number % 2 else "import json\n" + "x = json.dumps(x)\n" * 5 + f"# {number}\n"
    return {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0.7, "seed": number} | fields


def asks(route: str, **fields: Any) -> Callable[[str, int], int]:
    def ask(url: str, number: int) -> int:
        return post(url, json.dumps(completion(number, **fields)).encode(), route)

    return ask


def embed(url: str, number: int) -> int:
    return post(url, json.dumps({"model": MODEL, "input": ["some text", f"text {number}"]}).encode(), "/v1/embeddings")


KINDS: dict[str, tuple[int, Callable[[str, int], int]]] = {
    "whole answers": (200, asks(ROUTE)),
    "streams": (200, asks(ROUTE, stream=True, logprobs=3)),
    "four answers": (200, asks(ROUTE, n=4)),
    "scored prompts": (200, asks(ROUTE, echo=True, logprobs=1, max_tokens=1)),
    "embeddings": (200, embed),
    "unknown fields": (400, asks(ROUTE, no_such_field=1)),
    "broken bodies": (400, lambda url, number: post(url, b'{"model": ')),
    "unknown routes": (404, lambda url, number: post(url, b"{}", f"/v1/nothing/{number}")),
    "left early": (200, leave_early),
    "silent": (0, say_nothing),
}
"""What clients send, each with the status that it should get."""


def send_load(url: str, num_clients: int, begun: Event, stop: Event, results: Any) -> None:
    """Clients that send one request after the other, of all kinds in turn; puts the numbers of answers by kind and
    status.
    """
    counts: Counter[tuple[str, int]] = Counter()
    numbers = itertools.count()

    def run(kinds: Iterator[str]) -> None:
        while not stop.is_set():
            kind = next(kinds)
            try:
                status = KINDS[kind][1](url, next(numbers))
            except (OSError, ValueError, IndexError):
                status = -1
            counts[kind, status] += 1
            begun.set()

    names = list(KINDS)
    order = [itertools.cycle([*names[at % len(names) :], *names[: at % len(names)]]) for at in range(num_clients)]
    threads = [threading.Thread(target=run, args=(kinds,)) for kinds in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(counts)


def soak(url: str, pid: int, seconds: float, num_clients: int) -> tuple[list[Sample], Counter[tuple[str, int]]]:
    spawn = multiprocessing.get_context("spawn")
    begun, stop, results = spawn.Event(), spawn.Event(), spawn.Queue()
    load = spawn.Process(target=send_load, args=(url, num_clients, begun, stop, results), daemon=True)
    load.start()
    begun.wait(120)
    began, samples = time.monotonic(), list[Sample]()
    while (at := time.monotonic() - began) < seconds:
        samples.append(sample(pid, at))
        print(f"\r{at:6.0f} of {seconds:.0f} s  {samples[-1].resident_bytes / 1e6:8.1f} MB  "
              f"{samples[-1].num_descriptors:4} descriptors", end="", file=sys.stderr, flush=True)  # fmt: skip
        time.sleep(SAMPLE_PERIOD_S)
    print(file=sys.stderr)
    stop.set()
    counts = results.get(timeout=120)
    load.join()
    return samples, counts


def report(samples: list[Sample], counts: Counter[tuple[str, int]], idle: tuple[int, int]) -> list[str]:
    """Print the figures; returns what is wrong. idle: descriptors without clients, before and after the load."""
    later = [one for one in samples if one.at >= WARM_UP_SHARE * samples[-1].at]
    growth = 60 * slope([(one.at, one.resident_bytes / 1e6) for one in later])
    for (kind, status), count in sorted(counts.items()):
        print(f"{kind:<16} {status:>4}  {count:>7}")
    resident = [one.resident_bytes / 1e6 for one in later]
    print(f"resident memory {resident[0]:.1f} to {resident[-1]:.1f} MB, slope {growth:+.3f} MB per minute")
    print(f"descriptors under load {min(one.num_descriptors for one in later)} to "
          f"{max(one.num_descriptors for one in later)}; idle {idle[0]} before and {idle[1]} after")  # fmt: skip
    wrong = [f"{count} x {kind}: {status}" for (kind, status), count in counts.items() if status != KINDS[kind][0]]
    wrong += [f"memory grows by {growth:.2f} MB per minute"] if growth >= MOST_GROWTH_MB else []
    wrong += [f"descriptors: {idle[0]} before, {idle[1]} after"] if idle[1] > idle[0] + SLACK_DESCRIPTORS else []
    return wrong


def settled_descriptors(pid: int) -> int:
    """When no client is there any more."""
    time.sleep(2)
    return sample(pid, 0).num_descriptors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / MODEL, CONTEXT)
        config = ServeConfig(port=0, engines=options.engines, engine=EngineConfig(max_num_seqs=16))
        with start_server(Path(folder) / MODEL, config, Path(folder), 240) as server:
            pid = server.process.pid
            for _, ask in KINDS.values():
                ask(server.url, 0)
            before = settled_descriptors(pid)
            samples, counts = soak(server.url, pid, 60 * options.minutes, options.clients)
            wrong = report(samples, counts, (before, settled_descriptors(pid)))
    print("\n".join(wrong) if wrong else "no growth")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
