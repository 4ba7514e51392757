"""The back-end vllm: real HTTP with a stand-in for `vllm serve`, which computes with our engine, so that every answer
has to be that of the embedded engine; and events as vLLM writes them.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelwright.compress.int8 import Int8WeightsConfig, quantize_model, save_int8
from modelwright.core.config import ConfigError, ModelError
from modelwright.infer.engine import EngineConfig
from modelwright.infer.sequence import SamplingParams
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.engines.client import GenerationJob
from modelwright.serve.errors import ApiError
from modelwright.serve.load import ModelSource
from modelwright.serve.server import ServerThread
from modelwright_vllm import client as vllm_client
from modelwright_vllm.backend import VARIABLE
from modelwright_vllm.process import BASE_URL
from modelwright_vllm.wire import AnswerReader, body_of, read_figures
from serve.conftest import make_model, make_tokenizer, write_model
from serve.patience import wait_until
from serve.test_monitoring import samples
from vllm_stand_in import REASON, install

pytestmark = pytest.mark.slow

PROMPTS = ["the quick brown fox jumps", "what does this do? " * 12, "größer", "a"]
START_S = 120
"""Seconds in which the stand-in must start again; importing PyTorch takes 3 s on an idle machine."""
ENGINE = EngineConfig(max_num_seqs=4, prefill_chunk_size=16)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
JSON_OUTPUT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 0, "return_token_ids": True},
    "alternatives": {"temperature": 0, "logprobs": 5, "return_token_ids": True, "return_tokens_as_token_ids": True},
    "sampled": {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 5, "n": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": -1.0},
    "biases": {"temperature": 0, "logit_bias": {"70": 50, "71": -100}},
    "stop strings": {"temperature": 0, "stop": ["e"], "min_tokens": 4},
    "end tokens": {"temperature": 0, "stop_token_ids": list(range(100, 150)), "logprobs": 1, "return_token_ids": True},
    "minimum": {"temperature": 0, "stop_token_ids": list(range(100, 150)), "min_tokens": 12, "return_token_ids": True},
    "regex": {"temperature": 1, "seed": 2, "structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}, "max_tokens": 60},
    "choice": {"temperature": 0, "structured_outputs": {"choice": ["red", "green"]}, "max_tokens": 60},
    "json": {"temperature": 1, "seed": 1, "response_format": JSON_OUTPUT, "max_tokens": 90},
    "scored prompt": {"temperature": 0, "prompt_logprobs": 3, "max_tokens": 3},
    "echo": {"temperature": 0, "echo": True, "logprobs": 2, "max_tokens": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", seed=7)


@pytest.fixture(scope="module", autouse=True)
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The stand-in, on PATH."""
    path = install(tmp_path_factory.mktemp("bin"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
        yield path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerThread]:
    source = ModelSource(name="tiny", folder=folder)
    config = ServeConfig(port=0, backend="vllm", engine=ENGINE)
    with ServerThread(*load_engines(source, config), config, model_name="tiny", source=source) as running:
        yield running


@pytest.fixture(scope="module")
def embedded(folder: Path) -> Iterator[ServerThread]:
    source, config = ModelSource(name="tiny", folder=folder), ServeConfig(port=0, engine=ENGINE)
    with ServerThread(*load_engines(source, config), config, model_name="tiny", source=source) as running:
        yield running


def post(server: ServerThread, prompt: Any, route: str = "/v1/completions", **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20} | fields
    return httpx.post(f"{server.url}{route}", json=body, timeout=60)


def events_of(server: ServerThread, prompt: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "stream": True} | fields
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        return [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]


def client_of(server: ServerThread) -> vllm_client.VllmClient:
    client = server.service.worker.client
    assert isinstance(client, vllm_client.VllmClient)
    return client


def processes_of(server: ServerThread) -> list[int]:
    """The guard and vLLM itself."""
    guard = client_of(server)._process.pid
    children = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    return [guard, *map(int, children)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REQUESTS))
def test_answers_are_those_of_the_embedded_engine(name: str, server: ServerThread, embedded: ServerThread) -> None:
    prompts = PROMPTS[:2] if name in ("scored prompt", "echo") else PROMPTS
    with ThreadPoolExecutor(len(prompts)) as threads:
        found, expected = (
            list(threads.map(lambda one, of=of: post(of, one, **REQUESTS[name]).json(), prompts))
            for of in (server, embedded)
        )
    for one, other in zip(found, expected, strict=True):
        assert "choices" in one, one
        assert one["choices"] == other["choices"]
        assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
        assert one["system_fingerprint"] == server.service.model.fingerprint != other["system_fingerprint"]


def test_streams_come_token_by_token(server: ServerThread, embedded: ServerThread) -> None:
    fields = {"temperature": 0, "logprobs": 2, "return_token_ids": True, "stream_options": {"include_usage": True}}
    found, expected = (events_of(of, PROMPTS[0], **fields) for of in (server, embedded))
    assert [event["choices"] for event in found] == [event["choices"] for event in expected]
    assert len(found) > 20
    assert found[-1]["usage"] == expected[-1]["usage"]


