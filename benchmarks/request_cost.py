"""CPU time of the server's process per request, with uvloop and httptools and without.

    python benchmarks/request_cost.py [ROUNDS]

The engine has its tokens ready, a step each millisecond, so that what remains is the gateway. Servers run side by side
and are asked in turns, because the time of a request depends on what else the machine does.
"""

import asyncio
import dataclasses
import http.client
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from modelwright.data.tokenizer.tokenizer import TokenizerConfig, train_tokenizer
from modelwright.infer.engine import EngineStats, StepOutput
from modelwright.serve import connections
from modelwright.serve import server as server_module
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.client import EngineEvents, EngineInfo, GenerationJob
from modelwright.serve.load import ServedTokenizer

STACKS = [f"{loop}+{parser}" for loop, parser in itertools.product(("asyncio", "uvloop"), ("h11", "httptools"))]
NUM_CLIENTS, NUM_REQUESTS, NUM_TOKENS = 8, 160, 16
LOAD = EngineStats(**{field.name: 0 for field in dataclasses.fields(EngineStats)})  # type: ignore[arg-type]


class ReadyEngine:
    """An `EngineClient` that computes nothing."""

    info = EngineInfo(
        fingerprint="fp_0", vocab_size=336, max_seq_len=2048, num_parameters=1, max_num_seqs=64, model_dim=8,
        scores=False, adapters={},
    )  # fmt: skip
    unavailable, is_back_soon = "", False

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def start(self, events: EngineEvents) -> None:
        self._events = events

    def check(self, job: GenerationJob) -> None: ...

    def add(self, jobs: Mapping[str, GenerationJob]) -> None:
        if not self._left:
            asyncio.get_running_loop().call_later(0.001, self._step)
        self._left |= {name: job.params.max_tokens for name, job in jobs.items()}

    def abort(self, request_id: str) -> None: ...

    def _step(self) -> None:
        outputs = [StepOutput(name, 100 + n, -1.0, (), "length" if n == 1 else "") for name, n in self._left.items()]
        self._left = {name: n - 1 for name, n in self._left.items() if n > 1}
        if self._left:
            asyncio.get_running_loop().call_later(0.001, self._step)
        self._events.deliver("ready", outputs, LOAD)

    async def stop(self) -> None: ...

    def discard(self) -> None: ...


def serve(stack: str) -> None:
    """Prints the address, then for each line of the input the CPU seconds so far."""
    if "asyncio" in stack:
        server_module.new_event_loop = asyncio.new_event_loop
    if "h11" in stack:
        connections.HttpToolsProtocol = None
    engine = ReadyEngine()
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(["the quick brown fox " * 9], TokenizerConfig(vocab_size=280)).save(Path(folder))
        tokenizer = ServedTokenizer.load(Path(folder))
    with server_module.ServerThread(engine, tokenizer, ServeConfig(port=0), model_name="m") as server:  # type: ignore[arg-type]
        print(server.url, flush=True)
        for _ in sys.stdin:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            print(usage.ru_utime + usage.ru_stime, flush=True)


def ask(url: str, *, stream: bool) -> None:
    """Sends all requests, on connections that are kept."""
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    body = json.dumps({"model": "m", "prompt": "the quick brown fox"} | fields)

    def client() -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        for _ in range(NUM_REQUESTS // NUM_CLIENTS):
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == 200
            assert reply.read().endswith(b"data: [DONE]\n\n" if stream else b"}")
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(num_rounds: int) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    servers = {one: subprocess.Popen([sys.executable, __file__, one], **pipes) for one in STACKS}
    urls = {stack: process.stdout.readline().strip() for stack, process in servers.items()}  # type: ignore[union-attr]
    times: dict[tuple[bool, str], list[float]] = {}
    for number in range(num_rounds + 1):
        for stream, turn in itertools.product((True, False), range(len(STACKS))):
            stack = STACKS[(number + turn) % len(STACKS)]
            seconds = []
            for _ in range(2):
                servers[stack].stdin.write("\n")  # type: ignore[union-attr]
                seconds.append(float(servers[stack].stdout.readline()))  # type: ignore[union-attr]
                if len(seconds) == 1:
                    ask(urls[stack], stream=stream)
            if number:  # the first round warms up
                times.setdefault((stream, stack), []).append((seconds[1] - seconds[0]) / NUM_REQUESTS * 1000)
    for process in servers.values():
        process.communicate()
    for (stream, stack), values in sorted(times.items()):
        ratio = statistics.median(a / b for a, b in zip(values, times[stream, STACKS[0]], strict=True))
        kind = f"stream of {NUM_TOKENS}" if stream else "reply"
        print(f"{kind:<14}{stack:<18}{statistics.median(values):6.2f} ms, {ratio:.2f} of {STACKS[0]}")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in STACKS:
        serve(sys.argv[1])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 8)
