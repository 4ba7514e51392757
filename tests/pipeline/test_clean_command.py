"""`modelwright clean`: real processes, killed at any moment, with the same result to the byte."""

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cleaned import result_files
from modelwright.cli.main import main
from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import DataError
from modelwright.core.progress import SilentProgress
from modelwright.data.clean import clean as clean_module
from modelwright.data.clean.clean import clean_documents
from modelwright.data.clean.config import CleanConfig, build_steps
from modelwright.data.clean.folder import read_kept
from modelwright.data.clean.steps.noise import NoiseConfig
from modelwright.data.clean.steps.step import ShardFiles
from modelwright.data.document import Document
from modelwright.data.sources.sources import SourceConfig
from modelwright.data.workers import LocalProcesses
from modelwright.pipeline.cleaning import clean_sources, fingerprint
from rank_processes import Started, start_process

PARTS = [f"{a}{b}" for a in ("wol", "riv", "hou", "let", "sto") for b in ("fa", "ero", "se", "ter")]


def text(number: int) -> str:
    rng = random.Random(number)
    words = [f"the {rng.choice(PARTS)}{rng.randrange(30)}" for _ in range(80)]
    return " ".join([*words, f"mail{number % 7}@example.org"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "documents.jsonl"
    lines = [json.dumps({"text": text(number % 4700)}) for number in range(5000)]
    lines[100:100] = ["broken", '{"no": "text"}', '{"text": "x"}']
    path.write_text("\n".join(lines))
    return path


def words(source: Path, out: Path, *more: str) -> list[str]:
    small = ["--clean.num_workers", "2", "--data.on_bad_record", "skip"]
    return ["clean", str(source), "--out", str(out), *small, *more]


def start(source: Path, out: Path) -> Started:
    return start_process("modelwright.cli.main", *words(source, out))


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert main(words(source, out)) == 0
    return out


def same(first: Path, second: Path) -> None:
    for name in (*result_files(first), "quarantine.jsonl", "sources.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.slow
def test_the_result(undisturbed: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = undisturbed
    report = json.loads((out / "report.json").read_text())
    assert report["dropped"]["duplicates"]["duplicate"]["documents"] == 300
    assert report["dropped"]["quality"]["too short"]["documents"] == 1
    assert report["replaced"] == {"email": 4700}
    assert not (out / "work").exists()
    quarantine = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert [(entry["where"], entry["reason"]) for entry in quarantine] == [
        (f"{source}:101", "not JSON"), (f"{source}:102", "no text field")
    ]  # fmt: skip
    assert main(["clean", "--out", str(out), "--explain", f"{source}:103"]) == 0
    assert "dropped by quality, too short: num_chars 1, limit 20" in capsys.readouterr().out
    assert main(["clean", "--out", str(out), "--explain", f"{source}:4900"]) == 0
    assert f"dropped by duplicates, duplicate: {source}:200" in capsys.readouterr().out
    assert main(["clean", "--out", str(out), "--explain", f"{source}:1"]) == 0
    assert "result    kept" in capsys.readouterr().out
    assert main(["clean", "--out", str(out), "--explain", "documents:1"]) == 2
    assert f"document 'documents:1' not found; did you mean '{source}:" in capsys.readouterr().err


MOMENTS = ("work", "00000.measured0.npz", "00002.measured0.json", "read.json", "decided0.json", "00001.written.json")
"""Files whose appearance is the next moment to be killed at, in the order in which they are written."""


@pytest.mark.slow
def test_a_command_that_is_killed_again_and_again_goes_on(undisturbed: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for moment in MOMENTS:
        process = start(source, out)
        while process.is_alive and not list(out.rglob(moment)):
            time.sleep(0.002)
        assert process.is_alive, f"ended before {moment}: {process.end()}"
        process.send_signal(signal.SIGKILL)
        assert process.end()[0] == -signal.SIGKILL
        assert not (out / "report.json").exists()
    code, _, errors = start(source, out).end()
    assert code == 0, errors
    same(undisturbed, out)


def test_two_commands_do_not_share_a_folder(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = start(source, tmp_path / "out")
    try:
        while not (tmp_path / "out" / "work").exists():
            time.sleep(0.01)
        assert main(words(source, tmp_path / "out")) == 2
        assert f"process {process.pid} is working in this folder" in capsys.readouterr().err
    finally:
        process.send_signal(signal.SIGKILL)
        process.end()


def documents(count: int) -> list[Document]:
    return [
        Document(id=f"d{i}", text=text(i), kind="prose", split="train", source="test") for i in range(count)
    ]  # fmt: skip


class Stop(Exception):
    """Ends the work in the middle."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("decide", "00002.measured0.npz"), ("decide", "00000.measured0.json"), ("write", "00001.decided0.json"),
    ],
)  # fmt: skip
def test_a_flipped_byte_costs_one_shard(stage: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, silent = build_steps(CleanConfig()), SilentProgress()
    arguments = {"work": tmp_path / "work", "key": "x", "shard_documents": 50}
    clean_documents(iter(documents(150)), steps, tmp_path / "whole", silent, shard_documents=50)

    def stop(*args: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(f"modelwright.data.clean.clean._Run.{stage}", stop)
        with pytest.raises(Stop):
            clean_documents(iter(documents(150)), steps, tmp_path / "out", silent, **arguments)
    (path,) = (tmp_path / "work").rglob(name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    untouched = {
        other: other.stat().st_mtime_ns for other in path.parent.glob("*.measured0.npz") if other.name[:5] != name[:5]
    }
    seen: list[dict[Path, int]] = []

    def before_joining(*args: Any) -> list[str]:
        seen.append({other: other.stat().st_mtime_ns for other in untouched})
        return join(*args)

    join = clean_module._join
    monkeypatch.setattr(clean_module, "_join", before_joining)
    clean_documents(iter(documents(150)), steps, tmp_path / "out", silent, **arguments)
    assert seen[0] == untouched, "the shards that are whole are not done again"
    for result in result_files(tmp_path / "whole"):
        assert (tmp_path / "out" / result).read_bytes() == (tmp_path / "whole" / result).read_bytes()


def test_a_source_that_grows_while_it_is_read(tmp_path: Path) -> None:
    source = tmp_path / "growing.jsonl"
    source.write_text("".join(json.dumps({"text": text(number)}) + "\n" for number in range(300)))

    class Growing(SilentProgress):
        def advance(self, done: float, **fields: float | str) -> None:
            with open(source, "a") as file:
                file.write(json.dumps({"text": text(1000)}) + "\n")

    with pytest.raises(DataError, match=r"growing\.jsonl: has changed while it was read; run the same command"):
        clean_sources(SourceConfig(sources=(str(source),)), CleanConfig(), str(tmp_path / "out"), Growing())
    assert not list((tmp_path / "out").glob("kept*"))


def test_a_finished_part_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, arguments = build_steps(CleanConfig()), {"work": tmp_path / "work", "key": "x", "shard_documents": 50}

    def facts() -> dict[str, int]:
        return {"files": 3}

    def stop(*args: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("modelwright.data.clean.clean._join", stop)
        with pytest.raises(Stop):
            clean_documents(iter(documents(99)), steps, tmp_path / "a", SilentProgress(), facts=facts, **arguments)
    report, read = clean_documents(iter(()), steps, tmp_path / "a", SilentProgress(), **arguments)
    assert (report.num_kept, read) == (99, {"files": 3})
    assert len(list(read_kept(tmp_path / "a"))) == 99


def _die_once(item: tuple[str, int]) -> int:
    folder, number = item
    marker = Path(folder) / "died"
    if number == 3 and not marker.exists():
        marker.touch()
        import os

        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.slow
def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    results = list(
        LocalProcesses(2, start_after_s=0.0).map(_die_once, [(str(tmp_path), number) for number in range(12)])
    )
    assert sorted(results) == list(range(12))
    assert (tmp_path / "died").exists()


def test_every_file_that_decides_is_in_the_fingerprint(source: Path, tmp_path: Path) -> None:
    """Or a stage would count as done after the schema, the trusted text, the model or a step has changed."""
    schema, trusted, model = tmp_path / "schema.json", tmp_path / "trusted.txt", tmp_path / "model"
    model.mkdir()
    files = (schema, trusted, model / "config.json", tmp_path / "steps.py")
    for path in files:
        path.write_text("{}")
    data = SourceConfig(sources=(str(source),), schema=str(schema))
    noise = NoiseConfig(trusted=(str(trusted),), model=str(model))
    clean = CleanConfig(noise=noise, steps=(f"{tmp_path / 'steps.py'}:NoTables",))
    before = fingerprint(data, clean)
    for path in files:
        path.write_text('{"changed": 1}')
        after = fingerprint(data, clean)
        assert after != before
        before = after


def test_markers(tmp_path: Path) -> None:
    files = ShardFiles(tmp_path, 3)
    assert files.facts("measured") is None
    files.write("measured", {"docs": b"abc"}, {"n": 1})
    assert files.facts("measured") == {"n": 1}
    assert files.read("measured", "docs") == b"abc"
    files.path("docs").unlink()
    assert files.facts("measured") is None, "a stage whose files are gone is not finished"
    files.write("measured", {"docs": b"abc"}, {"n": 1})
    marker = files.path("measured.json")
    for damaged in (marker.read_text().replace('"n": 1', '"n": 2'), "{", "[]"):
        marker.write_text(damaged)
        assert files.facts("measured") is None, "nor is one whose marker is damaged"
    files.path("docs").unlink()
    with pytest.raises(ArtifactError, match="docs: cannot be read"):
        files.read("measured", "docs")
