"""Mistakes on the command line: the remedy exists, and a hint is near or not given."""

import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from modelwright.cli.main import main

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
    from modelwright.core.errors import StorageError, writing

    with pytest.raises(StorageError) as caught, writing(tmp_path):
        raise PermissionError(13, "Permission denied")
    assert "--run-dir" not in str(caught.value)
    assert re.search("write elsewhere", str(caught.value))


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
