"""Adapters over HTTP: each is a model of its own, may come and go while answers run, and belongs to one base."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file, save_file

from modelwright.compress.int8 import Int8WeightsConfig
from modelwright.core.config import ConfigError, ModelError
from modelwright.infer.engine import Engine, EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.model.adapters import attach_adapters
from modelwright.model.low_rank import AdapterConfig
from modelwright.model.peft_folder import CONFIG, TENSORS, load_adapter, save_adapter
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.engines.process import AdapterLoader
from modelwright.serve.load import ModelSource, load_folder
from modelwright.serve.server import NOTHING_KEPT, ServerThread
from refusals import config_error
from serve.conftest import make_model, write_model
from serve.patience import held, wait_until
from serve.test_keys import write_keys

pytestmark = pytest.mark.slow

ENGINE = EngineConfig(prefill_chunk_size=16, max_num_seqs=8, num_speculative_tokens=2)
PROMPT = "the quick brown fox jumps over the lazy dog the quick brown fox"
ADMIN = {"Authorization": "Bearer root"}


def write_adapter(folder: Path, *, seed: int, base_seed: int = 7) -> Path:
    model = make_model(seed=base_seed)
    attach_adapters(model, AdapterConfig(r=4, lora_alpha=40.0), seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    save_adapter(model, folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "base": write_model(root / "base", seed=7),
        "other": write_model(root / "other", seed=8),
        "poet": write_adapter(root / "poet", seed=1),
        "coder": write_adapter(root / "coder", seed=2),
        "foreign": write_adapter(root / "foreign", seed=3, base_seed=8),
    }


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path]) -> dict[str, str]:
    """The greedy answer of a model that has one adapter alone, and of the base."""
    found = {}
    for name in ("tiny", "poet", "coder"):
        model, tokenizer = load_folder(folders["base"], Int8WeightsConfig())
        if name != "tiny":
            load_adapter(model, folders[name])
        params = [SamplingParams(max_tokens=12, temperature=0, stop_ids=tokenizer.stop_ids)]
        found[name] = tokenizer.decode(generate(model, [tokenizer.encode(PROMPT)], params, ENGINE)[0].token_ids)
    assert len(set(found.values())) == 3
    return found


def serve(folders: dict[str, Path], *, requests: RequestsConfig = NOTHING_KEPT, **settings) -> ServerThread:
    config = ServeConfig(port=0, engine=ENGINE, **settings)
    source = ModelSource(name="tiny", folder=folders["base"])
    return ServerThread(*load_engines(source, config), config, model_name="tiny", source=source, requests=requests)


@pytest.fixture
def server(folders: dict[str, Path], tmp_path: Path, engines_in_threads: None) -> Iterator[ServerThread]:
    keys = write_keys(tmp_path / "keys.yaml", root={"scopes": ["infer", "admin", "metrics"]}, user={})
    adapters = {"poet": str(folders["poet"])}
    with serve(folders, adapters=adapters, model_aliases=("small", "bard=poet"), keys_file=keys) as running:
        yield running


@pytest.fixture
def client(server: ServerThread) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="root", max_retries=0, timeout=60) as found:
        yield found


def answer(client: OpenAI, model: str):
    return client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)


def load(server: ServerThread, name: str, folder: Path | str, **headers: str) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder)}
    return httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, headers=ADMIN | headers, timeout=60)


def unload(server: ServerThread, name: str, **headers: str) -> httpx.Response:
    url = f"{server.url}/v1/unload_lora_adapter"
    return httpx.post(url, json={"lora_name": name}, headers=ADMIN | headers, timeout=60)


def test_an_adapter_is_a_model_name(server: ServerThread, client: OpenAI, folders, texts):
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert {name: model["parent"] for name, model in listed.items()} == {
        "tiny": None,
        "small": None,
        "bard": "tiny",
        "poet": "tiny",
    }
    assert listed["poet"]["root"] == listed["bard"]["root"] == str(folders["poet"])
    expected = {"tiny": "tiny", "small": "tiny", "poet": "poet", "bard": "poet"}
    with ThreadPoolExecutor(8) as threads:
        answers = dict(
            zip([*expected] * 2, threads.map(lambda name: answer(client, name), [*expected] * 2), strict=True)
        )
    for name, meant in expected.items():
        assert answers[name].choices[0].text == texts[meant]
        assert answers[name].model == name
    fingerprints = {name: one.system_fingerprint for name, one in answers.items()}
    assert fingerprints["poet"] == fingerprints["bard"] != fingerprints["tiny"] == fingerprints["small"]
    assert server.service.model.fingerprint == fingerprints["tiny"]
    again = [answer(client, name).usage.prompt_tokens_details.cached_tokens for name in ("tiny", "poet")]
    assert min(again) > 0, "each has its own beginnings in the cache"
    vectors = [
        client.embeddings.create(model=name, input=PROMPT).data[0].embedding for name in ("tiny", "poet", "bard")
    ]
    assert vectors[0] != vectors[1] == vectors[2]


def test_adapters_come_and_go(server: ServerThread, client: OpenAI, folders, texts):
    with pytest.raises(openai.NotFoundError, match="'coder' does not exist"):
        answer(client, "coder")
    reply = load(server, "coder", folders["coder"])
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'coder' added successfully.")
    first = answer(client, "coder")
    assert (first.choices[0].text, first.system_fingerprint) == (texts["coder"], reply.headers["x-model-version"])
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert client.models.retrieve("coder").model_dump()["parent"] == "tiny"
    assert unload(server, "coder").status_code == 200
    with pytest.raises(openai.NotFoundError, match="'coder' does not exist"):
        answer(client, "coder")
    assert unload(server, "coder").status_code == 404
    assert load(server, "coder", folders["poet"]).status_code == 200
    renamed = answer(client, "coder")
    assert renamed.choices[0].text == texts["poet"]
    assert renamed.usage.prompt_tokens_details.cached_tokens == 0, "the name of before had other weights"
    assert unload(server, "poet").status_code == 200
    assert "bard" not in [model.id for model in client.models.list()]
    assert answer(client, "tiny").choices[0].text == texts["tiny"]


def test_an_open_answer_finishes_with_its_adapter(server: ServerThread, folders, texts):
    body = {"model": "poet", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}

    def ask() -> str:
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=ADMIN, timeout=60)
        return reply.json()["choices"][0]["text"]

    with ThreadPoolExecutor(1) as threads, held(server, after=3):
        text = threads.submit(ask)
        wait_until(lambda: server.service.worker.num_open == 1)
        assert unload(server, "poet").status_code == 200
        assert load(server, "poet", folders["coder"]).status_code == 200
    assert text.result() == texts["poet"]
    assert ask() == texts["coder"]


def test_an_open_answer_names_the_version_that_computes_it(server: ServerThread, folders):
    version = server.service.model.adapters["poet"].fingerprint
    generates = {"model": "poet", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    routes = {"completions": generates, "embeddings": {"model": "poet", "input": PROMPT}}

    def ask(route: str) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/{route}", json=routes[route], headers=ADMIN, timeout=60)

    for reloads in (False, True):
        with ThreadPoolExecutor(2) as threads, held(server):
            replies = threads.map(ask, routes)
            wait_until(lambda: server.service.worker.num_open == 2)
            assert unload(server, "poet").status_code == 200
            if reloads:
                assert load(server, "poet", folders["coder"]).status_code == 200
        for reply in replies:
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-model-version"] == version
            assert reply.json().get("system_fingerprint", version) == version
        assert load(server, "poet", folders["poet"]).status_code == (400 if reloads else 200)


def test_a_slow_request_gets_no_adapter_of_a_later_version(server: ServerThread, folders):
    body = json.dumps({"model": "coder", "prompt": PROMPT, "max_tokens": 2}).encode()
    before, may_end = server.service.model, threading.Event()

    def parts() -> Iterator[bytes]:
        yield body[:9]
        may_end.wait(60)
        yield body[9:]

    def ask() -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", content=parts(), headers=ADMIN, timeout=60)

    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(ask)
        wait_until(lambda: before.worker.num_held == 1)
        again = {"path": str(folders["base"])}
        assert httpx.post(f"{server.url}/admin/reload", json=again, headers=ADMIN, timeout=60).status_code == 200
        assert load(server, "coder", folders["coder"]).status_code == 200
        may_end.set()
    assert reply.result().status_code == 404, "the version that the request began with has no such adapter"


def test_an_ab_test_has_the_adapters_of_a(folders, tmp_path: Path):
    """An adapter that names no weights fits both versions; its answers are those of A and B with it."""
    anyones = tmp_path / "anyones"
    shutil.copytree(folders["poet"], anyones)
    save_file(load_file(anyones / TENSORS), anyones / TENSORS, metadata={"format": "pt"})
    expected = {}
    for arm, base in (("A", "base"), ("B", "other")):
        model, tokenizer = load_folder(folders[base], Int8WeightsConfig())
        load_adapter(model, anyones)
        params = [SamplingParams(max_tokens=12, temperature=0, stop_ids=tokenizer.stop_ids)]
        expected[arm] = tokenizer.decode(generate(model, [tokenizer.encode(PROMPT)], params, ENGINE)[0].token_ids)
    keys = write_keys(tmp_path / "keys.yaml", root={"scopes": ["infer", "admin", "metrics"]})
    kept = RequestsConfig(ab_state=str(tmp_path / "ab.sqlite"), log=str(tmp_path / "requests.sqlite"))
    with serve(folders, requests=kept, adapters={"any": str(anyones)}, keys_file=keys) as server:

        def post(route: str, /, **body) -> httpx.Response:
            return httpx.post(f"{server.url}{route}", json=body, headers=ADMIN, timeout=60)

        assert load(server, "poet", folders["poet"]).status_code == 200
        refused = post("/admin/ab", name="next", path=str(folders["other"]))
        assert refused.status_code == 400
        assert str(folders["poet"]) in refused.json()["error"]["message"], "poet belongs to A's weights only"
        assert unload(server, "poet").status_code == 200
        assert post("/admin/ab", name="next", path=str(folders["other"])).status_code == 200
        for refused in (load(server, "poet", folders["poet"]), unload(server, "any")):
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "test_running")
        arms = {"A": server.service.model, "B": server.service.arms.candidate}
        versions = {arm: model.adapters["any"].fingerprint for arm, model in arms.items()}
        replies = {}
        for number in range(12):
            body = {"model": "any", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            reply = post("/v1/completions", **body, metadata={"session_id": str(number)})
            replies[reply.json()["id"]] = reply
        embedded = post("/v1/embeddings", model="any", input=PROMPT)
        assert embedded.headers["x-model-version"] == versions["A"], "a test has requests for text only"
        assert post("/admin/ab/end", promote=True).json()["requests"].keys() == {"A", "B"}
        assert [*server.service.model.adapters] == ["any"]
        assert post("/v1/embeddings", model="any", input=PROMPT).headers["x-model-version"] == versions["B"]
    with contextlib.closing(sqlite3.connect(tmp_path / "requests.sqlite")) as log:
        rows = log.execute("SELECT id, model, version, arm, answer FROM request_log").fetchall()
    assert {arm for *_, arm, _ in rows} == {"A", "B"}
    assert len(rows) == len(replies)
    for answer_id, name, version, arm, text in rows:
        assert (name, version, text) == ("any", versions[arm], expected[arm])
        reply = replies[answer_id].json()
        assert replies[answer_id].headers["x-model-version"] == reply["system_fingerprint"] == version
        assert reply["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("setting", "value"),
    [("r", "four"), ("lora_alpha", [1]), ("rank_pattern", {"(": 4}), ("rank_pattern", {"q_proj": "4"}),
     ("target_modules", 3), ("target_modules", "("), ("use_dora", "no")],
)  # fmt: skip
def test_a_damaged_config_of_an_adapter_is_refused_by_its_setting(setting: str, value, folders, tmp_path: Path):
    shutil.copytree(folders["poet"], tmp_path / "adapter")
    path = tmp_path / "adapter" / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {setting: value}))
    with pytest.raises(ModelError, match=f"{CONFIG}: {setting}"):
        load_adapter(make_model(), tmp_path / "adapter")


def test_an_engine_process_outlives_an_unforeseen_adapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fail(*arguments):
        raise RuntimeError("something else")

    monkeypatch.setattr("modelwright.serve.engines.process.prepare_adapter", fail)
    loader, replies = AdapterLoader(Engine(make_model(), ENGINE)), []
    loader.begin(3, "poet", str(tmp_path))
    wait_until(lambda: bool(replies.extend(loader.replies()) or replies))
    assert replies == [[3, False, "RuntimeError: something else"]]


def test_what_adding_an_adapter_raises_ends_no_engine(server, client, folders, texts, monkeypatch):
    def fail(name: str, adapter: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(server.service.model.worker.client.engine, "add_adapter", fail)
    assert load(server, "coder", folders["coder"]).status_code == 500
    assert answer(client, "poet").choices[0].text == texts["poet"]


def test_who_may_load_what(server: ServerThread, folders, tmp_path: Path):
    assert load(server, "coder", folders["coder"], Authorization="Bearer user").status_code == 403
    assert unload(server, "poet", Authorization="Bearer user").status_code == 403
    foreign = load(server, "foreign", folders["foreign"])
    assert foreign.status_code == 400
    assert foreign.json()["error"]["param"] == "lora_path"
    assert str(folders["foreign"]) in foreign.json()["error"]["message"]
    assert "belongs to other weights" in foreign.json()["error"]["message"]
    for name in ("tiny", "small", "poet", "bard"):
        assert "is in use" in load(server, name, folders["coder"]).json()["error"]["message"]
    missing = load(server, "x", tmp_path / "missing")
    assert (missing.status_code, "missing" in missing.json()["error"]["message"]) == (400, True)
    unreadable = load(server, "x", tmp_path / ("0" * 300))
    assert (unreadable.status_code, unreadable.json()["error"]["param"]) == (400, "lora_path")
    assert "cannot be read (File name too long)" in unreadable.json()["error"]["message"]
    wrong = httpx.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": "x"}, headers=ADMIN)
    assert wrong.json()["error"]["param"] == "lora_path"
    assert [*server.service.model.adapters] == ["poet"]


def test_settings_that_contradict_each_other_are_refused(folders):
    with pytest.raises(ModelError, match="belongs to other weights"):
        serve(folders, adapters={"foreign": str(folders["foreign"])})
    with config_error("model_aliases"):
        ServeConfig(adapters={"poet": "x"}, model_aliases=("bard=nobody",)).check_names("tiny")
    with pytest.raises(ConfigError, match="each needs a unique name, got tiny, poet, poet"):
        ServeConfig(adapters={"poet": "x"}, model_aliases=("poet",)).check_names("tiny")
    with pytest.raises(ConfigError, match="got tiny, tiny"):
        serve(folders, adapters={"tiny": str(folders["poet"])})


def test_a_reload_takes_the_adapters_along_or_is_refused(server: ServerThread, client: OpenAI, folders, texts):
    def reload(name: str) -> httpx.Response:
        body = {"path": str(folders[name])}
        return httpx.post(f"{server.url}/admin/reload", json=body, headers=ADMIN, timeout=60)

    load(server, "coder", folders["coder"])
    assert reload("base").status_code == 200
    assert [answer(client, name).choices[0].text for name in texts] == list(texts.values())
    refused = reload("other")
    assert refused.status_code == 400
    assert str(folders["poet"]) in refused.json()["error"]["message"]
    assert answer(client, "poet").choices[0].text == texts["poet"]
    for name in ("poet", "coder"):
        assert unload(server, name).status_code == 200
    assert reload("other").status_code == 200


def test_engine_processes_have_the_same_adapters(folders, texts, tmp_path: Path):
    keys = write_keys(tmp_path / "keys.yaml", root={"scopes": ["infer", "admin", "metrics"]})
    with serve(folders, engines=2, adapters={"poet": str(folders["poet"])}, keys_file=keys) as server:
        pool = server.service.worker.client

        def ask(name: str) -> str:
            body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=ADMIN, timeout=120)
            return reply.json()["choices"][0]["text"]

        def check(names: list[str]) -> None:
            with ThreadPoolExecutor(8) as threads:
                assert list(threads.map(ask, names)) == [texts[name] for name in names]

        assert load(server, "coder", folders["coder"]).status_code == 200
        assert load(server, "foreign", folders["foreign"]).status_code == 400
        check(["tiny", "poet", "coder"] * 3)
        os.kill(pool._slots[0].handle.process.pid, signal.SIGKILL)
        wait_until(lambda: pool._slots[0].is_lost)
        wait_until(lambda: pool._slots[0].link is not None)
        assert len(pool._slots[0].handle.report.info.adapters) == 2
        check(["tiny", "poet", "coder"] * 3)
        assert unload(server, "coder").status_code == 200
        assert json.loads(httpx.get(f"{server.url}/v1/models/coder", headers=ADMIN).text)["error"]["param"] == "model"
