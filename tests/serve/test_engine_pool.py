"""A gateway with engine processes: lost engines lose no answer silently, and what their answers are afterwards."""

import json
import math
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx
import pytest

from modelwright.compress.int8 import Int8WeightsConfig
from modelwright.infer.engine import EngineConfig, StepOutput
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams, ScoredToken
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines import process as engine_process
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.engines.client import EmbeddingJob, GenerationJob, job_of, output_message, output_of
from modelwright.serve.engines.grammars import CompiledGrammar, GrammarSource
from modelwright.serve.engines.pool import EnginePool, RetryBudget, choose_engine, prompt_key
from modelwright.serve.engines.process import BlockingChannel, EngineSetup, LineDecoder, encode, threads_for
from modelwright.serve.load import ModelSource, load_folder
from modelwright.serve.server import ServerThread
from refusals import config_error
from serve.conftest import make_model, write_model
from serve.patience import wait_until
from serve.test_monitoring import samples

MOST_TRIES = 20
"""How often a test tries to take an engine away while it computes, which it does for a few milliseconds an answer."""
ENGINE = EngineConfig(max_num_seqs=8, prefill_chunk_size=16)
TEXT = "the quick brown fox jumps over the lazy dog "
LONG = {"model": "tiny", "max_tokens": 150, "stream": True, "logprobs": 2, "return_token_ids": True}
REQUESTS: list[dict[str, Any]] = [
    LONG | {"prompt": TEXT * 2 + "greedy", "temperature": 0},
    LONG | {"prompt": TEXT * 2 + "seeded", "temperature": 1.1, "seed": 3},
    LONG | {"prompt": "what does this do?", "temperature": 0.8, "seed": 4, "n": 3},
    LONG | {"prompt": "copies", "temperature": 0, "echo": True},
    LONG | {"prompt": "a", "temperature": 0, "frequency_penalty": 0.5, "logit_bias": {"70": 2}},
    LONG | {"prompt": "b", "temperature": 0.9, "seed": 5, "top_k": 20, "stop_token_ids": [71]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", seed=7)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerThread]:
    config = ServeConfig(port=0, engines=2, engine=ENGINE)
    source = ModelSource(name="tiny", folder=folder)
    with ServerThread(*load_engines(source, config), config, model_name="tiny", source=source) as running:
        pool = pool_of(running)
        yield running
    assert all(slot.handle.process.poll() is not None for slot in pool._slots), "a process outlives its server"


def pool_of(server: ServerThread) -> EnginePool:
    pool = server.service.worker.client
    assert isinstance(pool, EnginePool)
    return pool


def read(server: ServerThread, request: dict[str, Any], begun: Callable[[], object]) -> list[Any]:
    """For each answer its text, token ids, log-probabilities and finish reason; the error of a stream that has one.
    begun: called at the first event.
    """
    answers: dict[int, list[Any]] = {}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=120) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            begun()
            begun = lambda: None  # noqa: E731
            if "error" in event:
                return [event["error"]["code"]]
            for choice in event["choices"]:
                answer = answers.setdefault(choice["index"], ["", [], [], None])
                answer[0] += choice["text"]
                answer[1] += choice["token_ids"]
                answer[2] += choice["logprobs"]["token_logprobs"]
                answer[3] = choice["finish_reason"]
    return [answers[index] for index in sorted(answers)]


@contextmanager
def under_load(server: ServerThread, requests: list[dict[str, Any]]) -> Iterator[list[Future[list[Any]]]]:
    """All streams have begun, and both engines compute some of them, in the block."""
    begun = Semaphore(0)
    with ThreadPoolExecutor(len(requests)) as threads:
        streams = [threads.submit(read, server, request, begun.release) for request in requests]
        for _ in requests:
            assert begun.acquire(timeout=60)
        yield streams


def lose(server: ServerThread, number: int, how: signal.Signals) -> list[str]:
    """Take an engine away while it computes answers; returns their ids. Stopped first, it finishes none meanwhile. One
    that has just finished its last answer stays.
    """
    slot = pool_of(server)._slots[number]
    os.kill(slot.handle.process.pid, signal.SIGSTOP)
    time.sleep(0.1)  # for what it has sent before
    answers = list(slot.answers)
    if not answers:
        os.kill(slot.handle.process.pid, signal.SIGCONT)
        return []
    if how != signal.SIGSTOP:
        os.kill(slot.handle.process.pid, how)
    wait_until(lambda: slot.is_lost)
    return answers


def counts(server: ServerThread) -> Counter[str]:
    found = samples(server)
    return Counter({name: int(value) for name, value in found.items() if "engine" in name or "moved" in name})


def test_lost_engines_lose_no_answer(server: ServerThread, folder: Path):
    """One process is killed, another one stopped: all streams continue with the same tokens."""
    expected = [read(server, request, lambda: None) for request in REQUESTS]
    assert len({json.dumps(one) for one in expected}) == len(REQUESTS)
    model, tokenizer = load_folder(folder, Int8WeightsConfig())
    params = SamplingParams(max_tokens=150, temperature=0, stop_ids=tokenizer.stop_ids)
    (alone,) = generate(model, [tokenizer.encode(REQUESTS[0]["prompt"])], [params], ENGINE)
    assert expected[0][0][1] == alone.token_ids
    before = counts(server)
    assert before["modelwright_engines"] == 2
    ways = {"died": (0, signal.SIGKILL), "wedged": (1, signal.SIGSTOP)}
    for reason, (number, how) in ways.items():
        for _ in range(MOST_TRIES):
            with under_load(server, REQUESTS) as streams:
                lost = lose(server, number, how)
            assert [stream.result() for stream in streams] == expected
            if lost:
                break
        assert lost
        wait_until(lambda: counts(server)["modelwright_engines"] == 2)
        change = counts(server)
        change.subtract(before)
        assert change[f'modelwright_engine_failures_total{{reason="{reason}"}}'] == 1
        assert change['modelwright_moved_answers_total{outcome="continued"}'] == len(lost)
        before = counts(server)


def test_a_request_without_an_engine_waits_for_the_next_one(server: ServerThread, caplog):
    pool = pool_of(server)
    wait_until(lambda: all(slot.link for slot in pool._slots))
    request = REQUESTS[0] | {"stream": False}
    expected = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60).json()["choices"]
    for slot in pool._slots:
        os.kill(slot.handle.process.pid, signal.SIGKILL)
    wait_until(lambda: bool(pool.unavailable))
    assert httpx.get(f"{server.url}/readyz", timeout=60).status_code == 503
    reply = httpx.post(f"{server.url}/v1/completions", json=request, timeout=120)
    assert (reply.status_code, reply.json()["choices"]) == (200, expected)
    wait_until(lambda: caplog.text.count("has taken its place") == 2)


