"""The request log and the state of A/B tests on a real PostgreSQL server, which is started in a temporary folder."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from modelwright.core.artifacts import StorageError
from modelwright.serve.ab import experiment as tables
from modelwright.serve.ab.experiment import FAILED, RATED, SEEN, Assignment, Experiment, ExperimentRequest, RequestEvent
from modelwright.serve.account import request_store
from modelwright.serve.account.database import Database, UrlDatabase, open_database
from serve.conftest import write_model
from serve.patience import wait_until
from serve.test_ab_tests import Process
from serve.test_keys import write_keys
from serve.test_request_log import exported, record

pytestmark = pytest.mark.slow

pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed: pip install 'modelwright[postgres]'")
pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'modelwright[postgres]'")
if shutil.which("postgres") is None or shutil.which("initdb") is None:
    pytest.skip("there is no PostgreSQL server on this machine (postgres, initdb)", allow_module_level=True)

ADMIN = {"Authorization": "Bearer root"}


@dataclass
class Postgres:
    """A server that listens at a socket in `folder`. PostgreSQL does not run as root, so it has another user there."""

    folder: Path
    process: "subprocess.Popen[bytes] | None" = field(default=None)

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@/postgres?host={self.folder}"

    @property
    def _user(self) -> dict:
        if os.geteuid():
            return {}
        names = {one.pw_name for one in pwd.getpwall()}
        return {"user": "postgres" if "postgres" in names else "nobody"}

    def create(self) -> None:
        if self._user:
            shutil.chown(self.folder, self._user["user"])
        words = ["initdb", "-D", f"{self.folder}/data", "-U", "postgres", "-A", "trust", "-N", "-E", "UTF8"]
        subprocess.run([*words, "--locale=C"], check=True, capture_output=True, cwd=self.folder, **self._user)

    def start(self) -> None:
        words = ["postgres", "-D", f"{self.folder}/data", "-k", str(self.folder), "-c", "listen_addresses="]
        self.process = subprocess.Popen(
            [*words, "-F"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.folder, **self._user
        )
        wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            open_database(self.url, setting="test").close()
        except StorageError:
            return False
        return True

    def stop(self) -> None:
        """At once: connections are cut."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
            self.process = None


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """In a folder with a short path, which the name of a socket needs."""
    server = Postgres(Path(tempfile.mkdtemp(prefix="pg", dir="/tmp")))
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.folder)


@pytest.fixture
def database(postgres: Postgres) -> Iterator[Database]:
    """Empty."""
    opened = open_database(postgres.url, setting="requests.log")
    assert isinstance(opened, UrlDatabase)
    for table in ("request_log", "request_log_secret", "experiments", "experiment_units", "experiment_answers"):
        opened.execute(f"DROP TABLE IF EXISTS {table}")
    yield opened
    opened.close()


def test_the_log_keeps_what_it_is_given(database: Database) -> None:
    """As with SQLite: records in order, transactions, feedback, retention; and texts that PostgreSQL refuses."""
    salt = request_store.create_tables(database)
    assert request_store.create_tables(database) == salt
    with database.transaction():
        for number in range(600):
            request_store.insert(database, record(number))
        request_store.insert(database, record(600, prompt="a\0b 你好 \U0001f600", latency_s=None, time=1600.123456789))

    def insert_one_twice() -> None:
        with database.transaction():
            request_store.insert(database, record(601))
            request_store.insert(database, record(5))

    with pytest.raises(StorageError, match="request_log_pkey"):
        insert_one_twice()
    assert request_store.set_feedback(database, "chatcmpl-5", score=0.5, label=None, text="so so")
    assert not request_store.set_feedback(database, "chatcmpl-601", score=0.5, label=None, text=None)
    assert request_store.delete_before(database, 1005.0) == 5
    assert request_store.num_records(database, since=1005, until=1010) == 5
    found = list(request_store.records(database, since=1005, until=1600))
    assert found[0] == record(5, feedback_score=0.5, feedback_text="so so")
    assert found[1:] == [record(number) for number in range(6, 600)]
    [last] = request_store.records(database, since=1600, until=1700)
    assert last == record(600, prompt="a�b 你好 \U0001f600", latency_s=None, time=1600.123456789)
    assert request_store.num_since(database, "u", 1598) == 3


