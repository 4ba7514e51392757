"""The request and feedback log: what is in it, what never is, who is counted, and what a training makes of it."""

import asyncio
import json
import re
import sqlite3
import stat
import threading
import time
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
import yaml

from modelwright.cli.main import main
from modelwright.core.artifacts import StorageError
from modelwright.core.config import ConfigError, DataError, dump
from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents
from modelwright.recipes.load import recipe
from modelwright.serve.account import request_store
from modelwright.serve.account.database import DatabaseWriter, SqliteDatabase, UrlDatabase, WriterBusy, open_database
from modelwright.serve.account.observers import RedactionFailed, TextRedaction
from modelwright.serve.account.request_store import FIELDS, SCHEMA, RequestRecord
from modelwright.serve.config import RequestsConfig
from modelwright.serve.server import ServerThread
from modelwright.serve.service import pseudonym
from planted_values import planted_values
from refusals import config_error
from serve.patience import held, wait_until
from serve.test_keys import write_keys
from serve.test_monitoring import samples

KEYS = [
    "id", "time", "session", "user", "route", "model", "version", "arm", "prompt", "answer", "prompt_tokens",
    "completion_tokens", "finish_reason", "status", "ttft_s", "latency_s", "feedback_score", "feedback_label",
    "feedback_text", "answer_by",
]  # fmt: skip
"""What other programs rely on."""

PERSONAL = [
    "anna.schmidt@example.org", "+49 30 901820", "DE89 3704 0044 0532 0130 00", "4111 1111 1111 1111",
    "81.2.69.142", "AKIAQ3EGR7XK2PZL4MVT", "https://anna:hunter2@example.org/",
]  # fmt: skip


def record(number: int = 0, **fields) -> RequestRecord:
    values = {
        "id": f"chatcmpl-{number}", "time": 1000.0 + number, "session": "s", "user": "u", "route": "chat",
        "model": "tiny", "version": "fp_0", "arm": "", "prompt": "what is it?", "answer": "a tree", "prompt_tokens": 3,
        "completion_tokens": 2, "finish_reason": "stop", "status": 200, "ttft_s": 0.1, "latency_s": 0.2,
    }  # fmt: skip
    return RequestRecord(**(values | fields))


def chat(server: ServerThread, text: str, *, key: str = "", **fields) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body | fields, headers=headers, timeout=60)


def feedback(server: ServerThread, answer_id: str, *, key: str = "", **fields) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{server.url}/v1/feedback", json={"id": answer_id} | fields, headers=headers, timeout=60)


def exported(path: Path, target: Path, *options: str) -> list[dict]:
    assert main(["requests", "export", str(path), str(target), *options]) == 0
    if target.suffix == ".parquet":
        return pq.read_table(target).to_pylist()
    return [json.loads(line) for line in target.read_text().splitlines()]


def num_logged(path: Path) -> int:
    with sqlite3.connect(path) as database:
        return database.execute("SELECT COUNT(*) FROM request_log").fetchone()[0]


def test_the_fields_are_those_that_others_read():
    assert list(FIELDS) == KEYS == SCHEMA.names