def test_without_engines_the_server_is_starting(server: ServerThread, monkeypatch):
    for slot in pool_of(server)._slots:
        monkeypatch.setattr(slot, "is_lost", True)
    monkeypatch.setattr(pool_of(server), "_lost_at", -math.inf)  # for longer than a request would wait
    ready = httpx.get(f"{server.url}/readyz", timeout=60)
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "starting")
    assert httpx.get(f"{server.url}/livez", timeout=60).status_code == 200, "no restart helps"
    refused = httpx.post(f"{server.url}/v1/completions", json=REQUESTS[0] | {"stream": False}, timeout=60)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0


def test_what_cannot_be_repeated_ends_with_an_error(server: ServerThread, folder: Path, monkeypatch, caplog):
    """Engines whose bits depend on the load: answers that a client has seen a part of end with an error. And a process
    is not started again with other weights. Engine 0 may still be left out for being slow."""
    monkeypatch.setattr(pool_of(server), "_is_reproducible", False)
    other = write_model(folder.parent / "other", seed=8)
    before = counts(server)
    os.replace(other / "model.safetensors", folder / "model.safetensors")
    lost, results = list[str](), list[list[Any]]()
    for _ in range(MOST_TRIES):
        with under_load(server, REQUESTS[:4]) as streams:
            lost = lose(server, 1, signal.SIGKILL)
        results = [stream.result() for stream in streams]
        if lost:
            break
    requests = {request_id.partition(".")[0] for request_id in lost}
    assert results.count(["engine_lost"]) == len(requests) > 0
    change = counts(server)
    change.subtract(before)
    assert change['modelwright_moved_answers_total{outcome="lost"}'] >= len(requests)
    reply = httpx.post(f"{server.url}/v1/completions", json=REQUESTS[0] | {"stream": False}, timeout=60)
    assert reply.status_code == 200, "the other engine goes on"
    wait_until(lambda: "the files have changed" in caplog.text)


def test_a_process_that_cannot_start_says_why(tmp_path: Path, monkeypatch):
    setup = EngineSetup(
        folder=str(tmp_path / "absent"), engine=asdict(ENGINE), num_threads=1, heads=("plain",), int8_backend="auto"
    )
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(sys, "argv", ["engine_process", str(theirs.detach())])
    with ours:
        channel = BlockingChannel(ours)
        channel.send(asdict(setup))
        engine_process.main()
        assert "no such model folder" in channel.receive_one(60)["failed"]


