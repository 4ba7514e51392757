"""Delivery of alarms over real HTTP, with endpoints that are down and watchers that are killed."""

import json
import os
import re
import shlex
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from continual_requests import WINDOW, write_requests
from drift_traffic import Shift, Traffic
from modelwright.cli.main import main
from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import DataError
from modelwright.core.progress import SilentProgress
from modelwright_continual.drift.check import check
from modelwright_continual.drift.config import WatchConfig
from modelwright_continual.drift.outbox import Outbox
from modelwright_continual.drift.reference import DriftReference
from modelwright_continual.drift.report import as_text
from modelwright_continual.drift.watch import fresh_features, message, read_window, watch
from modelwright_continual.drift.webhook import check_webhook, post_json
from rank_processes import start_process
from refusals import config_error

PAGE = Path(__file__).parents[4] / "docs" / "drift.md"
PATIENCE_S = 120.0
CONFIG = WatchConfig(poll_s=0.05, first_retry_s=0.02, max_retry_s=0.1)
DRIFTED = Shift(other_language=0.5)


@dataclass
class Endpoint:
    """A webhook: what it received, and the statuses that it answers with before it answers 200."""

    port: int
    statuses: list[int] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"


class Notes(SilentProgress):
    """What a user is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    @property
    def pauses(self) -> list[float]:
        """Seconds after each failed delivery."""
        return [float(found[1]) for text in self.texts if (found := re.search(r"again in (.*) s", text))]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextmanager
def listening(*statuses: int, port: int = 0) -> Iterator[Endpoint]:
    endpoint = Endpoint(port, list(statuses))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = endpoint.statuses.pop(0) if endpoint.statuses else 200
            if status == 200:
                endpoint.received.append(body)
                endpoint.keys.append(self.headers["Idempotency-Key"])
            self.send_response(status)
            if status in (301, 302, 303):
                self.send_header("Location", endpoint.url)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            raise AssertionError("a redirect was followed")

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    endpoint.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def drifted(traffic: Traffic) -> list[dict[str, Any]]:
    return traffic.requests(3 * WINDOW, 21, shift=DRIFTED)


def wait_for_pending(state: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if state.exists() and json.loads(state.read_text())["pending"]:
            return
        time.sleep(0.05)
    raise TimeoutError("no alarm was found")


@pytest.mark.slow
def test_an_alarm_outlives_a_killed_watcher_and_an_endpoint_that_is_down(
    reference: DriftReference, reference_folder: Path, drifted: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Nobody listens when drift is found; the watcher is killed while it retries, and another one delivers later."""
    path, state, port = write_requests(tmp_path / "live.jsonl", drifted), tmp_path / "state", free_port()
    words = (
        "drift", "watch", str(path), "--reference", str(reference_folder), "--state", str(state),
        "--first-retry", "0.02", "--max-retry", "0.1", "--poll", "0.05", "--once", "--webhook", f"http://127.0.0.1:{port}/hook",
    )  # fmt: skip
    first = start_process("modelwright.cli.main", *words)
    wait_for_pending(state / "state.json")
    os.kill(first.pid, signal.SIGKILL)
    assert first.end()[0] == -signal.SIGKILL
    second = start_process("modelwright.cli.main", *words)
    time.sleep(0.5)  # it fails to deliver in the meantime
    with listening(port=port) as endpoint:
        code, _, errors = second.end()
        assert code == 0, errors
        assert main(list(words)) == 0
    assert len(endpoint.received) == 1  # three windows have drifted, and three processes ran
    message = endpoint.received[0]
    assert endpoint.keys == [message["id"]]
    assert message["window"] == 1
    assert message["features"][0]["name"] in message["text"]
    assert drifted[0]["prompt"][:30] not in json.dumps(message)
    report = json.loads(Path(message["report"]).read_text())
    assert report["alarm"]
    assert report["first_id"] == drifted[0]["id"]


