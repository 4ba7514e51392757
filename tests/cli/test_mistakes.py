"""Mistakes on the command line: the remedy exists, and a hint is near or not given."""

import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from modelwright.cli.main import find_command, main

ROOT = Path(__file__).parents[2]


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("run", "tiny", "--dryrun"), "did you mean --dry-run?"),
        (("run", "tiny", "--rundir", "x"), "did you mean --run-dir?"),
        (("run", "tiny", "--pretrain.lr", "1"), "did you mean --pretrain.learning_rate?"),
        (("run", "tiny", "--foo"), ""),
        (("run", "tiny", "--pretrain.foo", "1"), ""),
        (("run", "zzzzz"), "recipes: "),
        (("frobnicate",), ""),
        (("explain", "zzzzz"), "lists them"),
        (("rum", "tiny"), "did you mean 'run'?"),
    ],
)
def test_the_nearest_name_is_suggested_or_none(capsys: pytest.CaptureFixture[str], words, hint):
    text = complaint(capsys, *words)
    assert hint in text
    assert hint.startswith("did you mean") or "did you mean" not in text


@pytest.mark.parametrize(
    "words",
    [
        ("chat", "Qwen/Qwen3-0.6B"),
        ("serve", "Qwen/Qwen3-0.6B"),
        ("run", "Qwen/Qwen3-0.6B"),
        ("run", "tiny", "--init-from", "Qwen/Qwen3-0.6B"),
        ("run", "tiny", "--init-from", "Qwen/Qwen3-0.6B", "--dry-run"),
    ],
)
def test_the_name_of_a_hub_is_no_path(capsys: pytest.CaptureFixture[str], words, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "nothing is downloaded" in complaint(capsys, *words)


def test_chat_takes_the_temperatures_that_the_server_takes(capsys: pytest.CaptureFixture[str]):
    assert "temperature: must be between 0 (greedy) and 2, got 9" in complaint(
        capsys, "chat", "x", "--temperature", "9"
    )
    assert "top_p: must be above 0" in complaint(capsys, "chat", "x", "--top-p", "0")


def test_a_place_that_cannot_be_written_is_not_blamed_on_an_option_that_is_missing(tmp_path: Path):
    from modelwright.core.artifacts import StorageError, writing

    with pytest.raises(StorageError) as caught, writing(tmp_path):
        raise PermissionError(13, "Permission denied")
    assert "--run-dir" not in str(caught.value)
    assert re.search("write elsewhere", str(caught.value))


def test_a_folder_that_cannot_be_made_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.")
    assert main(["clean", str(tmp_path / "text.txt"), "--out", "/proc/foo/bar"]) == 2
    assert "/proc/foo/bar: cannot be created" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "chat", "report"])
def test_a_name_that_nothing_has_is_not_called_a_folder(command: str, capsys: pytest.CaptureFixture[str]):
    assert "mine: no such folder, here or as runs/mine" in complaint(capsys, command, "mine")


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "is not a run directory" in complaint(capsys, "serve", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--to", "hf", "--dtype", "f16"), "--dtype: hf does not know the number format 'f16'; leave it out"),
        (
            ("--to", "gguf", "--dtype", "f17"),
            "--dtype: gguf does not know the number format 'f17'; choose from f16, q8_0, q4_0",
        ),
        (("--to", "gguf", "--int8"), "--int8: gguf cannot hold these weights; export to one of onnx, openvino"),
        (("--to", "bin"), "write one of hf, hub, gguf, onnx, openvino, with or without DEST"),
    ],
)
def test_what_a_form_of_a_model_lacks_is_refused(words, problem: str, capsys: pytest.CaptureFixture[str]):
    assert problem in complaint(capsys, "export", "mine", *words)


def test_help_names_the_settings_of_a_server(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "--port (8000)" in shown
    assert "--host (127.0.0.1)" in shown
    assert max(map(len, shown.partition("\n\n")[2].splitlines())) <= 120


@pytest.mark.parametrize("name", ["run", "finetune", "clean", "augment", "search", "continual", "launch"])
def test_what_says_that_it_resumes_says_so_when_it_is_stopped(name: str):
    assert find_command(name).is_resumable


def test_ctrl_c_while_the_program_is_imported_prints_no_traceback():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["modelwright"]
    module, name = script.split(":")
    program = (
        "import os, signal, sys, importlib.abc\n"
        "class Interrupting(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, fullname, path, target=None):\n"
        "        if fullname == 'modelwright.cli.compare': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        f"from {module} import {name}\n"
        f"sys.exit({name}())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "recipes"], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == -signal.SIGINT
