"""Hot reload: no failed request, every answer from one version, and nothing of an old version left."""

import asyncio
import gc
import json
import subprocess
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from modelwright.compress.int8 import Int8WeightsConfig
from modelwright.infer.engine import EngineConfig
from modelwright.infer.generate import generate
from modelwright.infer.sequence import SamplingParams
from modelwright.serve.config import ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.load import ModelSource, load_folder, weights_fingerprint
from modelwright.serve.server import ServerThread
from serve.conftest import write_model
from serve.patience import held, wait_until
from serve.test_keys import write_keys
from serve.test_monitoring import samples

ADMIN = {"Authorization": "Bearer root"}
PROMPTS = ["the quick brown fox jumps over the lazy dog " * 2 + end for end in ("a", "fox", "tree of files")]
ENGINE = EngineConfig(prefill_chunk_size=16, max_num_seqs=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models by their fingerprints, in the order in which they were made."""
    paths = [write_model(tmp_path_factory.mktemp("models") / f"model{seed}", seed=seed) for seed in (7, 8)]
    return {weights_fingerprint(load_folder(path, Int8WeightsConfig())[0]): path for path in paths}


@pytest.fixture(scope="module")
def answers(folders: dict[str, Path]) -> dict[tuple[str, str], str]:
    """The greedy answer of each version to each prompt."""
    params = SamplingParams(max_tokens=12, temperature=0)
    found = {}
    for version, folder in folders.items():
        model, tokenizer = load_folder(folder, Int8WeightsConfig())
        completions = generate(model, [tokenizer.encode(p) for p in PROMPTS], [params] * len(PROMPTS), ENGINE)
        found |= {(version, p): tokenizer.decode(c.token_ids) for p, c in zip(PROMPTS, completions, strict=True)}
    assert len(set(found.values())) == len(found)
    return found


@pytest.fixture
def server(folders: dict[str, Path], tmp_path: Path, engines_in_threads: None):
    keys = write_keys(tmp_path / "keys.yaml", root={"scopes": ["infer", "admin", "metrics"]}, user={})
    config = ServeConfig(port=0, engine=ENGINE, keys_file=keys)
    source = ModelSource(name="tiny", folder=next(iter(folders.values())))
    with ServerThread(*load_engines(source, config), config, model_name="tiny", source=source) as running:
        yield running


def reload(server: ServerThread, path: Path | str, **headers) -> httpx.Response:
    return httpx.post(f"{server.url}/admin/reload", json={"path": str(path)}, headers=ADMIN | headers, timeout=60)


def body(prompt: str, **fields) -> dict:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0} | fields


async def ask(client: httpx.AsyncClient, prompt: str, *, stream: bool) -> tuple[set[str], str]:
    """The versions that the parts of an answer name, and its text."""
    reply = await client.post("/v1/completions", json=body(prompt, stream=stream))
    assert reply.status_code == 200, reply.text
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")] if stream else [reply.text]
    parts = [json.loads(event) for event in events if event != "[DONE]"]
    versions = {part["system_fingerprint"] for part in parts} | {reply.headers["x-model-version"]}
    return versions, "".join(part["choices"][0]["text"] for part in parts)


@pytest.mark.slow
def test_20_reloads_under_load(server: ServerThread, folders, answers):
    models = [weakref.ref(server.service.worker.client.engine._runner._model)]

    async def run() -> set[str]:
        is_over, seen = False, set()

        async def keep_asking(number: int) -> None:
            count = number
            while not is_over:
                prompt = PROMPTS[count % len(PROMPTS)]
                versions, text = await ask(client, prompt, stream=count % 2 == 0)
                (version,) = versions
                assert text == answers[version, prompt]
                seen.add(version)
                count += 1

        async with httpx.AsyncClient(base_url=server.url, headers=ADMIN, timeout=60) as client:
            asking = [asyncio.create_task(keep_asking(number)) for number in range(5)]
            for number in range(20):
                version, path = list(folders.items())[(number + 1) % 2]
                reply = await client.post("/admin/reload", json={"path": str(path)})
                assert reply.json() == {
                    "status": "reloaded",
                    "version": version,
                    "previous_version": list(folders)[number % 2],
                }
                models.append(weakref.ref(server.service.worker.client.engine._runner._model))
                await asyncio.sleep(0.03)
            is_over = True
            await asyncio.gather(*asking)
        return seen

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(run()) == set(folders)
        wait_until(lambda: not server.service.retiring)
        assert [model() is not None for model in models] == [False] * 20 + [True], "a reload leaves its model in memory"
    finally:
        gc.enable()
    assert sum(thread.name == "engine" for thread in threading.enumerate()) == 1
    found = samples(server, **ADMIN)
    assert found['modelwright_reloads_total{outcome="done"}'] == 20
    assert found['vllm:num_requests_running{model_name="tiny"}'] == 0
    assert found['modelwright_kv_blocks{state="free"}'] == ENGINE.kv_cache_tokens // ENGINE.block_size
    assert found["modelwright_prefix_cache_hits_total"] > 0
    assert [name for name in found if name.startswith("modelwright_model_info")] == [
        f'modelwright_model_info{{version="{next(iter(folders))}"}}'
    ]


def test_reloads_replace_engine_processes(folders, answers, tmp_path: Path):
    keys = write_keys(tmp_path / "keys.yaml", root={"scopes": ["infer", "admin", "metrics"]})
    config = ServeConfig(port=0, engines=2, engine=ENGINE, keys_file=keys)
    source = ModelSource(name="tiny", folder=next(iter(folders.values())))

    def processes(server: ServerThread) -> list[subprocess.Popen[bytes]]:
        return [slot.handle.process for slot in server.service.worker.client._slots]

    async def run(server: ServerThread) -> tuple[set[str], list[subprocess.Popen[bytes]]]:
        is_over, seen, earlier = False, set(), []

        async def keep_asking(number: int) -> None:
            count = number
            while not is_over:
                prompt = PROMPTS[count % len(PROMPTS)]
                (version,), text = await ask(client, prompt, stream=count % 2 == 0)
                assert text == answers[version, prompt]
                seen.add(version)
                count += 1

        async with httpx.AsyncClient(base_url=server.url, headers=ADMIN, timeout=120) as client:
            asking = [asyncio.create_task(keep_asking(number)) for number in range(4)]
            for path in reversed(folders.values()):
                earlier += processes(server)
                reply = await client.post("/admin/reload", json={"path": str(path)})
                assert reply.json()["status"] == "reloaded"
                await asyncio.sleep(0.3)
            is_over = True
            await asyncio.gather(*asking)
        return seen, earlier

    with ServerThread(*load_engines(source, config), config, model_name="tiny", source=source) as server:
        seen, earlier = asyncio.run(run(server))
        assert seen == set(folders)
        wait_until(lambda: not server.service.retiring)
        assert len(earlier) == 4
        assert all(process.poll() is not None for process in earlier), "a process outlives its version"
        assert all(process.poll() is None for process in processes(server))
        assert samples(server, **ADMIN)["modelwright_engines"] == 2


def test_open_answers_finish_on_the_old_version(server: ServerThread, folders, answers):
    (old, _), (new, second) = folders.items()
    prompt = PROMPTS[0]

    def read(prompt: str) -> tuple[set[str], str]:
        async def once():
            async with httpx.AsyncClient(base_url=server.url, headers=ADMIN, timeout=60) as client:
                return await ask(client, prompt, stream=True)

        return asyncio.run(once())

    with ThreadPoolExecutor() as pool:
        with held(server, after=8):
            begun = pool.submit(read, prompt)
            wait_until(lambda: server.service.worker.num_open == 1)
            assert reload(server, second).status_code == 200
            assert read(prompt) == ({new}, answers[new, prompt])
            assert not begun.done()
            assert httpx.get(f"{server.url}/health").json()["open_answers"] == 1
        assert begun.result() == ({old}, answers[old, prompt])
    wait_until(lambda: not server.service.retiring)


def test_a_bad_version_leaves_the_old_one_in_service(server: ServerThread, folders, answers, tmp_path: Path):
    old = next(iter(folders))
    broken = write_model(tmp_path / "broken", seed=9)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    cut = write_model(tmp_path / "cut", seed=9)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:1000])
    for path, reason in ((tmp_path / "absent", "no such model folder"), (broken, "not finite"), (cut, "cut")):
        refused = reload(server, path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "reload_failed")
        assert reason in refused.json()["error"]["message"]
        assert f"{old} goes on" in refused.json()["error"]["message"]
    assert httpx.get(f"{server.url}/readyz").json()["version"] == old
    reply = httpx.post(f"{server.url}/v1/completions", json=body(PROMPTS[1]), headers=ADMIN, timeout=60)
    assert reply.json()["choices"][0]["text"] == answers[old, PROMPTS[1]]
    assert sum(thread.name == "engine" for thread in threading.enumerate()) == 1
    assert samples(server, **ADMIN)['modelwright_reloads_total{outcome="failed"}'] == 3


def test_who_may_reload_and_when(server: ServerThread, folders, slow_server):
    assert reload(server, "", Authorization="Bearer user").status_code == 403
    assert httpx.post(f"{slow_server().url}/admin/reload", json={}).status_code == 403
    same = reload(server, "").json()
    assert same["version"] == same["previous_version"] == next(iter(folders))
    lock = server.application.reloader._lock
    asyncio.run_coroutine_threadsafe(lock.acquire(), server._loop).result()
    assert reload(server, "").json()["error"]["code"] == "reload_running"
    server._loop.call_soon_threadsafe(lock.release)
    assert reload(server, "").status_code == 200
