"""A first model, trained once for all tests of this package, the benchmark of its updates, and a server of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from continual_update import QUICK, write_world
from continual_world import BASE, LOG, World, words_of
from modelwright.cli.main import main
from modelwright.infer.engine import EngineConfig
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.load import ModelSource
from modelwright.serve.server import ServerThread
from modelwright_continual.benchmark import load_benchmark
from plain_runs import plain_runs
from serve.test_keys import write_keys


@pytest.fixture(scope="module", autouse=True)
def _plain_runs() -> Iterator[None]:
    with plain_runs():
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = write_world(tmp_path_factory.mktemp("continual"))
    settings = [word for word in QUICK if not word.startswith("--average")]
    words = ["run", "finetune", "--init-from", folder / "model", "--data.sources", folder / "old.jsonl"]
    words += ["--stages", "clean,pack,sft,quantize", "--run-dir", folder / "base", *settings, *BASE]
    with plain_runs():
        assert main([str(word) for word in words]) == 0
    frozen = ["continual", "freeze", folder / "bench", "--old", folder / "old-heldout.jsonl"]
    assert main([str(word) for word in [*frozen, "--new", folder / "new-heldout.jsonl"]]) == 0
    return World(folder, folder / "base", load_benchmark(folder / "bench"))


@pytest.fixture(scope="session")
def released(world: World) -> Path:
    """The run of a clean update that nobody disturbed, up to its release."""
    run = world.folder / "runs" / "next"
    with plain_runs():
        assert main(words_of(world, run)) == 0
    return run


@pytest.fixture
def server(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    """Serves the first model, quantized."""
    monkeypatch.setenv("MODELWRIGHT_ADMIN_KEY", "root")
    keys = write_keys(tmp_path / "keys.yaml", root={"scopes": ["infer", "admin", "metrics", "feedback"]})
    config = ServeConfig(port=0, engine=EngineConfig(max_num_seqs=4), keys_file=keys)
    source = ModelSource(name="tiny", folder=world.base / "quantize/artifact")
    client, tokenizer = load_engines(source, config)
    requests = RequestsConfig(ab_state=str(tmp_path / "ab.sqlite"), log=str(tmp_path / LOG))
    running = ServerThread(client, tokenizer, config, model_name="tiny", source=source, requests=requests).start()
    yield running
    running.stop_soon(at_once=True)
    assert running.join(120)
