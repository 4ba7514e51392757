"""OpenVINO GenAI behind the server: the same greedy tokens as our own engine, over HTTP, and refusals by name."""

import asyncio
import ctypes
import gc
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelwright.compress.gguf import export_gguf
from modelwright.compress.int8 import Int8WeightsConfig, quantize_model, save_int8
from modelwright.core.config import ConfigError, ModelError
from modelwright.data.tokenizer.chat import DEFAULT_TEMPLATE, ChatTemplate
from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.engines.openvino import OpenVinoEngine
from modelwright.serve.engines.thread import EngineThread
from modelwright.serve.load import ModelSource, load_folder
from modelwright.serve.server import ServerThread
from serve.conftest import make_model, make_tokenizer, write_model
from serve.patience import wait_until
from serve.test_monitoring import samples

pytestmark = pytest.mark.slow

pytest.importorskip("openvino_genai", reason="OpenVINO GenAI is not installed (modelwright[openvino])")

PROMPTS = ["the quick brown fox jumps", "what does this do? " * 12, "größer", "a"]
ENGINE = EngineConfig(max_num_seqs=4, kv_cache_tokens=4096)
OPENVINO = ServeConfig(port=0, backend="openvino", engine=ENGINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that FP16 can hold, as the GGUF file does."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path, seed=7)
    from safetensors.torch import load_file, save_file

    weights = {name: tensor.half().float() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerThread]:
    source = ModelSource(name="tiny", folder=folder)
    with ServerThread(*load_engines(source, OPENVINO), OPENVINO, model_name="tiny", source=source) as running:
        yield running


def post(server: ServerThread, prompt: str, route: str = "/v1/completions", **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0} | fields
    return httpx.post(f"{server.url}{route}", json=body, timeout=60)


def test_greedy_answers_are_those_of_our_engine(server: ServerThread, folder: Path) -> None:
    """Four at once, with log-probabilities of the chosen tokens."""
    model, tokenizer = load_folder(folder, Int8WeightsConfig())
    params = SamplingParams(max_tokens=20, temperature=0, stop_ids=tokenizer.stop_ids)
    expected = generate(model, [tokenizer.encode(prompt) for prompt in PROMPTS], [params] * len(PROMPTS), ENGINE)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        replies = list(threads.map(lambda one: post(server, one, logprobs=0, return_token_ids=True).json(), PROMPTS))
    for reply, ours in zip(replies, expected, strict=True):
        (choice,) = reply["choices"]
        assert choice["token_ids"] == ours.token_ids
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(ours.logprobs, abs=0.01)
        assert choice["finish_reason"] == ours.finish_reason
        assert reply["system_fingerprint"] == server.service.model.fingerprint


class SignalStack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


def signal_stack() -> tuple[int | None, int]:
    """Address and size of this thread's alternate signal stack."""
    found = SignalStack()
    assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(found)) == 0
    return found.address, found.size


@pytest.mark.skipif(sys.platform != "linux", reason="the layout of Linux's stack_t")
def test_signals_of_the_main_thread_keep_their_stack(folder: Path) -> None:
    """OpenVINO would replace it by one that it unmaps, and the signal after that would end the process."""
    before = signal_stack()
    engines = [load_engines(ModelSource(name="tiny", folder=folder), OPENVINO) for _ in range(2)]
    assert signal_stack() == before
    while engines:
        del engines[0]
    gc.collect()
    assert signal_stack() == before


def test_stops_streams_and_seeds(server: ServerThread, folder: Path) -> None:
    whole = post(server, PROMPTS[0], return_token_ids=True).json()["choices"][0]
    stop = whole["token_ids"][4]
    first = whole["token_ids"].index(stop)
    stopped = post(server, PROMPTS[0], stop_token_ids=[stop], return_token_ids=True).json()["choices"][0]
    assert (stopped["token_ids"], stopped["finish_reason"]) == (whole["token_ids"][: first + 1], "stop")
    held_back = post(server, PROMPTS[0], stop_token_ids=[stop], min_tokens=18, return_token_ids=True).json()
    assert held_back["usage"]["completion_tokens"] >= 18
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert len(events) > 5
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]

    def sampled(seed: int, **fields: Any) -> list[str]:
        reply = post(server, PROMPTS[0], temperature=1.5, seed=seed, n=3, top_p=0.95, **fields).json()
        return [choice["text"] for choice in reply["choices"]]

    assert sampled(3) == sampled(3) != sampled(4)
    assert len(set(sampled(3))) == 3
    assert sampled(5, top_k=1) == [whole["text"]] * 3
    penalized = post(server, PROMPTS[0], repetition_penalty=5.0, frequency_penalty=1.0, presence_penalty=1.0)
    assert penalized.json()["choices"][0]["text"] != whole["text"]


def test_what_it_cannot_do_is_refused_by_name(server: ServerThread) -> None:
    lacking = {
        "logprobs": post(server, "a", logprobs=2),
        "prompt_logprobs": post(server, "a", prompt_logprobs=1),
        "logit_bias": post(server, "a", logit_bias={"70": 1}),
        "response_format": post(server, "a", response_format={"type": "json_object"}, stream=True),
        "input": httpx.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": "a"}, timeout=60),
    }
    for param, reply in lacking.items():
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "unsupported_task", param)
        assert "openvino" in error["message"]
    refused = post(server, "a", temperature=1.0, min_p=1.0)
    assert refused.status_code == 400
    assert "min_p" in refused.json()["error"]["message"]
    assert post(server, "a").status_code == 200, "it goes on"


