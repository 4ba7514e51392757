"""Whether one client's large, deep or slow request bodies hold up another client's stream.

    python benchmarks/noisy_neighbor.py [--contexts 512 32768] [--tokens 400] [--tries 5] [--quick]

The real server runs in a process of its own on the loopback interface, with a small random model. This process reads a
stream and times its tokens; a third process sends one body after the other, each as soon as the last was answered.
Ratio: 99th percentile of the time between two tokens with the neighbor, over that of the stream before it without.
Median over the tries. Target: below 2 for every body. Exits with 1 when one misses it.

Bodies come in two sizes: 4 MB, and the largest that the server reads for a model of this context, which is smaller for
a chat. A message of 100,000 parts has 2.7 MB. Slow bodies arrive on many connections, some bytes at a time.
"""

import argparse
import functools
import http.client
import itertools
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from modelwright.data.tokenizer.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from modelwright.infer.engine import EngineConfig
from modelwright.model.decoder import Decoder, ModelConfig
from modelwright.pipeline.stages.init import save_model_folder
from modelwright.pipeline.stages.serve import start_server
from modelwright.serve.config import ServeConfig
from modelwright.serve.limits import Limits

BOUND = 2.0
LARGE = 4_000_000
ROUTE, CHAT_ROUTE = "/v1/completions", "/v1/chat/completions"
PARTS, SLOW = "parts", "slow"
NUM_PARTS = 100_000
SLOW_CONNECTIONS, SLOW_BYTES, SLOW_PAUSE_S = 64, 100, 0.02
"""A slow client sends some bytes on each of its connections, one after the other, and pauses between two rounds."""


def filled(size: int, before: str, unit: str, after: str) -> bytes:
    """`before`, then `unit` as often as it fits into `size` bytes, then `after`."""
    count = (size - len(before) - len(after)) // len(unit)
    return (before + unit * count + after).encode()


