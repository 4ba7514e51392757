"""The whole loop against a real server: promotion, rollback, `kill -9` at each boundary, lineage to the first data."""

import hashlib
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from continual_update import new_records, old_records, write_records
from continual_world import ADMIN, KILLER, LOG, World, words_of
from modelwright.cli.main import main
from modelwright.core.artifacts import ArtifactError, read_manifest
from modelwright.core.config import ModelwrightError
from modelwright.core.records import read_records
from modelwright.serve.ab.client import AbClient, ServerUnreachable
from modelwright.serve.errors import ApiError
from modelwright.serve.server import ServerThread
from modelwright_continual.lineage import trace
from modelwright_continual.model_files import model_digest
from rank_processes import start_process

pytestmark = pytest.mark.slow

WINDOW = 50
WEIGHTS = (
    "sft/artifact/model.safetensors", "average/artifact/model.safetensors", "quantize/artifact/model.safetensors",
    "release/model.safetensors",
)  # fmt: skip
BOUNDARIES = (
    (r"/drift\.json$", "before"), (r"/drift\.json$", "after"), ("/data$", "before"), ("/data$", "after"),
    ("init/artifact$", "after"), ("clean/artifact$", "after"), ("pack/artifact$", "after"),
    ("sft/checkpoints/", "after"), ("sft/artifact$", "before"), ("sft/artifact$", "after"),
    ("average/artifact$", "after"), ("quantize/artifact$", "after"), ("/gate$", "before"), ("/gate$", "after"),
    ("/release$", "after"),
)  # fmt: skip


def old_question(number: int) -> str:
    return old_records([number])[0]["question"]


def new_question(number: int) -> str:
    return new_records([number])[0]["question"]


@contextmanager
def users(
    server: ServerThread, question: Callable[[int], str] = old_question, pause_s: float = 0.01
) -> Iterator[list[int]]:
    """Sessions that ask one thing each while the block lasts. Yields the statuses of the answers so far, 0 for none."""
    over, statuses = threading.Event(), list[int]()

    def ask() -> None:
        with httpx.Client(base_url=server.url, headers=ADMIN, timeout=60) as client:
            for number in itertools.count():
                if over.wait(pause_s):
                    return
                session = {"session_id": f"{question.__name__}-{number}"}
                body = {"model": "tiny", "prompt": question(number), "max_tokens": 1, "metadata": session}
                try:
                    statuses.append(client.post("/v1/completions", json=body).status_code)
                except httpx.HTTPError:
                    statuses.append(0)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield statuses
    finally:
        over.set()
        thread.join()


def exported(server: ServerThread, folder: Path, question: Callable[[int], str], count: int) -> Path:
    """The records of the next `count` requests or more, from the server's log."""
    path, since = folder / f"{question.__name__}.jsonl", time.time()
    with users(server, question, 0.0) as statuses:
        while len(statuses) < count:
            time.sleep(0.05)
    assert set(statuses) == {200}
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") < count:  # the log is written behind the answers
        assert time.monotonic() < deadline
        assert main(["requests", "export", str(folder / LOG), str(path), "--since", str(since)]) == 0
    return path


def hashes(run: Path) -> dict[str, str]:
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in WEIGHTS}


def newest_test(server: ServerThread) -> dict:
    return httpx.get(f"{server.url}/ab.json", headers=ADMIN, timeout=60).json()["tests"][0]


