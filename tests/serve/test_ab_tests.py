"""A/B tests over HTTP: arms, rollback, promotion, feedback, shadows, and the state after `kill -9`."""

import asyncio
import itertools
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from modelwright.compress.int8 import Int8WeightsConfig
from modelwright.infer.engine import EngineConfig
from modelwright.serve.ab.client import AbClient, ServerUnreachable
from modelwright.serve.ab.experiment import (
    FAILED,
    RATED,
    SEEN,
    Experiment,
    ExperimentRequest,
    ExperimentState,
    create_tables,
    end,
    experiments,
    insert,
    set_share,
)
from modelwright.serve.account.database import SqliteDatabase
from modelwright.serve.config import RequestsConfig, ServeConfig
from modelwright.serve.engines.backends import load_engines
from modelwright.serve.errors import ApiError
from modelwright.serve.load import ModelSource, load_folder, weights_fingerprint
from modelwright.serve.server import ServerThread
from serve.conftest import write_model
from serve.patience import held, wait_until
from serve.test_keys import write_keys
from serve.test_monitoring import samples
from serve.test_scores import write_judge

pytestmark = pytest.mark.slow

ADMIN = {"Authorization": "Bearer root"}
ENGINE = EngineConfig(max_num_seqs=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models by arm."""
    return {arm: write_model(tmp_path_factory.mktemp("models") / arm, seed=seed) for arm, seed in (("A", 7), ("B", 8))}


@pytest.fixture(scope="module")
def versions(folders: dict[str, Path]) -> dict[str, str]:
    return {arm: weights_fingerprint(load_folder(path, Int8WeightsConfig())[0]) for arm, path in folders.items()}


@pytest.fixture
def start(folders: dict[str, Path], tmp_path: Path) -> Iterator:
    """Starts servers with A, all with the same state."""
    keys = write_keys(tmp_path / "keys.yaml", root={"scopes": ["infer", "admin", "metrics", "feedback"]}, user={})
    started: list[ServerThread] = []

    def make(arm: str = "A", **settings) -> ServerThread:
        config = ServeConfig(port=0, engine=ENGINE, keys_file=keys)
        source = ModelSource(name="tiny", folder=folders[arm])
        requests = RequestsConfig(ab_state=str(tmp_path / "ab.sqlite"), **settings)
        client, tokenizer = load_engines(source, config)
        server = ServerThread(client, tokenizer, config, model_name="tiny", source=source, requests=requests)
        started.append(server.start())
        return server

    yield make
    for server in started:
        server.stop_soon(at_once=True)
        assert server.join(120)


def post(server: ServerThread, route: str, /, **body) -> httpx.Response:
    return httpx.post(f"{server.url}{route}", json=body, headers=ADMIN, timeout=60, verify=False)


def begin(server: ServerThread, folder: Path, **fields) -> dict:
    reply = post(server, "/admin/ab", **({"name": "next", "path": str(folder)} | fields))
    assert reply.status_code == 200, reply.text
    return reply.json()


def report(server: ServerThread) -> dict:
    return httpx.get(f"{server.url}/ab.json", headers=ADMIN, timeout=60, verify=False).json()["tests"][0]


def ask(server: ServerThread, session: str, **fields) -> httpx.Response:
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 2, "temperature": 0}
    return post(server, "/v1/completions", **(body | {"metadata": {"session_id": session}} | fields))


def arms(server: ServerThread, sessions: list[str]) -> dict[str, str]:
    """The version that each session gets."""
    return {session: ask(server, session).json()["system_fingerprint"] for session in sessions}


def counted(server: ServerThread, num_requests: int) -> dict:
    wait_until(lambda: sum(report(server)["requests"].values()) == num_requests)
    return report(server)


def test_arms_are_sticky_and_nobody_leaves_b_as_it_grows(start, folders, versions, tmp_path: Path):
    server = start(log=str(tmp_path / "requests.sqlite"))
    begun = begin(server, folders["B"], share=0.3)
    assert begun["versions"] == versions
    assert begun["guard"]["promised_requests"] > 100
    sessions = [f"session {number}" for number in range(39)] + ["anna.schmidt@example.org"]
    before = arms(server, sessions)
    assert set(before.values()) == set(versions.values())
    assert arms(server, sessions) == before
    assert post(server, "/admin/ab/share", share=0.7).json()["share"] == 0.7
    after = arms(server, sessions)
    assert all(after[session] == versions["B"] for session in sessions if before[session] == versions["B"])
    assert list(after.values()).count(versions["B"]) > list(before.values()).count(versions["B"])
    found = counted(server, 120)
    assert sum(found["sample_ratio"]["units"].values()) == 40
    assert found["sample_ratio"]["is_right"]
    assert found["errors"] == {"A": 0, "B": 0}
    server.stop()
    assert not [1 for file in tmp_path.glob("*.sqlite*") if b"anna.schmidt" in file.read_bytes()]
    with sqlite3.connect(tmp_path / "requests.sqlite") as log:
        rows = log.execute("SELECT arm, version, COUNT(*) FROM request_log GROUP BY arm, version").fetchall()
    assert {(arm, version) for arm, version, _ in rows} == {("A", versions["A"]), ("B", versions["B"])}
    assert {arm: count for arm, _, count in rows} == found["requests"]


async def keep_asking(server: ServerThread, count: int, until) -> None:
    """Requests of new sessions, eight at a time, until something has happened."""
    numbers = iter(range(count))

    async def some(client: httpx.AsyncClient) -> None:
        for number in numbers:
            if until():
                return
            body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "metadata": {"session_id": str(number)}}
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code in (200, 500)

    async with httpx.AsyncClient(base_url=server.url, headers=ADMIN, timeout=60) as client:
        await asyncio.gather(*(some(client) for _ in range(8)))


def test_a_version_with_5_percent_errors_is_rolled_back_as_promised(start, folders, versions):
    server = start()
    begun = begin(server, folders["B"], share=0.9)
    candidate = server.service.arms.candidate
    submit, numbers = candidate.worker.submit, itertools.count(1)

    def failing(jobs, caller):
        if next(numbers) % 20 == 0:
            raise ApiError(500, "broken")
        return submit(jobs, caller)

    candidate.worker.submit = failing
    asyncio.run(keep_asking(server, 2000, lambda: server.service.arms is None))
    found = report(server)
    assert (found["status"], found["reason"]) == ("rolled_back", "error_limit")
    assert begun["guard"]["promised_error_rate"] == 0.05
    assert found["requests"]["B"] <= begun["guard"]["promised_requests"]
    assert set(arms(server, [f"session {number}" for number in range(8)]).values()) == {versions["A"]}
    wait_until(lambda: not server.service.retiring)
    assert samples(server, **ADMIN)['modelwright_ab_rollbacks_total{reason="error_limit"}'] == 1
    assert found["fixed_horizon"]["failed"]["p_value"] < 1


def test_feedback_takes_a_version_away_that_is_rated_worse(start, folders, versions):
    server = start()
    begin(server, folders["B"])
    for number in range(600):
        reply = ask(server, str(number), max_tokens=1).json()
        score = -0.5 if reply["system_fingerprint"] == versions["B"] else 0.5
        given = post(server, "/v1/feedback", id=reply["id"], score=score + 0.1 * (number % 3))
        if server.service.arms is None:
            break
        assert given.json()["status"] == "recorded"
    found = report(server)
    assert (found["status"], found["reason"]) == ("rolled_back", "quality")
    score = found["measures"][2]
    assert score["counts"]["B"] >= 50
    assert score["high"] < 0
    assert pytest.approx(score["B"] - score["A"], abs=0.1) == -1
    assert found["fixed_horizon"]["score"]["p_value"] < 1e-9


def test_who_may_test_what_and_when(start, folders, versions, tmp_path: Path):
    server = start()
    body = {"name": "next", "path": str(folders["B"])}
    assert httpx.post(f"{server.url}/admin/ab", json=body, headers={"Authorization": "Bearer user"}).status_code == 403
    assert httpx.get(f"{server.url}/ab.json", headers={"Authorization": "Bearer user"}).status_code == 403
    assert post(server, "/admin/ab/end", promote=True).json()["error"]["code"] == "no_test"
    for wrong, param in (({"share": 1}, "share"), ({"name": "A b"}, "name"), ({"path": str(tmp_path / "no")}, "path")):
        refused = post(server, "/admin/ab", **(body | wrong))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    refused = post(server, "/admin/ab", **(body | {"path": str(write_judge(tmp_path / "judge"))}))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_task")
    begin(server, folders["B"])
    for path, again in (("/admin/ab", body | {"name": "other"}), ("/admin/reload", {"path": str(folders["B"])})):
        refused = post(server, path, **again)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "test_running")
    assert post(server, "/admin/ab/end", promote=True).json()["status"] == "promoted"
    assert set(arms(server, ["1", "2", "3"]).values()) == {versions["B"]}
    assert httpx.get(f"{server.url}/readyz").json()["version"] == versions["B"]
    wait_until(lambda: not server.service.retiring)
    assert post(server, "/admin/ab", **body).json()["error"]["code"] == "name_taken"
    begin(server, folders["A"], name="back")
    assert post(server, "/admin/ab/end", promote=False).json()["status"] == "ended"
    assert set(arms(server, ["1", "2", "3"]).values()) == {versions["B"]}


def test_the_share_of_a_test_that_a_guard_has_ended_stays(tmp_path: Path):
    database = SqliteDatabase(tmp_path / "ab.sqlite")
    create_tables(database)
    request = ExperimentRequest(name="next", path="runs/next")
    insert(database, Experiment(name="next", request=request, share=0.5, control_version="a", treatment_version="b"))
    assert set_share(database, "next", 0.6)
    assert end(database, "next", "rolled_back", "errors")
    assert not set_share(database, "next", 0.7)
    assert [one.share for one in experiments(database)] == [0.6]
    database.close()


def test_a_server_that_dies_while_it_answers_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ServerUnreachable, match="is the server running"):
            AbClient(f"http://127.0.0.1:{listener.getsockname()[1]}").find("next")
        thread.join()


def test_a_server_without_state_says_how_to_keep_one(slow_server, tmp_path: Path):
    keys = write_keys(tmp_path / "keys.yaml", root={"scopes": ["infer", "admin", "metrics"]})
    server = slow_server(keys_file=keys)
    refused = post(server, "/admin/ab", name="next", path="any")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "tests_off")
    assert "--requests.ab_state" in refused.json()["error"]["message"]
    assert httpx.get(f"{server.url}/ab.json", headers=ADMIN).json() == {"is_on": False, "tests": []}


def test_shadows_never_delay_a_user(engines_in_threads, start, folders, versions):
    server = start()
    begin(server, folders["B"], mode="shadow")
    candidate = server.service.arms.candidate
    steps = candidate.worker.client.engine.step
    overlaps: list[int] = []

    def watched():
        overlaps.append(server.service.worker.num_open)
        time.sleep(0.005)
        return steps()

    candidate.worker.client.engine.step = watched
    first = ask(server, "1", max_tokens=40)
    assert first.json()["system_fingerprint"] == versions["A"]
    wait_until(lambda: candidate.worker.num_open == 1)
    with held(server):  # a user's request is open, and A makes no step: nothing of B may run meanwhile
        body = {"model": "tiny", "prompt": "the", "max_tokens": 2, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=ADMIN, timeout=60):
            wait_until(lambda: server.service.worker.num_open == 1)
            assert candidate.worker.num_open == 0, "the copy is taken out before the request is even read"
            wait_until(lambda: not candidate.worker.client.engine.has_work)
            num_steps = len(overlaps)
            time.sleep(0.2)
            assert len(overlaps) == num_steps
    wait_until(lambda: report(server)["shadows"].get("answered", 0) >= 1)
    found = report(server)
    assert found["shadows"]["different"] == 1, "two models of different weights"
    assert found["requests"]["B"] == found["shadows"]["answered"]
    assert samples(server, **ADMIN)['vllm:num_requests_running{model_name="tiny"}'] == 0
    assert set(arms(server, [str(number) for number in range(8)]).values()) == {versions["A"]}


def test_a_test_goes_on_after_a_restart_with_the_same_versions_only(start, folders, versions):
    server = start()
    begin(server, folders["B"])
    sessions = [f"session {number}" for number in range(20)]
    before = arms(server, sessions)
    found = counted(server, 20)
    server.stop()
    again = start()
    assert report(again) == found
    assert arms(again, sessions) == before
    assert counted(again, 40)["sample_ratio"]["units"] == found["sample_ratio"]["units"]
    again.stop()
    other = start(arm="B")
    assert report(other)["status"] == "interrupted"
    assert "another version" in report(other)["reason"]
    assert set(arms(other, sessions).values()) == {versions["B"]}


class Process:
    """`modelwright serve` as a process that can be killed."""

    def __init__(self, folder: Path, tmp_path: Path, keys: str, requests: Sequence[str] = ()) -> None:
        """requests: options that say where log and tests are kept, other than in `tmp_path`."""
        command = [sys.executable, "-m", "modelwright.cli.main", "serve", str(folder), "--port", "0"]
        files = [
            "--requests.ab_state",
            str(tmp_path / "ab.sqlite"),
            "--requests.log",
            str(tmp_path / "requests.sqlite"),
        ]
        settings = ["--keys_file", keys, "--served-model-name", "tiny", *(requests or files)]
        self.process = subprocess.Popen(
            [*command, *settings], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if " at http" in line)
        self.url = line.split(" at ")[1].split()[0]

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def recounted(path: Path) -> dict[str, dict[str, int]]:
    """What the rows of single units say of the counts, which are written in the same transactions."""
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT had FROM experiment_units").fetchall()
        num_answers = database.execute("SELECT COUNT(*) FROM experiment_answers").fetchone()[0]
        (text,) = database.execute("SELECT state FROM experiments").fetchone()
    state = ExperimentState.from_json(text)
    units = {name: sum(bool(had & bit) for (had,) in rows) for name, bit in (("seen", SEEN), ("failed", FAILED))}
    assert units == {name: sum(state.events[name].of_arm(arm) for arm in "AB") for name in units}
    assert sum(bool(had & RATED) for (had,) in rows) == state.scores["A"].count + state.scores["B"].count
    assert num_answers == sum(state.requests.values())
    return json.loads(text)


def test_the_state_is_exact_after_kill_9(folders, tmp_path: Path):
    """Killed in the middle of many requests, twice: no count is half written, acknowledged feedback is there, every
    session keeps its arm.
    """
    keys = write_keys(tmp_path / "keys.yaml", root={"scopes": ["infer", "admin", "metrics", "feedback"]})
    seen: dict[str, set[str]] = {}
    rated: set[str] = set()

    async def load(server: Process, seconds: float) -> None:
        end = time.monotonic() + seconds
        numbers = itertools.count()

        async def some(client: httpx.AsyncClient) -> None:
            while True:
                session = str(next(numbers) % 300)
                body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "metadata": {"session_id": session}}
                reply = (await client.post("/v1/completions", json=body)).json()
                seen.setdefault(session, set()).add(reply["system_fingerprint"])
                given = await client.post("/v1/feedback", json={"id": reply["id"], "score": 0.25})
                if given.status_code == 200:
                    rated.add(reply["id"])
                if time.monotonic() > end and server.process.poll() is None:
                    server.kill()

        async with httpx.AsyncClient(base_url=server.url, headers=ADMIN, timeout=60) as client:
            ends = await asyncio.gather(*(some(client) for _ in range(4)), return_exceptions=True)
        assert all(isinstance(error, httpx.TransportError) for error in ends)

    before: dict = {}
    for attempt in range(2):
        server = Process(folders["A"], tmp_path, keys)
        if attempt == 0:
            body = {"name": "next", "path": str(folders["B"]), "share": 0.4}
            assert httpx.post(f"{server.url}/admin/ab", json=body, headers=ADMIN, timeout=60).status_code == 200
        else:
            (found,) = httpx.get(f"{server.url}/ab.json", headers=ADMIN, timeout=60).json()["tests"]
            assert (found["status"], found["requests"]) == ("running", before["requests"])
        asyncio.run(load(server, 1.0))
        state = recounted(tmp_path / "ab.sqlite")
        if before:
            assert sum(state["requests"].values()) > sum(before["requests"].values())
        before = state
    assert all(len(found) == 1 for found in seen.values()), "every session keeps its arm"
    assert len(set.union(*seen.values())) == 2
    with sqlite3.connect(tmp_path / "requests.sqlite") as log:
        kept = {name for (name,) in log.execute("SELECT id FROM request_log WHERE feedback_score = 0.25")}
    assert rated <= kept, "feedback is committed before it is acknowledged"