def test_the_less_loaded_engine_is_chosen_and_cached_prompts_break_ties():
    draw = random.Random(1)
    key = prompt_key(list(range(40)), "salt", 16)
    assert key == prompt_key([*range(16), 99], "salt", 16) != prompt_key(list(range(40)), "other", 16)
    assert choose_engine({3: 50}, key, 0, draw) == 3
    assert {choose_engine({0: 900, 1: 100}, key, 256, draw) for _ in range(20)} == {1}
    favorites = Counter(choose_engine({0: 100, 1: 200}, prompt_key([n], "", 16), 256, draw) for n in range(400))
    assert min(favorites.values()) > 100, "prompts are spread"
    same = {choose_engine({0: 100, 1: 200}, key, 256, draw) for _ in range(20)}
    assert len(same) == 1, "a prompt stays with its engine"
    loads = Counter(dict.fromkeys(range(8), 0))
    for number in range(4000):
        loads[choose_engine(loads, prompt_key([number], "", 16), 0, draw)] += 1
    assert max(loads.values()) - min(loads.values()) < 10, "two choices keep the loads close"


def test_one_engine_of_a_small_model_leaves_a_thread_to_the_gateway(monkeypatch: pytest.MonkeyPatch):
    def threads(num_threads: int, *, may_spare: bool = True) -> int:
        setup = EngineSetup(
            folder="", engine={}, num_threads=num_threads, heads=("fp32",), int8_backend="auto",
            may_spare_thread=may_spare,
        )  # fmt: skip
        return threads_for(model, setup)

    model = make_model()
    assert [threads(count) for count in (1, 2, 8)] == [1, 1, 7]
    assert threads(8, may_spare=False) == 8
    monkeypatch.setattr(engine_process, "SMALL_MODEL_PARAMETERS", model.config.num_parameters)
    assert threads(8) == 8, "a large model computes for longer than the gateway"


def test_no_engine_outlives_a_server_that_cannot_be_built(folder: Path):
    source = ModelSource(name="tiny", folder=folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(port=taken.getsockname()[1], engine=ENGINE)
        client, tokenizer = load_engines(source, config)
        assert isinstance(client, EnginePool)
        with config_error("port", match="port: cannot listen"):
            ServerThread(client, tokenizer, config, model_name="tiny", source=source)
    assert all(slot.handle.process.poll() is not None for slot in client._slots)


def test_a_setting_that_an_engine_refuses_is_named_as_one(folder: Path):
    config = ServeConfig(engine=EngineConfig(kv_cache_tokens=64))
    with config_error("kv_cache_tokens", match="kv_cache_tokens"):
        load_engines(ModelSource(name="tiny", folder=folder), config)


def test_retries_are_a_tenth_of_the_requests():
    budget = RetryBudget()
    assert [budget.take(), budget.take()] == [True, False]
    for _ in range(100):
        budget.note_request()
    assert sum(budget.take() for _ in range(50)) in (9, 10)


def test_messages_keep_every_bit():
    """Jobs and outputs through their messages, which arrive in pieces."""
    params = SamplingParams(temperature=0.1 + 0.2, stop_ids=(3, 4), logit_bias=((5, -1.5),), num_prompt_logprobs=2)
    source = GrammarSource("regex", "[ab]\n+é", "structured_outputs")
    jobs = [
        GenerationJob([1, 2], params, CompiledGrammar(source, None, 9, (), str), "salt"),  # type: ignore[arg-type]
        GenerationJob([1], SamplingParams()),
        EmbeddingJob([7, 8], "salt"),
    ]
    scores = (ScoredToken(5, float("-inf"), 3, ((1, -0.1),)), ScoredToken(6, -1 / 3, 1))
    outputs = [
        StepOutput("1.0", 7, -0.1 - 0.2, ((7, -0.3), (8, float("-inf"))), "", scores, num_cached_tokens=16),
        StepOutput("2.0", 0, 0.0, (), "stop", embedding=(0.1, -1 / 3)),
    ]
    sent = b"".join(encode({"job": job.to_message()}) for job in jobs)
    sent += b"".join(encode({"output": output_message(output)}) for output in outputs)
    decoder = LineDecoder()
    arrived = [message for at in range(0, len(sent), 7) for message in decoder.feed(sent[at : at + 7])]
    made = [job_of(one["job"], lambda source: CompiledGrammar(source, None, 9, (), str)) for one in arrived[:3]]  # type: ignore[arg-type]
    assert made == jobs
    assert [output_of(one["output"]) for one in arrived[3:]] == outputs
