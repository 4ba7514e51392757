"""Access control, and run folders with hostile content."""

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
import yaml

from board_runs import BoardProcess, csrf_of, make_run, running_board, wait_for
from modelwright.core.config import ConfigError
from modelwright_board.screens import SCREENS
from modelwright_board.server import run_board

pytestmark = pytest.mark.slow

SCRIPT = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
HOSTILE = "<b onclick=x>'\"{{7*7}}"
PAGES = [screen.name for screen in SCREENS]


class Markup(HTMLParser):
    """Collects elements and attributes that a browser would run or load."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.problems += [f"{tag} {name}" for name in names if name.startswith("on") or name == "style"]
        if tag in ("img", "object", "embed", "style") or (
            tag == "script" and not (names.get("src") or "").startswith("/static/")
        ):
            self.problems.append(tag)
        self.problems += [f"{tag} {names['href']}" for _ in "x" if (names.get("href") or "").startswith("javascript:")]


def check_markup(text: str) -> None:
    markup = Markup()
    markup.feed(text)
    assert markup.problems == []


@pytest.fixture(scope="module")
def board(tmp_path_factory) -> BoardProcess:
    place = tmp_path_factory.mktemp("board")
    (place / "secret.txt").write_text("outside\n")
    runs = place / "runs"
    make_run(runs, "plain")
    make_run(runs, "other", seed=1)
    make_hostile(runs, place / "secret.txt")
    with running_board(runs) as process:
        yield process


def make_hostile(runs: Path, secret: Path) -> None:
    """A folder with HTML in every text, links out of it, a 2 GB file, a pipe, broken JSON and 10,000 files."""
    run = make_run(runs, "<b onclick=x>'\"{{7*7}}")
    (run / "config.yaml").write_text(f"name: {json.dumps(SCRIPT)}\na: &a [x, x]\nb: [*a, *a]\nself: &s {{again: *s}}\n")
    info = json.loads((run / "run.json").read_text())
    info["invocations"][0] |= {"command": ["modelwright", SCRIPT], "error": SCRIPT, "state": SCRIPT, "origin": SCRIPT}
    (run / "run.json").write_text(json.dumps(info))
    for name in ("log.txt", "samples.jsonl", "anomalies.jsonl"):
        (run / "pretrain" / name).unlink(missing_ok=True)
    (run / "pretrain" / "log.txt").write_text(SCRIPT)
    (run / "pretrain" / "samples.jsonl").write_text(json.dumps({"step": SCRIPT, "text": SCRIPT}) + "\n{broken\n[]\n")
    (run / "pretrain" / "anomalies.jsonl").write_text(json.dumps({"step": [], "kind": SCRIPT, "text": SCRIPT}) + "\n")
    (run / "pretrain" / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "loss": 2.0, SCRIPT: 3.0})
        + '\n{"step": \n'
        + "[" * 100_000
        + "\n"
        + json.dumps({"step": "x"})
        + "\n"
    )
    (run / "clean" / "artifact" / "report.json").write_text(
        '{"num_documents": "many", "steps": ["quality", 7], "dropped": [1]}'
    )
    (run / "clean" / "artifact" / "dropped.jsonl.zst").symlink_to(secret)
    (run / "report.html").symlink_to(secret)
    os.mkfifo(run / "drift.json")
    (run / "big" / "artifact").mkdir(parents=True)
    (run / "big" / "stage.json").write_text('{"attempts": [{"state": "done", "wall_s": "x", "peak_bytes": null}]}')
    with open(run / "big" / "metrics.jsonl", "wb") as file:
        file.truncate(2_000_000_000)
    for number in range(10_000):
        (run / f"file-{number}").touch()
    (runs / "linked").symlink_to(runs / "plain")
    (runs / "outside").symlink_to(secret.parent)
    (runs / "deep").mkdir()
    (runs / "deep" / "run.json").write_text("[" * 50_000)


def test_a_stranger_sees_nothing(board: BoardProcess) -> None:
    with httpx.Client(base_url=board.base) as stranger:
        for path in ("/", "/run?run=plain", "/events/run", "/report/plain", "/?token=wrong", "/tokens/page"):
            assert stranger.get(path).status_code == 403
        assert (
            stranger.get("/", headers={"Cookie": f"modelwright-board-{httpx.URL(board.base).port}=x"}).status_code
            == 403
        )
        assert stranger.post("/start/plan/recipe", data={"recipe": "tiny"}).status_code == 403
        assert stranger.put("/upload?name=x.txt", content=b"x").status_code == 403


def test_another_name_for_this_machine_is_refused(board: BoardProcess) -> None:
    with board.client() as client:
        assert client.get("/", headers={"Host": "evil.example:80"}).status_code == 400
        assert client.get("/", headers={"Host": f"localhost:{httpx.URL(board.base).port}"}).status_code in (200, 403)


def test_the_token_does_not_stay_in_the_address(board: BoardProcess) -> None:
    with board.client() as client:
        reply = client.get(board.url)
        assert "token" not in str(reply.url)
        policy = reply.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "unsafe-inline" in client.get("/run").headers["content-security-policy"].partition("style-src")[2]
        check_markup(reply.text)


@pytest.mark.parametrize("path", ["/start/plan/recipe", "/stop", "/talk/vote", "/talk/ask", "/command/plan/recipe"])
def test_nothing_changes_without_the_csrf_token(board: BoardProcess, path: str) -> None:
    with board.client() as client:
        fields = {"recipe": "tiny", "question": "a", "chosen": "b", "rejected": "c"}
        assert client.post(path, data=fields).status_code == 403
        assert client.post(path, data={**fields, "csrf": "0" * 64}).status_code == 403
        token = csrf_of(client)
        assert (
            client.post(path, data=fields, headers={"X-CSRF": token, "Origin": "http://evil.example"}).status_code
            == 403
        )
    assert not (board.root / ".board" / "votes.jsonl").exists()


def test_no_page_fails_and_nothing_of_a_run_is_markup(board: BoardProcess) -> None:
    with board.client() as client:
        foreign = ("linked", "outside", "deep", "..", "../secret.txt", "no\0run", "")  # pages show another run instead
        pages = [(run, page) for run in ("plain", HOSTILE) for page in PAGES]
        for run, page in pages + [(run, page) for run in foreign for page in ("run", "cleaning")]:
            reply = client.get(f"/{page}", params={"run": run, "job": "x", "sources": "/etc/passwd", "word": "a"})
            assert reply.status_code == 200, (run, page)
            check_markup(reply.text)
            assert "outside\n" not in reply.text
            assert "root:" not in reply.text


def test_nothing_outside_of_the_runs_is_served(board: BoardProcess) -> None:
    with board.client() as client:
        name = "<b onclick=x>'\"{{7*7}}"
        assert client.get("/report/" + httpx.URL(f"/{name}").raw_path.decode()[1:]).status_code == 404
        for path in (
            "/report/..",
            "/report/%2e%2e%2fsecret.txt",
            "/static/../server.py",
            "/static/%2e%2e/server.py",
            "/.board/secret",
        ):
            reply = client.get(path)
            assert reply.status_code == 404 or "outside" not in reply.text
            assert "def " not in reply.text


def first_events(client: httpx.Client, path: str, number: int = 1) -> list[dict]:
    events: list[dict] = []
    with client.stream("GET", path) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == number:
                    return events
    return events


def test_curves_come_as_events(board: BoardProcess) -> None:
    with board.client() as client:
        (message,) = first_events(client, "/events/run?run=plain&run=other&x=tokens")
        traces = next(chart for chart in message["charts"] if chart["title"] == "Loss")["traces"]
        assert {(trace["run"], trace["metric"]) for trace in traces} >= {("plain", "loss"), ("other", "loss")}
        assert traces[0]["x"][-1] == 200 * 2048
        (hostile,) = first_events(
            client, "/events/run?" + str(httpx.QueryParams({"run": "<b onclick=x>'\"{{7*7}}", "stage": "pretrain"}))
        )
        assert "Loss" in {chart["title"] for chart in hostile["charts"]}


def test_a_huge_file_and_thousands_of_files_take_little_memory(board: BoardProcess) -> None:
    with board.client() as client:
        query = httpx.QueryParams({"run": HOSTILE, "stage": "big"})
        messages = first_events(client, f"/events/run?{query}", 4)
        assert any(one.get("axis") == "step" for one in messages)  # what is in the file, while it is being read
        assert client.get("/", params={"find": "plain"}).status_code == 200
        assert board.memory_bytes() < 200e6


def test_the_command_line_follows_the_form(board: BoardProcess) -> None:
    with board.client() as client:
        headers = {"X-CSRF": csrf_of(client)}
        fields = {"recipe": "tiny", "name": "a b", "sources": "x.jsonl 'y z.txt'", "settings": "--seed 3", "dry": "1"}
        line = client.post("/command/plan/recipe", data=fields, headers=headers).json()
        root = board.root
        assert line["line"].endswith("--data.sources x.jsonl 'y z.txt' --seed 3 --dry-run")
        assert f"'{root}/a b'" in line["line"]
        for bad in ({"name": "../x"}, {"name": ".board"}, {"settings": "'"}, {"name": "a\nb"}):
            shown = client.post("/command/plan/recipe", data={**fields, **bad}, headers=headers).json()
            assert not shown["is_complete"]
            assert client.post("/start/plan/recipe", data={**fields, **bad}, headers=headers).status_code == 400
        assert client.post("/start/plan/nothing", data={}, headers=headers).status_code == 404


def test_a_dropped_file_gets_a_harmless_name(board: BoardProcess) -> None:
    root = board.root
    with board.client() as client:
        headers = {"X-CSRF": csrf_of(client)}
        for given, name in (
            ("../../x<b>.jsonl", "x_b_.jsonl"),
            ("a\\b/..%2f.hidden", "_2f.hidden"),
            ("ü 1.csv", "ü 1.csv"),
        ):
            reply = client.put("/upload", params={"name": given}, content=b'{"q": 1}\n', headers=headers)
            assert reply.status_code == 200, reply.text
            assert reply.json()["path"].endswith(f".board/data/{name}")
            assert (root / ".board" / "data" / name).read_bytes() == b'{"q": 1}\n'
        assert client.put("/upload", params={"name": "../.."}, content=b"x", headers=headers).status_code == 400
        (root / ".board" / "data" / "leak.txt").symlink_to(root.parent / "secret.txt")
        assert "outside" not in client.get("/data", params={"sources": "leak.txt"}).text


def test_a_vote_is_a_preference_pair(board: BoardProcess, tmp_path: Path) -> None:
    root = board.root
    with board.client() as client:
        headers = {"X-CSRF": csrf_of(client)}
        pair = {"question": "Why?", "chosen": "Because.", "rejected": "No."}
        assert client.post("/talk/vote", data={**pair, "rejected": "Because."}, headers=headers).status_code == 400
        assert client.post("/talk/vote", data=pair, headers=headers).json() == {"votes": 1}
    votes = root / ".board" / "votes.jsonl"
    code = (
        "import sys; from modelwright.data.sources.sources import SourceConfig, SourceReport, read_documents\n"
        "config = SourceConfig(sources=(sys.argv[1],), validation_fraction=0.0)\n"
        "for one in read_documents(config, report=SourceReport()):\n"
        "    print(one.kind, 'rejected' in one.meta)"
    )
    shown = subprocess.run([sys.executable, "-c", code, str(votes)], capture_output=True, text=True, check=True)
    assert shown.stdout == "qa True\n"
    votes.unlink()


@pytest.mark.slow
def test_a_board_for_others_needs_the_key_of_an_administrator(tmp_path: Path) -> None:
    import hashlib

    entries = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "scopes": [scope]}
        for name, scope in (("boss", "admin"), ("user", "infer"))
    ]
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": entries}))
    command = [sys.executable, "-m", "modelwright.cli.entry", "board", str(tmp_path), "--host", "0.0.0.0"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("modelwright: --host")
    make_run(tmp_path / "runs", "plain")
    with running_board(tmp_path / "runs", "--host", "0.0.0.0", "--keys_file", str(keys)) as board:
        assert "token" not in board.url
        with httpx.Client(base_url=board.base.replace("0.0.0.0", "127.0.0.1"), follow_redirects=True) as client:
            assert str(client.get("/run").url).endswith("/login")
            assert client.post("/login", data={"key": "user"}).status_code == 403
            assert client.get("/", headers={"Authorization": "Bearer user"}).url.path == "/login"
            assert client.post("/login", data={"key": "boss"}).status_code == 200
            assert "plain" in client.get("/").text


@pytest.mark.slow
def test_a_command_outlives_the_board(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs, "plain")
    with running_board(runs, cwd=tmp_path) as board, board.client() as client:
        headers = {"X-CSRF": csrf_of(client)}
        page = client.post("/start/plan/resume", data={"run_dir": "nothing-there"}, headers=headers).text
        assert "modelwright run nothing-there" in page
        wait_for(lambda: "exit code 2" in client.get("/plan").text)
        client.post("/start/plan/recipe", data={"recipe": "tiny", "name": "new", "stages": "clean"}, headers=headers)
        board.process.kill()
    with running_board(runs, cwd=tmp_path) as board, board.client() as client:
        page = wait_for(lambda: (text := client.get("/").text) and ">new</a>" in text and text)
        wait_for(lambda: client.get("/run?run=new").text.count('class="state done"') >= 2, 120)
        wait_for(lambda: 'class="state done"' in client.get("/plan").text)


@pytest.mark.slow
def test_a_board_next_to_a_run_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "modelwright.cli.entry", "run", "tiny", "--stages", "clean", "--board"]
    # Both write to the pipe, so its end is that of both.
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    (url,) = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("board "))
    assert "?token=" in url
    with pytest.raises(httpx.TransportError):
        httpx.get(url)
    assert (tmp_path / "runs" / "tiny" / "clean" / "artifact" / "manifest.json").exists()


@pytest.mark.parametrize("name", [".board", ".board/data"])
def test_links_in_place_of_own_folders_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "runs" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        run_board(tmp_path / "runs", host="127.0.0.1", port=0)
    assert list((tmp_path / "elsewhere").iterdir()) == []
