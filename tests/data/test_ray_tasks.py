"""Cleaning with Ray: the same files as in this process, though workers or the command are killed."""

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from cleaned import result_files
from modelwright.core.config import ConfigError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.folder import read_dropped
from modelwright.data.document import Document
from modelwright.data.workers import InProcess, RayTasks
from refusals import config_error

pytest.importorskip("ray")

SCRIPT = """
import os, signal, sys
from dataclasses import dataclass
from pathlib import Path
from test_ray_tasks import KilledOnce, clean
from modelwright.core.config import ModelwrightError
from modelwright.data.clean import deduplicate
from modelwright.data.workers import RayTasks
from watched_engine import WatchedEngine

def fail(number):
    raise ModelwrightError(f"shard {number} is damaged")

out, engine = Path(sys.argv[1]), WatchedEngine(RayTasks(2))
deduplicate._FEWEST_IN_WORKERS = 1
clean(out, [KilledOnce(str(out))], engine)
processes = engine.processes["group_band"]
(out / "bands").write_text(f"{len(processes)} in workers: {os.getpid() not in processes}")
try:
    list(engine.map(fail, [5]))
except ModelwrightError as error:
    (out / "error").write_text(f"{type(error).__name__}: {error}")
"""


class KilledOnce:
    """Kills its worker at one document, the first time."""

    name = "killed_once"

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, document: Document) -> Document:
        marker = Path(self.folder) / "was-killed"
        if document.id == "d77" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return document


def clean(out: Path, more: list, engine) -> None:
    rng = random.Random(1)
    texts = [" ".join(f"the word{rng.randrange(500)}" for _ in range(60)) + f" {n}@example.org" for n in range(200)]
    texts[150:170] = [f"{text[:200]} another {text[200:]}" for text in texts[:20]]
    documents = (
        Document(id=f"d{n}", text=text, kind="prose", split="train", source="test") for n, text in enumerate(texts)
    )
    out.mkdir(exist_ok=True)
    steps = [*build_steps(CleanConfig()), *more]
    clean_documents(documents, steps, out, SilentProgress(), engine=engine, shard_documents=20)


@pytest.mark.slow
def test_the_files_are_those_of_one_process_though_a_worker_is_killed(tmp_path: Path) -> None:
    with_ray, here = tmp_path / "ray", tmp_path / "here"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, with_ray], env=environment, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (with_ray / "was-killed").exists()
    assert (with_ray / "error").read_text() == "ModelwrightError: shard 5 is damaged"
    assert (with_ray / "bands").read_text() == "16 in workers: True"
    clean(here, [KilledOnce(str(with_ray))], InProcess())
    assert sum(entry.reason == "near-duplicate" for entry in read_dropped(here)) > 10
    for name in result_files(here):
        assert (here / name).read_bytes() == (with_ray / name).read_bytes(), name


SMALL_SHARDS = """
import sys
from modelwright.cli.main import main
from modelwright.data.clean import clean

clean._SHARD_CHARS = 10_000
sys.exit(main(sys.argv[1:]))
"""
SLOW_STEP = """
import time

def slow(document):
    time.sleep(0.01)
    return document
"""


@pytest.mark.slow
def test_the_command_is_killed_and_goes_on_with_the_shards_that_are_left(tmp_path: Path) -> None:
    from clean_engines import Command, with_the_command_killed  # imports PyTorch, which Ray's workers need not

    source, step, links = tmp_path / "documents.jsonl", tmp_path / "slow.py", tmp_path / "links"
    step.write_text(SLOW_STEP)
    links.mkdir()
    rng = random.Random(2)
    texts = [" ".join(f"the word{rng.randrange(500)}" for _ in range(60)) for _ in range(280)]
    texts += [f"{text[:200]} another {text[200:]}" for text in texts[:20]]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = ("--clean.num_workers", "2", "--clean.steps", f"{step}:slow")
    with closing(Command(source, tmp_path / "local", "local", settings, ("-c", SMALL_SHARDS))) as local:
        local.finish()
    with closing(Command(source, tmp_path / "ray", "ray", settings, ("-c", SMALL_SHARDS))) as with_ray:
        facts = with_the_command_killed(with_ray, 3, links)
    assert 3 <= facts["shards_before"] < 15
    assert facts["done_again"] == 0
    for name in result_files(tmp_path / "local"):
        assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "ray" / name).read_bytes(), name
    assert json.loads((tmp_path / "ray" / "report.json").read_text())["dropped"]["duplicates"]


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with config_error("RAY_ADDRESS"):
        list(RayTasks(1).map(str, [1]))


def test_ray_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(ConfigError, match=r"Ray could not start on this machine .*timed out.*clean\.engine local"):
        list(RayTasks(1).map(str, [1]))