def test_cached_prompts_are_counted_and_salted(server: ServerThread) -> None:
    prompt = "what does this do? it copies a tree of files " * 3

    def cached(**fields: Any) -> int:
        usage = post(server, prompt, max_tokens=2, **fields).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached() > 0] == [0, True]
    assert [cached(cache_salt="another"), cached(cache_salt="another") > 0] == [0, True]


def test_what_it_cannot_do_is_refused_by_name(server: ServerThread) -> None:
    reply = httpx.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": "a"}, timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_task")
    assert "vllm" in reply.json()["error"]["message"]


def test_a_refusal_of_vllm_is_a_400(server: ServerThread, monkeypatch) -> None:
    monkeypatch.setattr(vllm_client, "body_of", lambda job, context: body_of(job, context) | {"temperature": 9.0})
    for fields in ({}, {"stream": True}):
        reply = post(server, "a", **fields)
        text = reply.text
        assert "vLLM refuses the request" in text
        assert "temperature" in text


def test_a_client_that_leaves_frees_the_cache_of_vllm(server: ServerThread) -> None:
    body = {"model": "tiny", "prompt": "the", "max_tokens": 480, "temperature": 0, "ignore_eos": True, "stream": True}
    for _ in range(6):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
    wait_until(lambda: server.service.worker.num_open == 0)
    transport = httpx.HTTPTransport(uds=str(client_of(server)._process.socket))
    with httpx.Client(transport=transport, base_url=BASE_URL) as direct:
        wait_until(lambda: "modelwright_running_answers 0.0" in direct.get("/metrics").text)
        wait_until(lambda: 'modelwright_kv_blocks{state="used"} 0.0' in direct.get("/metrics").text)
    wait_until(lambda: samples(server)["modelwright_running_answers"] == 0)


@pytest.mark.slow
def test_one_that_dies_or_hangs_is_found_and_started_again(server: ServerThread, monkeypatch) -> None:
    """Open answers end with an error that says so; nobody waits for an answer that never comes."""
    before = post(server, PROMPTS[0], temperature=1, seed=3).json()["choices"]
    for signals, reason in (((signal.SIGSTOP, signal.SIGKILL), "died"), ((signal.SIGSTOP,), "wedged")):
        _, vllm = processes_of(server)
        with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
            # Stopped before it is asked: on a busy machine an answer could otherwise be finished before it is noticed
            # that both are open, or before the signal arrives.
            patch.setattr(vllm_client, "POLL_PERIOD_S", 3600.0)
            os.kill(vllm, signals[0])
            open_ones = [threads.submit(events_of, server, "the", temperature=0) for _ in range(2)]
            wait_until(lambda: server.service.worker.num_open == 2)
            # Short limits only while it must be found to hang: a sound one on a busy machine takes longer to reply.
            patch.setattr(vllm_client, "POLL_TIMEOUT_S", 0.5)
            patch.setattr(vllm_client, "POLL_PERIOD_S", 0.1 if reason == "wedged" else 3600.0)
            for number in signals[1:]:
                os.kill(vllm, number)
            for one in open_ones:
                assert one.result()[-1]["error"]["code"] == "engine_lost"
        wait_until(lambda: bool(client_of(server).unavailable))
        refused = post(server, "a")
        assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
        assert httpx.get(f"{server.url}/readyz").status_code == 503
        assert httpx.get(f"{server.url}/livez").status_code == 200
        wait_until(lambda: not client_of(server).unavailable, timeout_s=START_S)
        assert not is_running(vllm)
        assert post(server, PROMPTS[0], temperature=1, seed=3).json()["choices"] == before
        assert samples(server)[f'modelwright_engine_failures_total{{reason="{reason}"}}'] == 1
    assert samples(server)['modelwright_moved_answers_total{outcome="lost"}'] == 4