def test_personal_data_reach_no_log_export_or_metric(slow_server, tmp_path: Path, caplog, capsys):
    path = tmp_path / "log" / "requests.sqlite"
    server = slow_server(requests=RequestsConfig(log=str(path)), max_running=4)
    ids = []
    for number, secret in enumerate(PERSONAL):
        reply = chat(server, f"write to {secret} please", user=secret, metadata={"session_id": secret})
        ids.append(reply.json()["id"])
        assert feedback(server, ids[-1], score=-1, text=f"ask {secret}", label="too long").status_code == 200
        echo = {"model": "tiny", "prompt": f"the {secret}", "max_tokens": 2, "echo": True, "stream": number % 2 == 0}
        assert httpx.post(f"{server.url}/v1/completions", json=echo, timeout=60).status_code == 200
    wait_until(lambda: num_logged(path) == 2 * len(PERSONAL))
    metrics = httpx.get(f"{server.url}/metrics").text
    server.stop()
    written = exported(path, tmp_path / "out.jsonl")
    assert exported(path, tmp_path / "out.parquet") == written
    capsys.readouterr()
    assert len(written) == 2 * len(PERSONAL)
    assert {entry["route"] for entry in written} == {"chat", "completion"}
    by_id = {entry["id"]: entry for entry in written}
    assert [by_id[one]["feedback_score"] for one in ids] == [-1.0] * len(PERSONAL)
    assert re.fullmatch(r"write to <EMAIL_1> please", by_id[ids[0]]["prompt"])
    assert by_id[ids[0]]["feedback_text"] == "ask <EMAIL_1>"
    everything = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    everything += [metrics.encode(), caplog.text.encode()]
    for secret in PERSONAL:
        for one in (secret, secret.replace(" ", "")):
            assert not [1 for content in everything if one.encode() in content], one
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_200_planted_values_reach_neither_log_nor_metrics(slow_server, tmp_path: Path, caplog):
    """Ten in each request."""
    path, values = tmp_path / "requests.sqlite", planted_values()
    server = slow_server(requests=RequestsConfig(log=str(path)), max_running=4)
    for first in range(0, len(values), 10):
        together = "; ".join(values[first : first + 10])
        body = {"model": "tiny", "prompt": f"Entries: {together}.", "max_tokens": 1, "echo": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    wait_until(lambda: num_logged(path) == len(values) / 10)
    metrics = httpx.get(f"{server.url}/metrics").text
    server.stop()
    everything = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    everything += [metrics.encode(), caplog.text.encode()]
    for value in values:
        for written in (value, value.replace(" ", "")):
            assert not [1 for content in everything if written.encode() in content], written


def test_a_record_says_what_happened(slow_server, tmp_path: Path, capsys):
    path = tmp_path / "requests.sqlite"
    server = slow_server(requests=RequestsConfig(log=str(path)), max_running=4, clamp_max_tokens=False)
    before = time.time()
    reply = chat(server, "what does this do?", user="one", n=2, seed=1, temperature=1).json()
    followed = [
        {"role": "user", "content": "what does this do?"}, {"role": "assistant", "content": "it copies"},
        {"role": "user", "content": "what?"},
    ]  # fmt: skip
    chat(server, "", messages=followed, user="one")
    chat(server, "what does this do?", user="two")
    chat(server, "something else", user="one")
    assert chat(server, "too long", max_tokens=100_000).status_code == 400
    body = {"model": "tiny", "prompt": [70, 71], "max_tokens": 9, "ignore_eos": True}
    with held(server, after=2):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
        wait_until(lambda: num_logged(path) == 6)
    first, second, third, fourth, refused, left = exported(path, tmp_path / "out.jsonl")
    assert list(first) == KEYS
    assert first["id"] == reply["id"]
    assert before <= first["time"] <= time.time()
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert (first["prompt"], first["answer"]) == ("what does this do?", "\n\n".join(texts))
    assert first["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    assert first["completion_tokens"] == reply["usage"]["completion_tokens"]
    assert (first["version"], first["status"]) == (server.service.model.fingerprint, 200)
    assert 0 < first["ttft_s"] <= first["latency_s"]
    assert first["session"] == second["session"] != third["session"]
    assert first["session"] != fourth["session"]
    assert first["user"] == second["user"] == fourth["user"] != third["user"]
    assert (refused["status"], refused["prompt"], refused["answer"], refused["ttft_s"]) == (400, "too long", "", None)
    assert (left["status"], left["latency_s"]) == (499, None)
    assert left["prompt"] == server.service.model.tokenizer.decode([70, 71])
    assert exported(path, tmp_path / "none.jsonl", "--until", "2020-01-01") == []
    assert len(exported(path, tmp_path / "some.jsonl", "--since", str(fourth["time"]))) == 3
    assert main(["requests", "prune", str(path), "--older-than-days", "0"]) == 0
    assert capsys.readouterr().out.endswith("6 records deleted\n")
    assert num_logged(path) == 0
    assert b"copies" not in path.read_bytes()


def test_logged_tokens_are_those_of_usage(slow_server, tmp_path: Path):
    """The stop token and tokens without text count, a prompt that is shown does not; a stream keeps no tokens."""
    path = tmp_path / "requests.sqlite"
    server = slow_server(requests=RequestsConfig(log=str(path)), max_running=4)
    ends = {"stop_token_ids": list(range(100, 160)), "min_tokens": 3, "max_tokens": 60}
    bodies = [{"max_tokens": 5, "ignore_eos": True}, ends, {"max_tokens": 0, "echo": True}, ends | {"n": 2}]
    usages = []
    for number, more in enumerate(bodies):
        for has_ids in (False, True):
            body = {"model": "tiny", "prompt": "a", "seed": number, "logprobs": 2, "return_token_ids": has_ids} | more
            whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
                events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
            for usage, choices in (
                (whole["usage"], whole["choices"]),
                (events[-1]["usage"], [choice for event in events for choice in event["choices"]]),
            ):
                if has_ids:
                    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
                usages.append(usage["completion_tokens"])
    wait_until(lambda: num_logged(path) == len(usages))
    assert [record["completion_tokens"] for record in exported(path, tmp_path / "out.jsonl")] == usages
    assert usages[:4] == [5] * 4
    assert usages[8:12] == [0] * 4
    assert {record["finish_reason"] for record in exported(path, tmp_path / "again.jsonl")[4:8]} == {"stop"}


def test_feedback_is_idempotent_and_asks_for_its_scope(slow_server, tmp_path: Path):
    keys = write_keys(tmp_path / "keys.yaml", app={"scopes": ["infer", "feedback"]}, user={})
    path = tmp_path / "requests.sqlite"
    server = slow_server(requests=RequestsConfig(log=str(path)), keys_file=keys)
    answer_id = chat(server, "what?", key="app").json()["id"]
    assert feedback(server, answer_id, key="user", score=1).status_code == 403
    for _ in range(3):
        assert feedback(server, answer_id, key="app", score=1, label="good").json() == {
            "status": "recorded", "id": answer_id,
        }  # fmt: skip
    (kept,) = exported(path, tmp_path / "out.jsonl")
    assert (kept["feedback_score"], kept["feedback_label"], kept["feedback_text"]) == (1.0, "good", None)
    assert feedback(server, answer_id, key="app", score=-1).status_code == 200
    (kept,) = exported(path, tmp_path / "out.jsonl")
    assert (kept["feedback_score"], kept["feedback_label"]) == (-1.0, None)
    for fields, param in (({"score": 2}, "score"), ({"label": "a@b"}, "label"), ({}, None), ({"rate": 1}, "rate")):
        refused = feedback(server, answer_id, key="app", **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    unknown = feedback(server, "chatcmpl-unknown", key="app", score=1)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "answer_not_found")
    off = feedback(slow_server(), answer_id, score=1)
    assert (off.status_code, off.json()["error"]["code"]) == (404, "feedback_off")


def test_users_are_capped_and_old_records_deleted(slow_server, tmp_path: Path):
    path = tmp_path / "requests.sqlite"
    database = SqliteDatabase(path)
    salt = request_store.create_tables(database)
    now = time.time()
    for number, age_days in enumerate((40, 2, 0.5)):
        user = pseudonym(salt, "anonymous\0one")
        request_store.insert(
            database, record(number, time=now - age_days * 86_400, user=user, answer="ancient history")
        )
    database.close()
    server = slow_server(requests=RequestsConfig(log=str(path), max_per_user=3, retention_days=30))
    for user, count in (("one", 4), ("two", 1)):
        for _ in range(count):
            assert chat(server, "what?", user=user).status_code == 200
    wait_until(lambda: samples(server).get('modelwright_unlogged_requests_total{reason="user_cap"}') == 2)
    wait_until(lambda: samples(server)["modelwright_logged_requests_total"] == 3)
    server.stop()
    assert num_logged(path) == 5, "two of before, two of the first user, one of the second"


def test_a_failed_check_keeps_the_text_out(monkeypatch: pytest.MonkeyPatch):
    def failing(*arguments, failures, **options):
        failures["phone"] += 1
        return []

    monkeypatch.setattr("modelwright.data.clean.steps.privacy.find", failing)
    with pytest.raises(RedactionFailed, match="phone"):
        TextRedaction().text("call +49 30 901820")


def test_the_writer_never_waits_and_counts_what_it_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modelwright.serve.account.database.QUEUE_TASKS", 4)
    database = SqliteDatabase(tmp_path / "some.sqlite")
    database.execute("CREATE TABLE numbers (number INTEGER PRIMARY KEY)")
    lost: list[tuple[str, int]] = []
    writer = DatabaseWriter("test", database, dropped=lambda *what: lost.append(what), housekeeping=lambda _: None)

    def add(number: int):
        return lambda one: one.execute("INSERT INTO numbers VALUES (:number)", {"number": number})

    assert [writer.offer(add(number)) for number in (1, 2, 2, 3, 4)] == [True] * 4 + [False]
    with pytest.raises(WriterBusy):
        asyncio.run(writer.call(add(5)))
    writer.start()
    writer.close()
    assert lost == [("queue_full", 1), ("failed", 1)], "the second 2 fails, and takes no other along"
    with sqlite3.connect(tmp_path / "some.sqlite") as check:
        assert check.execute("SELECT number FROM numbers").fetchall() == [(1,), (2,), (3,)]


def test_housekeeping_comes_round_however_busy_the_writer_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modelwright.serve.account.database.HOUSEKEEPING_PERIOD_S", 0.1)
    times: list[float] = []
    database = SqliteDatabase(tmp_path / "some.sqlite")
    writer = DatabaseWriter("test", database, dropped=print, housekeeping=lambda _: times.append(time.monotonic()))
    writer.start()

    def busy() -> bool:
        writer.offer(lambda _: None)
        return len(times) >= 3

    wait_until(busy, timeout_s=20)
    writer.close()


def test_a_caller_who_leaves_stops_no_writer(tmp_path: Path):
    async def run() -> int:
        may_go = threading.Event()
        writer = DatabaseWriter("test", SqliteDatabase(tmp_path / "some.sqlite"), dropped=print, housekeeping=print)
        writer.start()
        leaving = asyncio.create_task(writer.call(lambda _: may_go.wait(20)))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        may_go.set()
        found = await asyncio.wait_for(writer.call(lambda _: 7), 20)
        await asyncio.to_thread(writer.close)
        return found

    assert asyncio.run(run()) == 7


def test_a_commit_that_fails_leaves_no_transaction_open(tmp_path: Path):
    database = SqliteDatabase(tmp_path / "some.sqlite")
    database.execute("PRAGMA foreign_keys = ON")
    database.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
    database.execute("CREATE TABLE children (parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(StorageError, match="FOREIGN KEY"), database.transaction():
        database.execute("INSERT INTO children VALUES (1)")
    with database.transaction():
        database.execute("INSERT INTO parents VALUES (1)")
    assert list(database.rows("SELECT COUNT(*) FROM children")) == [(0,)]
    database.close()


def test_an_answer_that_repeats_its_prompt_is_logged_whole(slow_server, tmp_path: Path):
    path = tmp_path / "requests.sqlite"
    server = slow_server(requests=RequestsConfig(log=str(path)))
    (token,) = server.service.model.tokenizer.encode("the", with_begin=False)[:1]
    prompt = server.service.model.tokenizer.decode([token])
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "logit_bias": {str(token): 100}, "temperature": 0}
    for echo in (False, True):
        reply = httpx.post(f"{server.url}/v1/completions", json=body | {"echo": echo}, timeout=60)
        assert reply.json()["choices"][0]["text"] == prompt * (4 if echo else 3)
    server.stop()
    assert [entry["answer"] for entry in exported(path, tmp_path / "out.jsonl")] == [prompt * 3] * 2


@pytest.mark.parametrize("kind", ["file", "url"])
def test_both_databases_do_the_same(kind: str, tmp_path: Path):
    if kind == "url":
        pytest.importorskip("sqlalchemy")
    path = tmp_path / "log.sqlite"
    location = str(path) if kind == "file" else f"sqlite:///{path}"
    database = open_database(location, setting="path")
    assert isinstance(database, SqliteDatabase if kind == "file" else UrlDatabase)
    salt = request_store.create_tables(database)
    assert request_store.create_tables(database) == salt
    with database.transaction():
        for number in range(600):
            request_store.insert(database, record(number))

    def insert_one_twice() -> None:
        with database.transaction():
            request_store.insert(database, record(600))
            request_store.insert(database, record(5))

    with pytest.raises(Exception, match="UNIQUE"):
        insert_one_twice()
    assert request_store.set_feedback(database, "chatcmpl-5", score=0.5, label=None, text="so so")
    assert not request_store.set_feedback(database, "chatcmpl-600", score=0.5, label=None, text=None)
    assert request_store.delete_before(database, 1005.0) == 5
    assert request_store.num_records(database, since=1005, until=1010) == 5
    found = list(request_store.records(database, since=1005, until=1600))
    assert found[0] == record(5, feedback_score=0.5, feedback_text="so so")
    assert found[1:] == [record(number) for number in range(6, 600)]
    assert request_store.num_since(database, "u", 1598) == 2
    database.close()


def test_locations_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("LOG_URL", f"sqlite:///{tmp_path}/of_url.sqlite")
    assert isinstance(open_database("env:LOG_URL", setting="path"), UrlDatabase)
    (tmp_path / "text.sqlite").write_text("no database, but long enough to be taken for one" * 100)
    wrong = [
        ("env:NO_SUCH_VARIABLE", ConfigError, "NO_SUCH_VARIABLE is not set"),
        ("postgresql://anna:hunter2@host/db", ConfigError, "env:NAME"),
        ("no such://thing", ConfigError, "not a SQLAlchemy URL"),
        (str(tmp_path / "text.sqlite"), StorageError, "remove it or give another path"),
    ]
    for location, kind, words in wrong:
        with pytest.raises(kind, match=words) as caught:
            open_database(location, setting="path")
        assert "hunter2" not in str(caught.value)
    with config_error("LOG"):
        open_database(str(tmp_path / "absent.sqlite"), setting="LOG", must_exist=True)


def test_wrong_exports_are_refused(tmp_path: Path, capsys):
    database = SqliteDatabase(tmp_path / "log.sqlite")
    request_store.create_tables(database)
    database.close()
    SqliteDatabase(tmp_path / "other.sqlite").close()
    (tmp_path / "folder.jsonl").mkdir()
    for words, problem in (
        (["export", str(tmp_path / "other.sqlite"), str(tmp_path / "out.jsonl")], "check the path or URL"),
        (["prune", str(tmp_path / "other.sqlite"), "--older-than-days", "0"], "check the path or URL"),
        (["export", str(tmp_path / "log.sqlite"), "out.csv"], "give a file name that does"),
        (["export", str(tmp_path / "absent"), "out.jsonl"], "no such folder"),
        (["export", str(tmp_path / "log.sqlite"), str(tmp_path / "folder.jsonl")], "is a folder"),
        (["export", str(tmp_path / "log.sqlite"), str(tmp_path / "log.sqlite" / "out.jsonl")], "log.sqlite"),
        (["prune", str(tmp_path / "log.sqlite"), "--older-than-days", "-1"], "must be 0 or more"),
    ):
        assert main(["requests", *words]) == 2
        assert problem in capsys.readouterr().err
    target = tmp_path / "new" / "out.jsonl"
    for _ in range(2):  # also over an earlier file that others could read
        assert main(["requests", "export", str(tmp_path / "log.sqlite"), str(target)]) == 0
        assert target.stat().st_mode & 0o777 == 0o600, "as the log itself"
        target.chmod(0o644)
    with pytest.raises(SystemExit):
        main(["requests", "export", str(tmp_path / "log.sqlite"), "out.jsonl", "--since", "nan"])
    assert "not a date" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_own_answers_are_refused_as_training_text(suffix: str, tmp_path: Path, capsys):
    database = SqliteDatabase(tmp_path / "log.sqlite")
    request_store.create_tables(database)
    for number in range(3):
        request_store.insert(database, record(number, prompt=f"what is number {number}?"))
    database.close()
    path = tmp_path / f"out{suffix}"
    exported(tmp_path / "log.sqlite", path)

    def read(**settings):
        config = SourceConfig(sources=(str(path),), **settings)
        return sorted(document.text for document in read_documents(config, report=SourceReport()))

    as_pairs = {"fields": {"question": "prompt"}}
    for settings in (
        {},
        as_pairs,
        {"fields": {"text": "answer"}},
        {"text_field": "answer"},
        {"text_field": "prompt", "keep_fields": ("answer",)},
        {"fields": {"completion": "answer"}},
        {"fields": {"completion": "answer", "label": "feedback_score"}, "record_type": "unpaired_preference"},
    ):
        with pytest.raises(DataError, match="answer_by is modelwright") as caught:
            read(**settings)
        assert "--data.own_answers train" in str(caught.value)
        assert f"out{suffix}" in str(caught.value)
    prompts = [f"what is number {number}?" for number in range(3)]
    assert read(record_type="text", text_field="prompt") == prompts
    assert read(fields={"text": "prompt"}) == prompts
    assert read(own_answers="train", **as_pairs) == [f"{prompt}\n\na tree" for prompt in prompts]
    report = SourceReport()
    config = SourceConfig(sources=(str(path),), on_bad_record="skip")
    with pytest.raises(DataError, match="none of the records"):
        list(read_documents(config, report=report))
    assert report.skipped == {"own answer": 3}


def test_the_log_of_a_run_is_found(tmp_path: Path, capsys):
    config = dump(recipe("tiny"))
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["requests", "export", str(tmp_path), str(tmp_path / "out.jsonl")]) == 2
    assert "does not set requests.log" in capsys.readouterr().err
    for name in ("requests.sqlite", "elsewhere.sqlite"):
        database = SqliteDatabase(tmp_path / name)
        request_store.create_tables(database)
        request_store.insert(database, record(prompt=name))
        database.close()
    assert [entry["prompt"] for entry in exported(tmp_path, tmp_path / "out.jsonl")] == ["requests.sqlite"]
    config["requests"]["log"] = str(tmp_path / "elsewhere.sqlite")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert [entry["prompt"] for entry in exported(tmp_path, tmp_path / "out.jsonl")] == ["elsewhere.sqlite"]
