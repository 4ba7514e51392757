"""The application for Ray Serve: its lifespan in this process, its config by Ray's own schema, and one request through
Ray where Ray Serve is installed."""

import asyncio
import gc
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from modelwright.core.config import ConfigError
from refusals import config_error
from serve.conftest import write_model
from serve.test_keys import write_keys

DEPLOY = Path(__file__).parents[2] / "examples/deploy"
_spec = importlib.util.spec_from_file_location("ray_serve", DEPLOY / "ray_serve.py")
assert _spec is not None
assert _spec.loader is not None
ray_example = importlib.util.module_from_spec(_spec)
sys.modules["ray_serve"] = ray_example  # `dataclass` and Ray look the module up by its name
_spec.loader.exec_module(ray_example)
RayArguments, build, server_of = ray_example.RayArguments, ray_example.build, ray_example.server_of

BODY = {"model": "tiny", "prompt": "the quick brown", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", seed=7)


def ray_serve() -> Any:
    """Ray Serve, or a skipped test."""
    return pytest.importorskip("ray.serve", reason="Ray Serve is not installed (modelwright[ray-serve])")


def config_of(folder: Path, **settings: Any) -> dict[str, Any]:
    """The example's config, with this machine's model and settings."""
    config = yaml.safe_load((DEPLOY / "ray_serve.yaml").read_text())
    arguments = config["applications"][0]["args"]
    arguments |= {"folder": str(folder), "model_name": "tiny", "settings": settings}
    return config


def test_a_replica_starts_answers_drains_and_stops(folder: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", user={})
    settings = {"keys_file": keys, "engine": {"max_num_seqs": 4}, "model_aliases": ["small"]}
    (application,) = config_of(folder, **settings)["applications"]
    arguments = RayArguments(**application["args"])

    async def run() -> None:
        server = server_of(arguments)
        server.require_healthy()
        asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        said: asyncio.Queue[Any] = asyncio.Queue()
        living = asyncio.create_task(server({"type": "lifespan"}, asked.get, said.put))  # type: ignore[arg-type]
        asked.put_nowait({"type": "lifespan.startup"})
        assert (await said.get())["type"] == "lifespan.startup.complete"
        transport = httpx.ASGITransport(app=server)  # type: ignore[arg-type]
        headers = {"Authorization": "Bearer user"}
        async with httpx.AsyncClient(transport=transport, base_url="http://ray", headers=headers, timeout=60) as client:
            reply = await client.post("/v1/completions", json=BODY | {"model": "small"})
            assert reply.json()["usage"]["completion_tokens"] == 8
            running = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 200}))
            while not server._application.service.num_open:
                await asyncio.sleep(0.001)
            asked.put_nowait({"type": "lifespan.shutdown"})
            assert (await running).json()["usage"]["completion_tokens"] == 200, "it was drained"
            assert (await said.get())["type"] == "lifespan.shutdown.complete"
            assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        await living
        server._application.service.worker.failed = True
        with pytest.raises(RuntimeError):
            server.require_healthy()

    asyncio.run(run())


def test_settings_of_sockets_are_refused(folder: Path) -> None:
    with config_error("port", match="port: sockets belong to Ray's proxies"):
        server_of(RayArguments(folder=str(folder), model_name="tiny", settings={"port": 9000}))


@pytest.mark.parametrize(
    ("name", "value"), [("settings", None), ("adapters", ["poet"]), ("model_name", {}), ("replicas", 3)]
)
def test_wrong_arguments_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"args.{name}: "):
        build({"folder": "/model", "model_name": "tiny", name: value})


def test_the_config_is_valid_by_rays_schema() -> None:
    ray_serve()
    from ray.serve.schema import (
        DeploymentSchema,
        HTTPOptionsSchema,
        RayActorOptionsSchema,
        ServeApplicationSchema,
        ServeDeploySchema,
    )

    config = yaml.safe_load((DEPLOY / "ray_serve.yaml").read_text())
    assert getattr(ray_example, config["applications"][0]["import_path"].removeprefix("ray_serve:")) is build
    schema = ServeDeploySchema.model_validate(config)
    assert (schema.http_options.host, schema.http_options.port) == ("127.0.0.1", 8000)
    (application,) = config["applications"]
    (deployment,) = application["deployments"]
    assert schema.applications[0].deployments[0].num_replicas == 3
    parts = {
        ServeDeploySchema: config,
        HTTPOptionsSchema: config["http_options"],
        ServeApplicationSchema: application,
        DeploymentSchema: deployment,
        RayActorOptionsSchema: deployment["ray_actor_options"],
    }
    for part, written in parts.items():
        assert set(written) <= set(part.model_fields), "the schemas let unknown fields pass"
    deployment["num_replicas"] = -1
    with pytest.raises(ValueError, match="num_replicas"):
        ServeDeploySchema.model_validate(config)


@pytest.mark.slow
@pytest.mark.timeout(900)  # Ray starts processes that import PyTorch, which takes minutes on a busy machine
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves files open, and processes that it has ended unread
def test_ray_answers_a_request(folder: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = ray_serve()
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(DEPLOY), *sys.path]))  # of the replicas
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray warns of a change otherwise
    (application,) = config_of(folder)["applications"]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": free_port})
        serve.run(build(application["args"]), name="tiny", route_prefix="/")
        url = f"http://127.0.0.1:{free_port}"
        whole = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()
        assert whole["usage"]["completion_tokens"] == 8, whole
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=60) as stream:
            events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        assert text == whole["choices"][0]["text"]
        assert httpx.get(f"{url}/readyz", timeout=60).status_code == 200
    finally:
        serve.shutdown()
        ray.shutdown()
        gc.collect()