@pytest.mark.slow
def test_from_drift_to_promotion_killed_at_each_boundary(
    world: World, released: Path, server: ServerThread, tmp_path: Path
) -> None:
    """One command on a live server, which answers every request meanwhile. Killed 18 times it ends with the weights and
    the verdict of a loop that nobody disturbed. The champion is named by the link that moves at promotion: once more,
    the command finds the promotion done.
    """
    run, link, reference = tmp_path / "killed" / "next", tmp_path / "current", tmp_path / "reference"
    usual = exported(server, tmp_path, old_question, 5 * WINDOW)
    small = ("--window", str(WINDOW), "--run-length", "5")
    assert main(["drift", "freeze", str(usual), "--reference", str(reference), *small]) == 0
    changed = exported(server, tmp_path, new_question, WINDOW)
    link.symlink_to(world.base / "quantize/artifact")
    drift = ("--drift-reference", reference, "--requests", changed)
    served = ("--server", server.url, "--share", "0.5", "--min-units", "8", "--poll", "0.05", "--current", link)
    words = words_of(world, run, "--champion", link, *drift, *served)
    with users(server, new_question, 0.05) as answered:
        for pattern, when in BOUNDARIES:
            ended = start_process(KILLER, *words, environment={"KILL_AT": pattern, "KILL_WHEN": when})
            code, _, errors = ended.end()
            assert code == -signal.SIGKILL, (pattern, when, errors)
    assert not (run / "promotion.json").exists()
    waiting = start_process(KILLER, *words, environment={"KILL_AT": "nothing", "KILL_WHEN": "before"})
    while not httpx.get(f"{server.url}/ab.json", headers=ADMIN, timeout=60).json()["tests"]:
        assert waiting.is_alive, waiting.end()
    waiting.send_signal(signal.SIGKILL)
    waiting.end()
    with users(server, new_question) as tested:
        for when in ("before", "after"):
            environment = {"KILL_AT": r"promotion\.json$", "KILL_WHEN": when}
            code, _, errors = start_process(KILLER, *words, environment=environment).end()
            assert code == -signal.SIGKILL, errors
        assert main(words) == 0
        num_before = len(tested)
        while len(tested) < num_before + 20:
            time.sleep(0.05)
    assert len(answered) > 100
    assert {*answered, *tested} == {200}
    assert any(report["alarm"] for report in json.loads((run / "drift.json").read_text()))
    uses = world.benchmark.uses
    assert main(words) == 0
    assert world.benchmark.uses == uses
    assert hashes(run) == hashes(released)
    assert (run / "gate/verdict.json").read_bytes() == (released / "gate/verdict.json").read_bytes()
    steps = [record["step"] for record in read_records(run / "sft/metrics.jsonl") if "loss" in record]
    assert steps == list(range(1, 25))
    tests = httpx.get(f"{server.url}/ab.json", headers=ADMIN, timeout=60).json()["tests"]
    assert [test["status"] for test in tests] == ["promoted"]
    assert link.resolve() == (run / "release").resolve()
    verdict = json.loads((run / "gate/verdict.json").read_text())
    assert httpx.get(f"{server.url}/readyz", timeout=60).json()["version"] == verdict["candidate_version"]
    lineage_reaches_the_first_data(world, run)
    assert model_digest(run / "release") == verdict["candidate"]  # the lineage names models by what they are
    (run / "init/artifact").rename(tmp_path / "init")
    moved = (run / "release").rename(tmp_path / "elsewhere")
    assert [model.stage for model in trace(moved).ancestors()] == ["quantize", "sft", ""]  # it is its own record


def lineage_reaches_the_first_data(world: World, run: Path) -> None:
    """From the promoted folder alone."""
    models = list(trace(run / "release").ancestors())
    assert [model.stage for model in models] == ["quantize", "sft", ""]
    new, first, start = models
    promoted = json.loads((run / "promotion.json").read_text())
    assert promoted["content"] == read_manifest(run / "release").content_digest
    new_hash = hashlib.sha256(world.file("new").read_bytes()).hexdigest()
    assert [source["sha256"] for source in new.data["sources"]] == [new_hash]
    assert new.data["replayed"] == [{"name": str(world.base.resolve())}]
    assert new.gate["benchmark"] == world.benchmark.digest
    assert new.config_sha256 == hashlib.sha256((run / "config.yaml").read_bytes()).hexdigest()
    assert new.content == read_manifest(run / "quantize/artifact").content_digest
    assert first.content == read_manifest(world.base / "sft/artifact").content_digest
    assert first.data["sources"] == [{"name": str(world.file("old"))}]
    assert first.data["cleaned"] == read_manifest(world.base / "clean/artifact").content_digest
    assert all(model.versions for model in (new, first))
    assert start.folder == str((world.folder / "model").resolve())
    assert "not recorded" in start.note


