"""Bad input to `modelwright run`: one clear line with file and line, or a counted skip; never a traceback, never a
half-written artifact."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

Command = Callable[..., subprocess.CompletedProcess[str]]
GOOD = "\n".join(
    json.dumps({"text": f"This is sentence number {n}, which nobody has written before."}) for n in range(3000)
)


def make_input(kind: str, folder: Path) -> Path:
    """A source with one fault."""
    path = folder / {"truncated": "data.jsonl.zst", "empty": "empty.txt", "bytes": "latin.txt"}.get(kind, "data.jsonl")
    if kind == "corrupt":
        lines = GOOD.splitlines()
        path.write_text("\n".join([*lines[:6], '{"text": "cut', *lines[6:]]))
    elif kind == "truncated":
        path.write_bytes(zstandard.compress(GOOD.encode())[:-20])
    elif kind == "bytes":
        path.write_bytes(b"plain words\n" * 20 + b"caf\xe9 au lait\n")
    elif kind == "empty":
        path.write_text("")
    return path


def run_words(source: Path, target: Path) -> tuple[str, ...]:
    return ("run", "tiny", "--data.sources", str(source), "--run-dir", str(target), "--stages", "clean")


def assert_one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("modelwright: "), done.stderr
    for part in parts:
        assert part in message
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("missing", ("data.jsonl: no such file",)),
        ("corrupt", ("data.jsonl:7", "--data.on_bad_record skip")),
        ("truncated", ("data.jsonl.zst",)),
        ("bytes", ("latin.txt:21", "UTF-8")),
        ("empty", ("empty.txt", "empty")),
    ],
)
def test_one_clear_line(inside: Command, tmp_path: Path, kind: str, parts: tuple[str, ...]) -> None:
    source, target = make_input(kind, tmp_path), tmp_path / "run"
    assert_one_line(inside(*run_words(source, target)), *parts)
    assert not (target / "clean" / "artifact").exists()
    assert not (target / "clean" / "artifact.partial").exists()


def test_the_same_as_a_process_of_its_own(command: Command, tmp_path: Path) -> None:
    assert_one_line(command(*run_words(make_input("corrupt", tmp_path), tmp_path / "run")), "data.jsonl:7")


@pytest.mark.parametrize("kind", ["corrupt", "truncated"])
def test_a_counted_skip(inside: Command, tmp_path: Path, kind: str) -> None:
    source, target = make_input(kind, tmp_path), tmp_path / "run"
    done = inside(*run_words(source, target), "--data.on_bad_record", "skip")
    assert done.returncode == 0, done.stderr
    assert re.search("1 record could not be read and was left out|2 records could not be read and were", done.stderr)
    manifest = json.loads((target / "clean" / "artifact" / "manifest.json").read_text())
    assert sum(manifest["facts"]["sources"]["skipped"].values()) in (1, 2), (
        "the bad record, or the cut file and its last record"
    )


def test_what_was_dropped_stays_when_nothing_is_left(inside: Command, tmp_path: Path) -> None:
    source = tmp_path / "short.txt"
    source.write_text("x\n")
    assert_one_line(inside(*run_words(source, tmp_path / "run")), "no training document is left")
    assert (tmp_path / "run" / "clean" / "dropped.jsonl.zst").exists()


def test_text_that_is_too_long_names_the_setting_and_where_it_is_kept(inside: Command, tmp_path: Path) -> None:
    source = tmp_path / "line.txt"
    source.write_text("one line without an end " * 5000)
    limit = ("--clean.quality.limits", "{max_num_chars: 100000}", "--data.validation_fraction", "0")
    dropped = tmp_path / "run" / "clean" / "dropped.jsonl.zst"
    assert_one_line(
        inside(*run_words(source, tmp_path / "run"), *limit),
        "1 too long (keep it with --clean.quality.limits.prose.max_num_chars 120000)",
        f"dropped text is in {dropped}",
    )
    assert dropped.exists()
    (tmp_path / "good.txt").write_text("A short text that is kept, and one more sentence.")
    done = inside(*run_words(tmp_path / "*.txt", tmp_path / "two"), *limit)
    assert done.returncode == 0, done.stderr
    dropped = tmp_path / "two" / "clean" / "artifact" / "dropped.jsonl.zst"
    assert dropped.exists()
    note = "clean: 1 documents kept, 1 dropped: 1 too long (keep it with --clean.quality.limits.prose.max_num_chars"
    assert f"{note} 120000); the dropped text is in {dropped}" in done.stderr


def test_files_that_are_not_read_are_named(inside: Command, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "good.txt").write_text("A short text that is kept, and one more sentence.")
    (folder / "scan.odt").write_bytes(b"x")
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    done = inside(*run_words(folder, tmp_path / "run"), "--data.validation_fraction", "0")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "not read" in line]
    assert f"1 unsupported .odt ({folder}/scan.odt)" in line
    assert f"1 dangling link ({folder}/gone.txt)" in line
    assert "records" not in line


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_directory_of_somebody_else_is_named(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from modelwright.data.sources.sources import *\n"
        "opened = SourceConfig(sources=(sys.argv[1] + '/open',))\n"
        "list(read_documents(opened, report=SourceReport()))  # imports, while it may read the packages\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "report = SourceReport()\n"
        "texts = [d.text for d in read_documents(SourceConfig(sources=(sys.argv[1],)), report=report)]\n"
        "print(texts, report.summary())"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for inner in ("open", "closed"):
            (folder / inner).mkdir()
            (folder / inner / "a.txt").write_text(inner)
        (folder / "closed").chmod(0o700)
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, cwd="/")
    reason = "directory that cannot be read (Permission denied)"
    assert done.stdout.strip() == f"['open'] ['not read: 1 {reason} ({name}/closed)']", done.stderr


def test_user_mistakes_on_the_command_line(inside: Command, tmp_path: Path) -> None:
    assert_one_line(inside("run"), "name a recipe")
    assert_one_line(inside("rum", "tiny"), "did you mean 'run'")
    assert_one_line(inside("run", "tiny", "--pretrain.lr=1"), "unknown setting; did you mean --pretrain.")
    assert_one_line(inside("run", "tiny", "--run-dir", str(tmp_path), "--stages", "wash"), "'wash' is not one of")
    assert_one_line(
        inside("run", "tiny", "--init-from", str(tmp_path / "none"), "--run-dir", str(tmp_path / "r")), "none"
    )
    assert_one_line(inside("chat", str(tmp_path)), "is not a run directory")
    assert_one_line(inside("export", str(tmp_path), "--to", "hf"), "is not a run directory")
    assert_one_line(inside("prove"), "--all")


def test_two_processes_in_one_folder(inside: Command, tmp_path: Path) -> None:
    from modelwright.core.artifacts import RunDir

    with RunDir(tmp_path / "run").create().lock():
        done = inside(*run_words(make_input("bytes", tmp_path), tmp_path / "run"))
    assert_one_line(done, "is working in this run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk(inside: Command, tmp_path: Path, small_disk: Path, small_words: tuple[str, ...]) -> None:
    words = (*small_words, "--stages", "clean,tokenize,pack,pretrain", "--run-dir", str(small_disk / "run"))
    done = inside(*words, "--model.model_dim", "128", "--model.ffn_dim", "512")
    assert_one_line(done, "the disk is full")
    assert (small_disk / "run" / "clean" / "artifact" / "manifest.json").exists()
    assert not (small_disk / "run" / "pretrain" / "artifact").exists()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert inside(*words, "--model.model_dim", "128", "--model.ffn_dim", "512").returncode == 0