def unknown_fields(size: int, model: str) -> bytes:
    fields = (f'"f{number:06d}":1,' for number in range((size - 100) // 13))
    return (f'{{"model":"{model}",' + "".join(fields) + '"prompt":"a"}').encode()


def deep(size: int, model: str) -> bytes:
    before, after = f'{{"model":"{model}","prompt":', "}"
    depth = (size - len(before) - len(after)) // 2
    return (before + "[" * depth + "]" * depth + after).encode()


def deep_schema(size: int, model: str) -> bytes:
    before = f'{{"model":"{model}","prompt":"a","structured_outputs":{{"json":'
    depth = (size - len(before) - 4) // 8
    return (before + '{"not":' * depth + "{}" + "}" * depth + "}}").encode()


def id_prompts(size: int, model: str) -> bytes:
    """As many prompts as a request may have, each of them within the context, of ids that no model has: refused only
    after everything was parsed.
    """
    num_prompts = ServeConfig().max_completions
    prompt = f"[{','.join(['999999'] * ((size - 100) // num_prompts // 7))}]"
    return f'{{"model":"{model}","prompt":[{",".join([prompt] * num_prompts)}]}}'.encode()


def parts(size: int, model: str) -> bytes:
    part, count = '{"type":"text","text":"a"}', min(NUM_PARTS, (size - 200) // 27)
    content = ",".join([part] * count)
    return f'{{"model":"{model}","messages":[{{"role":"user","content":[{content}]}}]}}'.encode()


BODIES: dict[str, Callable[[int, str], bytes]] = {
    "blanks": lambda size, model: filled(size, f'{{"model":"{model}","prompt":"', " ", '"}'),
    "prompts": lambda size, model: filled(size, f'{{"model":"{model}","prompt":["a"', ',"a"', "]}"),
    "newlines": lambda size, model: filled(size, f'{{"model":"{model}","prompt":"', "\\n", '"}'),
    "unknown fields": unknown_fields,
    "token ids": lambda size, model: filled(size, f'{{"model":"{model}","prompt":[1', ",1", "]}"),
    "id prompts": id_prompts,
    "deep": deep,
    "deep schema": deep_schema,
    PARTS: parts,
    SLOW: lambda size, model: filled(size, f'{{"model":"{model}","prompt":"', "a", '"}'),
}


def write_model(folder: Path, context: int) -> None:
    """A small random model that generates printable ASCII until its limit."""
    texts = [path.read_text(encoding="utf-8") for path in Path(json.__file__).parent.glob("*.py")]
    tokenizer = train_tokenizer(texts, TokenizerConfig(vocab_size=2048))
    model = Decoder(
        ModelConfig(
            vocab_size=2048, num_layers=4, model_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=384,
            max_seq_len=context, init_std=0.1, tie_embeddings=False,
        )
    )  # fmt: skip
    model.init_weights(1)
    assert model.head is not None
    hidden = [i for i in range(2048) if not is_plain(tokenizer, i)]
    model.head.weight.data[hidden] = 0
    save_model_folder(model, tokenizer, folder)


def is_plain(tokenizer: Tokenizer, token: int) -> bool:
    if token >= tokenizer.vocab_size:
        return False
    text = tokenizer.token_text(token)
    return text.isascii() and text.isprintable() and not text.startswith("<|")


def connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)


def stream_gaps(url: str, model: str, num_tokens: int) -> list[float]:
    """Seconds between the tokens of one stream, as its client sees them."""
    body = {"model": model, "prompt": "def dumps(", "max_tokens": num_tokens, "temperature": 0, "stream": True}
    connection = connect(url)
    connection.request("POST", ROUTE, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    times = []
    while line := response.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    connection.close()
    if response.status != 200 or len(times) < num_tokens // 2:
        raise RuntimeError(f"the stream ended with status {response.status} after {len(times)} events")
    return [after - before for before, after in pairwise(times)]


def send_bodies(url: str, route: str, body: bytes, begun: Event, stop: Event, answers: Any) -> None:
    """The noisy client: the same body again and again until told to stop; puts the number of answers by status."""
    statuses: Counter[int] = Counter()
    connection = connect(url)
    while not stop.is_set():
        try:
            connection.request("POST", route, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            statuses[response.status] += 1
        except (OSError, http.client.HTTPException):
            statuses[0] += 1
            connection.close()
            connection = connect(url)
        begun.set()
    answers.put(statuses)


def send_slowly(url: str, body: bytes, begun: Event, stop: Event, answers: Any) -> None:
    """The same from a client that never sends a body to its end before it is told to stop."""
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 80)
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    connections = dict[int, tuple[socket.socket, int]]()
    num_closed = 0
    while not stop.is_set():
        for number in range(SLOW_CONNECTIONS):
            try:
                if number not in connections:
                    connections[number] = (socket.create_connection(address, timeout=120), 0)
                    connections[number][0].sendall(head)
                connection, sent = connections[number]
                if sent >= len(body) - SLOW_BYTES:
                    connections.pop(number)
                    connection.close()
                    continue
                connection.sendall(body[sent : sent + SLOW_BYTES])
                connections[number] = (connection, sent + SLOW_BYTES)
            except OSError:
                num_closed += 1
                if number in connections:  # it was not refused from the start
                    connections.pop(number)[0].close()
        begun.set()
        time.sleep(SLOW_PAUSE_S)
    for connection, _ in connections.values():
        connection.close()
    answers.put(Counter({0: num_closed}))


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class Trial:
    """One stream alone and one with the neighbor: 99th percentiles and the longest gap in seconds, and answers."""

    quiet_s: float
    noisy_s: float
    longest_s: float
    statuses: Counter[int]

    @property
    def ratio(self) -> float:
        return self.noisy_s / self.quiet_s


def trial(url: str, model: str, name: str, body: bytes, num_tokens: int) -> Trial:
    """name: of the body in `BODIES`."""
    quiet = stream_gaps(url, model, num_tokens)
    spawn = multiprocessing.get_context("spawn")
    begun, stop, answers = spawn.Event(), spawn.Event(), spawn.Queue()
    send: Callable[..., None] = send_slowly
    if name != SLOW:
        send = functools.partial(send_bodies, route=CHAT_ROUTE if name == PARTS else ROUTE)
    arguments = {"url": url, "body": body, "begun": begun, "stop": stop, "answers": answers}
    neighbor = spawn.Process(target=send, kwargs=arguments, daemon=True)
    neighbor.start()
    if not begun.wait(120):
        raise RuntimeError("the neighbor has sent nothing")
    noisy = stream_gaps(url, model, num_tokens)
    stop.set()
    statuses = answers.get(timeout=120)
    neighbor.join()
    if name != SLOW and not statuses - Counter({0: statuses[0]}):
        raise RuntimeError("the neighbor had no answer")
    return Trial(percentile(quiet, 0.99), percentile(noisy, 0.99), max(noisy), statuses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 32_768], help="of the models, in tokens")
    parser.add_argument("--tokens", type=int, default=400, help="per stream; less than the contexts")
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one try of each")
    parser.add_argument("--only", nargs="+", choices=list(BODIES), default=list(BODIES))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    tries = 1 if options.quick else options.tries
    missed = [one for context in options.contexts for one in measure(context, options.only, options.tokens, tries)]
    print(f"missed the bound of {BOUND:g}: {', '.join(missed)}" if missed else f"every ratio is below {BOUND:g}")
    return 1 if missed else 0


def measure(context: int, names: Sequence[str], num_tokens: int, tries: int) -> list[str]:
    """Bodies of both sizes on a server with a model of this context; returns those that miss the bound."""
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "small", context)
        config = ServeConfig(port=0, engine=EngineConfig(kv_cache_tokens=max(16_384, context)))
        limits = Limits(context=context, max_choices=config.max_completions, max_token_bytes=0, max_body_bytes=LARGE)
        with start_server(Path(folder) / "small", config, Path(folder), 120) as server:
            stream_gaps(server.url, "small", num_tokens)
            print(f"context {context:,}")
            print(f"{'body':<16} {'bytes':>9} {'quiet p99':>10} {'noisy p99':>10} {'longest':>9} {'ratio':>6}  answers")
            for is_large, name in itertools.product((True, False), names):
                num_prompts = 1 if name == PARTS else config.max_completions
                size = LARGE if is_large else limits.body_bytes(num_prompts)
                body = BODIES[name](size, "small")
                trials = [trial(server.url, "small", name, body, num_tokens) for _ in range(tries)]
                ratio = statistics.median(t.ratio for t in trials)
                show(name, body, trials, ratio)
                missed += [f"{name} ({len(body)} bytes, context {context})"] if ratio >= BOUND else []
    return missed


def show(name: str, body: bytes, trials: list[Trial], ratio: float) -> None:
    quiet, noisy = (1e3 * statistics.median(getattr(t, field) for t in trials) for field in ("quiet_s", "noisy_s"))
    longest = 1e3 * max(t.longest_s for t in trials)
    statuses: Counter[int] = sum((t.statuses for t in trials), Counter())
    shown = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    print(f"{name:<16} {len(body):>9,} {quiet:>7.2f} ms {noisy:>7.2f} ms {longest:>6.0f} ms {ratio:>6.2f}  {shown}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