def test_the_state_of_a_test_is_the_same_as_in_sqlite(database: Database, tmp_path: Path) -> None:
    """The same events one after the other in both; numbers come back to the last bit."""
    request = ExperimentRequest(name="next", path="runs/next", share=0.1, unit="session")
    first = Experiment(
        name="next",
        request=request,
        share=0.1,
        control_version="a",
        treatment_version="b",
        started_at=1764000000.123456,
    )
    lite = open_database(str(tmp_path / "ab.sqlite"), setting="requests.ab_state")
    states = []
    for one in (database, lite):
        tables.create_tables(one)
        tables.create_tables(one)
        with one.transaction():
            tables.insert(one, first)
            for number in range(150):
                arm, unit = "AB"[number % 3 == 0], f"unit {number % 40}"
                event = RequestEvent(arm=arm, share=0.1, is_error=number % 50 == 0, latency_s=0.1 + number / 7)
                assert not tables.take_request(one, f"answer {number}", Assignment("next", unit, arm, 0.1), event)
            assert tables.take_score(one, "answer 7", 0.75) == (True, "next", "")
            assert tables.take_score(one, "no answer", 0.75) == (False, "", "")
        running = tables.find_running(one)
        assert running is not None
        assert (running.share, running.started_at, running.salt) == (0.1, first.started_at, first.salt)
        units = sorted(one.rows("SELECT unit, had FROM experiment_units"))
        assert sum(bool(had & SEEN) for _, had in units) == 40
        assert sum(bool(had & FAILED) for _, had in units) == 3
        assert sum(bool(had & RATED) for _, had in units) == 1
        states.append((running.state.to_json(), units))
        assert tables.end(one, "next", "promoted")
        assert not tables.end(one, "next", "ended")
        assert list(one.rows("SELECT COUNT(*) FROM experiment_answers")) == [(0,)]
    assert states[0] == states[1]
    lite.close()


def test_a_server_loses_nothing_when_it_is_killed_or_the_database_restarts(
    postgres: Postgres, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`modelwright serve` with log and tests in PostgreSQL, named by the environment, while users ask: `kill -9` in the
    middle leaves no count half written, and after a restart of the database the server writes again.
    """
    folders = [write_model(tmp_path / arm, seed=seed) for arm, seed in (("A", 7), ("B", 8))]
    keys = write_keys(tmp_path / "keys.yaml", root={"scopes": ["infer", "admin", "metrics", "feedback"]})
    monkeypatch.setenv("REQUESTS_URL", postgres.url)
    settings = ("--requests.log", "env:REQUESTS_URL", "--requests.ab_state", "env:REQUESTS_URL")

    def ask(server: Process, session: str) -> httpx.Response:
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": 1, "metadata": {"session_id": session}}
        return httpx.post(f"{server.url}/v1/completions", json=body, headers=ADMIN, timeout=60)

    def arms(server: Process) -> dict[str, str]:
        return {name: ask(server, name).json()["system_fingerprint"] for name in ("anna", "ben", "cleo", "dan", "eve")}

    server = Process(folders[0], tmp_path, keys, settings)
    body = {"name": "next", "path": str(folders[1]), "share": 0.5}
    assert httpx.post(f"{server.url}/admin/ab", json=body, headers=ADMIN, timeout=60).status_code == 200
    before, over = arms(server), threading.Event()

    def load(number: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            try:
                ask(server, f"{number}/{count}")
            except httpx.HTTPError:
                return

    threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: _count(database, "experiment_answers") > 30)
    server.kill()
    over.set()
    for thread in threads:
        thread.join()
    _require_consistent(database)
    server = Process(folders[0], tmp_path, keys, settings)
    try:
        assert arms(server) == before
        postgres.stop()
        assert ask(server, "while it is away").status_code == 200
        postgres.start()
        again = open_database(postgres.url, setting="test")
        seen = _count(again, "request_log")

        def is_logged() -> bool:
            ask(server, "afterwards")
            return _count(again, "request_log") > seen and _count(again, "experiment_answers") > 30

        wait_until(is_logged)
        _require_consistent(again)
        again.close()
    finally:
        server.kill()
    rows = exported(Path("env:REQUESTS_URL"), tmp_path / "out.parquet")
    assert len(rows) > 30
    assert {row["answer_by"] for row in rows} == {"modelwright"}


def _count(database: Database, table: str) -> int:
    return next(iter(list(database.rows(f"SELECT COUNT(*) FROM {table}"))))[0]


def _require_consistent(database: Database) -> None:
    """What the rows of single units and answers say of the counts, which are written in the same transactions."""
    time.sleep(0.3)  # the killed server's transaction is rolled back as soon as the database notices
    with database.transaction():
        [experiment] = list(tables.experiments(database))
        units = list(database.rows("SELECT had FROM experiment_units"))
        num_answers = _count(database, "experiment_answers")
    state = experiment.state
    for name, bit in (("seen", SEEN), ("failed", FAILED)):
        assert sum(bool(had & bit) for (had,) in units) == sum(state.events[name].of_arm(arm) for arm in "AB")
    assert num_answers == sum(state.requests.values())