def test_a_client_that_leaves_frees_the_cache(server: ServerThread) -> None:
    body = {"model": "tiny", "prompt": "the", "max_tokens": 480, "temperature": 0, "ignore_eos": True, "stream": True}
    for _ in range(6):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
    wait_until(lambda: server.service.worker.num_open == 0)
    assert post(server, PROMPTS[1]).status_code == 200
    wait_until(lambda: samples(server)['modelwright_kv_blocks{state="used"}'] == 0)
    assert samples(server)['modelwright_kv_blocks{state="free"}'] == ENGINE.kv_cache_tokens // 32


def test_a_reload_changes_the_weights(server: ServerThread, tmp_path: Path) -> None:
    before = server.service.model.fingerprint
    other = write_model(tmp_path / "other", seed=8)
    future = asyncio.run_coroutine_threadsafe(server.application.reloader.reload(str(other)), server._loop)
    assert future.result(120).fingerprint != before
    reply = post(server, PROMPTS[0]).json()
    assert reply["system_fingerprint"] == server.service.model.fingerprint != before


def with_context(folder: Path, target: Path, num_tokens: int) -> ModelSource:
    """The model with another context."""
    shutil.copytree(folder, target)
    fields = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": num_tokens}))
    return ModelSource(name="tiny", folder=target)


def test_an_answer_that_openvino_drops_ends_with_an_error(folder: Path, tmp_path: Path) -> None:
    source = with_context(folder, tmp_path / "short", 64)
    settings = EngineConfig(max_num_seqs=1, kv_cache_tokens=64, prefill_chunk_size=16)
    client, _ = load_engines(source, ServeConfig(backend="openvino", engine=settings))
    assert isinstance(client, EngineThread)
    engine = client.engine
    assert isinstance(engine, OpenVinoEngine)
    engine._info = replace(engine._info, max_seq_len=999)  # more than its cache holds
    engine.add("0", [5, 6], SamplingParams(max_tokens=90, temperature=0))
    outputs = []
    for _ in range(100):
        outputs += engine.step()
    assert outputs[-1].finish_reason == "error"
    assert 50 < len(outputs) < 70
    assert not engine.has_work


def test_settings_and_models_that_it_cannot_follow(folder: Path, tmp_path: Path, monkeypatch) -> None:
    source = ModelSource(name="tiny", folder=folder)

    def refused(source: ModelSource, error: type[Exception] = ConfigError, **settings: Any) -> str:
        with pytest.raises(error) as raised:
            load_engines(source, ServeConfig(**{"backend": "openvino", **settings}))
        return str(raised.value)

    assert refused(source, engines=2).startswith("engines: ")
    assert refused(source, adapters={"poet": str(tmp_path)}).startswith("--adapters: ")
    assert refused(source, engine=EngineConfig(num_speculative_tokens=2)).startswith("engine.num_speculative_tokens: ")
    assert refused(source, engine=EngineConfig(kv_cache_tokens=256)).startswith("kv_cache_tokens: ")
    uneven = EngineConfig(kv_cache_tokens=112, prefill_chunk_size=16)
    assert "in blocks of 32" in refused(with_context(folder, tmp_path / "uneven", 110), engine=uneven)
    assert "choose weights from f16" in refused(source, backend="openvino:int3")
    assert "choose from modelwright, openvino" in refused(source, backend="tensorrt")
    save_int8(quantize_model(make_model(320), Int8WeightsConfig()), tmp_path / "int8")
    make_tokenizer().save(tmp_path / "int8")
    assert "no INT8 folder" in refused(ModelSource(name="int8", folder=tmp_path / "int8"), ModelError)
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    assert "pip install 'modelwright[openvino]'" in refused(source)


def test_8_bit_weights(tmp_path: Path) -> None:
    source = ModelSource(name="tiny", folder=write_model(tmp_path / "tiny", seed=7))
    config = ServeConfig(port=0, backend="openvino:q8_0", engine=ENGINE)
    with ServerThread(*load_engines(source, config), config, model_name="tiny", source=source) as server:
        assert post(server, PROMPTS[0]).json()["usage"]["completion_tokens"] == 20


def test_openvino_reads_the_template_of_models_that_have_none(folder: Path, tmp_path: Path) -> None:
    """With its own Jinja, as a user of an exported model has it rendered."""
    import openvino_genai

    export_gguf(folder, tmp_path / "tiny.gguf", number_format="f16", name="tiny")
    theirs = openvino_genai.LLMPipeline(str(tmp_path / "tiny.gguf"), "CPU").get_tokenizer()
    function = {"name": "stock", "description": "of a shelf", "parameters": {"type": "object", "properties": {}}}
    call = {"type": "function", "function": {"name": "stock", "arguments": {"shelf": "A"}}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    tools = [{"type": "function", "function": function}]
    rendered = theirs.apply_chat_template(messages, True, chat_template=DEFAULT_TEMPLATE, tools=tools)
    ours = ChatTemplate(DEFAULT_TEMPLATE, {"bos_token": theirs.get_bos_token()}, ())
    expected = ours.render(messages, tools=tools, add_generation_prompt=True)
    assert rendered == expected
    assert "How many?" in rendered