@pytest.mark.slow
def test_it_ends_with_the_server_that_was_killed(folder: Path, program: Path) -> None:
    """Nothing is left of it, its socket's folder included."""
    command = [sys.executable, "-m", "modelwright.cli.main", "serve", str(folder), "--port=0", "--backend=vllm"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {VARIABLE: str(program)}
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert "Serving tiny" in process.stdout.readline()
            said = process.stderr.readline()
            while "serving with process" not in said:
                said = process.stderr.readline()
            vllm = int(said.split()[-1])
            assert is_running(vllm)
            words = Path(f"/proc/{vllm}/cmdline").read_text().split("\0")
            socket = Path(next(word for word in words if word.startswith("--uds=")).removeprefix("--uds="))
            assert socket.exists()
        finally:
            process.kill()
    wait_until(lambda: not is_running(vllm))
    wait_until(lambda: not socket.parent.exists())


def test_settings_and_models_that_it_cannot_follow(folder: Path, tmp_path: Path, monkeypatch) -> None:
    source = ModelSource(name="tiny", folder=folder)

    def refused(source: ModelSource, error: type[Exception] = ConfigError, **settings: Any) -> str:
        with pytest.raises(error) as raised:
            load_engines(source, ServeConfig(**{"backend": "vllm", **settings}))
        return str(raised.value)

    assert refused(source, engines=2).startswith("engines: ")
    assert refused(source, adapters={"poet": str(tmp_path)}).startswith("--adapters: ")
    assert refused(source, engine=EngineConfig(num_speculative_tokens=2)).startswith("engine.num_speculative_tokens: ")
    assert "choose weights from bfloat16" in refused(source, backend="vllm:int4")
    monkeypatch.setenv(VARIABLE, "no-such-vllm")
    assert "pip install 'modelwright[vllm]'" in refused(source)
    monkeypatch.setenv(VARIABLE, "vllm --out-of-memory")
    assert f"ended while it started: {REASON}" in refused(source, ModelError)
    monkeypatch.setenv(VARIABLE, "vllm serve --out-of-memory")
    assert refused(source).startswith(f"{VARIABLE}: write the program and its options alone, without 'serve'")
    for option in ("--port=1", "--max_model_len 5", "--no-enable-prefix-caching"):
        monkeypatch.setenv(VARIABLE, f"vllm {option}")
        assert refused(source).startswith(f"{VARIABLE}: {option.split()[0].partition('=')[0].replace('_', '-')} ")
    monkeypatch.delenv(VARIABLE)
    save_int8(quantize_model(make_model(320), Int8WeightsConfig()), tmp_path / "int8")
    make_tokenizer().save(tmp_path / "int8")
    assert "no INT8 folder" in refused(ModelSource(name="int8", folder=tmp_path / "int8"), ModelError)
    assert "no such model folder" in refused(ModelSource(name="none", folder=tmp_path / "none"), ModelError)


def reader(**params: Any) -> AnswerReader:
    wants_logprobs = params.pop("wants_logprobs", False)
    job = GenerationJob([5, 6], SamplingParams(**{"max_tokens": 4, **params}), wants_logprobs=wants_logprobs)
    return AnswerReader("0", body_of(job, 64))


def event(ids: list[int], reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "x", "finish_reason": reason, "token_ids": ids, **more}]}


def test_events_in_the_form_of_vllm() -> None:
    """Several tokens in an event, the reason with the last token, cached tokens at the very end."""
    one = reader(wants_logprobs=True, num_logprobs=1)
    tops = [{"token_id:9": -3.0, "token_id:7": -0.1}, {"token_id:8": -0.2}]
    logprobs = {"token_logprobs": [-3.0, -0.2], "top_logprobs": tops, "tokens": ["token_id:9", "token_id:8"]}
    first = one.read(event([9, 8], logprobs=logprobs))
    assert [(output.token_id, output.logprob, output.alternatives) for output in first] == [
        (9, -3.0, ((7, -0.1),)),
        (8, -0.2, ((8, -0.2),)),
    ]
    assert not one.read(event([2], "stop", logprobs={"token_logprobs": [-0.5], "top_logprobs": None}))
    assert not one.read({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}})
    last = one.end()
    assert (last.token_id, last.finish_reason, last.num_cached_tokens) == (2, "stop", 1)


def test_events_that_do_not_belong_to_a_whole_answer() -> None:
    with pytest.raises(ApiError, match="out of memory") as raised:
        reader().read({"error": {"message": "out of memory", "code": 500}})
    assert raised.value.status == 500
    cut = reader()
    assert len(cut.read(event([9]))) == 1
    with pytest.raises(ApiError, match="in the middle"):
        cut.end()
    aborted = reader()
    aborted.read(event([9], "abort"))
    with pytest.raises(ApiError, match="reason 'abort'"):
        aborted.end()
    with pytest.raises(ApiError, match="left out log-probabilities"):
        reader(wants_logprobs=True).read(event([9]))


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(ApiError, match="no room"):
        body_of(GenerationJob([5] * 64, SamplingParams()), 64)


def test_figures_of_several_engines() -> None:
    lines = [
        'vllm:kv_cache_usage_perc{engine="0"} 0.5',
        'vllm:kv_cache_usage_perc{engine="1"} 0.25',
        'vllm:cache_config_info{engine="0",num_gpu_blocks="100"} 1.0',
        'vllm:cache_config_info{engine="1",num_gpu_blocks="100"} 1.0',
        "# TYPE vllm:prefix_cache_hits counter",
        'vllm:prefix_cache_hits_total{engine="0"} 7',
    ]
    figures = read_figures("\n".join(lines) + "\n")
    assert (figures.num_blocks, figures.used_share, figures.num_prefix_hits) == (200, 0.375, 7)
    assert read_figures("").num_blocks == 0