def test_failed_answers_are_retried_and_redirects_are_failures(
    reference: DriftReference, drifted: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = write_requests(tmp_path / "live.jsonl", drifted[:WINDOW])
    with listening(500, 302, 404, 503) as endpoint:
        watch(path, reference, tmp_path / "state", endpoint.url, CONFIG, SilentProgress(), once=True)
    assert len(endpoint.received) == 1


def test_retries_wait_longer_and_longer(tmp_path: Path, drifted, reference: DriftReference) -> None:
    notes = Notes()
    path = write_requests(tmp_path / "live.jsonl", drifted[:WINDOW])
    with listening(*[503] * 5) as endpoint:
        watch(path, reference, tmp_path / "state", f"{endpoint.url}?token=secret", CONFIG, notes, once=True)
    assert notes.pauses == [0.02, 0.04, 0.08, 0.1, 0.1]
    assert not any("secret" in text for text in notes.texts)


def test_an_endpoint_that_is_down_for_a_minute_gets_the_alarm_once(
    reference: DriftReference, drifted: list[dict[str, Any]], tmp_path: Path
) -> None:
    """With the settings that a user gets. The time is simulated, the connections are real."""
    path, port, notes = write_requests(tmp_path / "live.jsonl", drifted[:WINDOW]), free_port(), Notes()
    now, endpoints = 0.0, list[Endpoint]()
    with ExitStack() as up:

        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds
            if now >= 60.0 and not endpoints:
                endpoints.append(up.enter_context(listening(port=port)))

        for _ in range(2):  # the second one finds nothing to deliver
            watch(
                path, reference, tmp_path / "state", f"http://127.0.0.1:{port}/hook", WatchConfig(), notes,
                once=True, clock=lambda: now, sleep=sleep,
            )  # fmt: skip
    assert notes.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert now == pytest.approx(63.0)
    assert len(endpoints[0].received) == 1


def test_a_message_has_no_word_of_a_user(reference: DriftReference, traffic: Traffic, tmp_path: Path) -> None:
    """A label is a text that users choose; the report on this machine shows it."""
    report = check(traffic.requests(WINDOW, 24, shift=Shift(bad_feedback=0.9)), reference)
    (drifted,) = [feature for feature in report.features if feature.name == "feedback_label"]
    assert (drifted.alarm, drifted.category) == (True, "wrong")
    assert "'wrong'" in as_text(report)
    sent = json.dumps(message(report, "key", 1, tmp_path / "alarm.json"))
    assert drifted.cause in sent
    for label in ("wrong", "rude", "slow", "good"):
        assert label not in sent


def test_a_feature_is_reported_once_in_its_cool_down(
    reference: DriftReference, traffic: Traffic, drifted: list[dict[str, Any]], tmp_path: Path
) -> None:
    usual = traffic.requests(WINDOW, 22)
    worse = traffic.requests(WINDOW, 23, shift=Shift(other_language=0.5, length=3.0))
    path = write_requests(tmp_path / "live.jsonl", [*usual, *drifted[: 2 * WINDOW], *worse])
    with listening() as endpoint:
        watch(path, reference, tmp_path / "state", endpoint.url, CONFIG, SilentProgress(), once=True)
    assert [message["window"] for message in endpoint.received] == [2, 4]
    assert "prompt_length" in {feature["name"] for feature in endpoint.received[1]["features"]}
    assert fresh_features(("a", "b"), {"a": 3}, 5, 10) == ["b"]
    assert fresh_features(("a",), {"a": 3}, 13, 10) == []
    assert fresh_features(("a",), {"a": 3}, 14, 10) == ["a"]


def test_windows_of_a_file_that_grows(tmp_path: Path) -> None:
    lines = [json.dumps({"id": str(n), "time": n, "session": "s", "prompt": "x"}) + "\n" for n in range(7)]
    path = tmp_path / "live.jsonl"
    path.write_text("".join(lines[:5]) + lines[5][:10])
    first = read_window(path, 0, 1, 3)
    assert first is not None
    assert [record["id"] for record in first.records] == ["0", "1", "2"]
    assert read_window(path, first.offset, first.line, 3) is None  # the third of its lines is not whole
    path.write_text("".join(lines))
    second = read_window(path, first.offset, first.line, 3)
    assert second is not None
    assert ([record["id"] for record in second.records], second.line) == (["3", "4", "5"], 7)
    path.write_text("".join(lines[:4]) + "{broken\n" + lines[5])
    with pytest.raises(DataError, match=r"live\.jsonl:5: is not valid JSON"):
        read_window(path, first.offset, first.line, 3)
    path.write_text("")
    with pytest.raises(DataError, match="is shorter than the part that was read"):
        read_window(path, first.offset, first.line, 3)
    with pytest.raises(DataError, match="cannot be followed"):
        read_window(tmp_path / "a.parquet", 0, 1, 3)


def test_a_state_belongs_to_one_watcher(reference: DriftReference, tmp_path: Path) -> None:
    path = write_requests(tmp_path / "live.jsonl", [])
    outbox = Outbox(tmp_path / "state")
    with config_error("state", match="is in use by another watcher"):
        Outbox(tmp_path / "state")
    outbox.state.reference = "another"
    outbox.save()
    outbox.close()
    with config_error("state", match="belongs to another reference"):
        watch(path, reference, tmp_path / "state", "", CONFIG, SilentProgress(), once=True)
    (tmp_path / "state" / "state.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"state\.json: is damaged"):
        Outbox(tmp_path / "state")


def test_addresses() -> None:
    for address in ("ftp://secret@host/x", "http://[secret", "http://host:secret/"):
        with config_error("webhook") as caught:
            check_webhook(address)
        assert "secret" not in str(caught.value)
    check_webhook("https://host/x")
    assert post_json(f"http://127.0.0.1:{free_port()}", {}, idempotency_key="k", timeout_s=5) != ""


@pytest.mark.slow
def test_the_page_runs(
    traffic: Traffic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands and its Python code, with small windows."""
    monkeypatch.chdir(tmp_path)
    write_requests(tmp_path / "requests.jsonl", traffic.requests(5000, 31))
    write_requests(tmp_path / "later.jsonl", traffic.requests(1000, 32, shift=DRIFTED))
    write_requests(tmp_path / "live.jsonl", traffic.requests(1000, 33, shift=DRIFTED))
    text = PAGE.read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^    modelwright (.*)", text, flags=re.MULTILINE)]
    assert [words[1] for words in commands] == ["freeze", "check", "watch"]
    more = {"freeze": ["--window", "500", "--run-length", "10"], "check": [], "watch": ["--once"]}
    codes = [main([*words, *more[words[1]]]) for words in commands]
    assert codes == [0, 4, 0]
    shown = capsys.readouterr()
    assert "one false alarm in" in shown.out
    assert "2 of 2 windows drifted" in shown.out
    assert list((tmp_path / "drift" / "watch" / "alarms").iterdir())
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    assert "True (" in capsys.readouterr().out
    assert main(["drift", "check", "later.jsonl", "--reference", "drift/v1", "--json"]) == 4
    assert json.loads(capsys.readouterr().out.splitlines()[0])["alarm"] is True