def test_what_would_keep_a_release_from_being_promoted_is_said_first(
    world: World, server: ServerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, link = tmp_path / "next", tmp_path / "link"
    link.write_text("a file")
    assert main(words_of(world, run, "--server", server.url, "--current", link)) == 2
    assert "not a symbolic link" in capsys.readouterr().err
    server.stop()
    assert main(words_of(world, run, "--server", server.url)) == 2
    assert "is the server running?" in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == ["loop"]


@pytest.mark.slow
def test_a_failing_release_is_rolled_back_and_not_promoted(
    world: World, released: Path, server: ServerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guard of errors takes it away; the command says so, and so it does when it is repeated."""
    link = tmp_path / "current"
    served = ("--server", server.url, "--share", "0.9", "--min-units", "100000", "--poll", "0.05", "--current", link)
    over = threading.Event()

    def fail() -> None:
        while not over.wait(0.01):
            if server.service.arms is not None:
                server.service.arms.candidate.worker.submit = broken  # type: ignore[attr-defined]
                return

    def broken(jobs: object, caller: object) -> None:
        raise ApiError(500, "broken")

    saboteur = threading.Thread(target=fail)
    saboteur.start()
    with users(server):
        code = main(words_of(world, released, *served))
    over.set()
    saboteur.join()
    assert code == 5
    assert "rolled_back error_limit" in capsys.readouterr().out
    assert newest_test(server)["status"] == "rolled_back"
    assert main(words_of(world, released, *served)) == 5
    assert not (released / "promotion.json").exists()
    assert not link.is_symlink()


def test_the_server_must_serve_the_champion_that_was_judged(
    world: World, server: ServerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "next"
    champion = ("--champion", world.base / "sft/artifact", "--server", server.url, "--poll", "0.05")
    assert main(words_of(world, run, *champion)) == 2
    assert "--champion" in capsys.readouterr().err
    assert newest_test(server)["status"] == "ended"


def test_a_folder_near_the_root_is_traced_like_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lineage", "/"]) == 2
    assert "is neither a model folder" in capsys.readouterr().err


def test_a_server_that_is_away_may_come_back() -> None:
    """A proxy answers for it, or it dies within an answer: neither ends the wait. A key goes to no other host."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, location, length = {"/a": (503, "", "2"), "/b": (200, "", "99"), "/c": (302, "/d", "2")}[
                self.path.removesuffix("/ab.json")
            ]
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}).start()
        url = f"http://127.0.0.1:{proxy.server_address[1]}"
        for path in ("/a", "/b"):
            with pytest.raises(ServerUnreachable):
                AbClient(f"{url}{path}", "key").find("x")
        with pytest.raises(ModelwrightError, match="302"):
            AbClient(f"{url}/c", "key").find("x")
        proxy.shutdown()


def test_a_second_update_goes_on_with_the_first(
    world: World, released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lineage passes through both, and notices that the first one's model was exchanged."""
    second = tmp_path / "second"
    new = write_records(tmp_path / "more.jsonl", new_records(range(5000, 5150)))
    assert main(words_of(world, second, "--margin", "0.5", new=new, model=released)) in (0, 5)  # the gate is not asked
    capsys.readouterr()
    assert main(["lineage", str(second)]) == 0
    shown = capsys.readouterr().out
    for part in (str(new), str(world.file("new")), str(world.file("old")), str(world.folder / "model")):
        assert part in shown
    stages = [model.stage for model in trace(second).ancestors()]
    assert stages == ["average", "average", "sft", ""]
    manifest_file = released / "average/artifact/manifest.json"
    before = manifest_file.read_text()
    manifest = json.loads(before)
    manifest["files"]["model.safetensors"]["sha256"] = "0" * 64
    try:
        manifest_file.write_text(json.dumps(manifest))
        with pytest.raises(ArtifactError, match="another model than"):
            trace(second / "sft/artifact")
    finally:
        manifest_file.write_text(before)
