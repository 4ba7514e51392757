"""Files begin in the order of what was recorded, and a run records what each file took."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import longest_first

HERE = Path(__file__).parent
CONFTEST = """
from pathlib import Path

import longest_first

longest_first.RECORDED = Path(__file__).with_name("seconds.json")
longest_first.LEAST_S = 0.5
pytest_plugins = ("longest_first",)
"""
TEST = """
import time

import pytest


@pytest.mark.slow
def test_one():
    time.sleep({})


def test_two():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, seconds in (("a", 0.0), ("b", 0.6), ("c", 0.0)):
        (tmp_path / f"test_{name}.py").write_text(TEST.format(seconds))
    (tmp_path / "seconds.json").write_text(json.dumps({"fast": {"test_c.py": 9}, "slow": {"test_a.py": 9}}))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {HERE}\ntestpaths = .\nmarkers = slow\n")
    return tmp_path


def order(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 4), done.stdout + done.stderr
    return "".join(line[5] for line in done.stdout.splitlines() if line.startswith("test_") and "PASSED" in line)


def test_the_longest_begin_first_and_are_recorded(folder: Path) -> None:
    assert order(folder, "-m", "not slow") == "cab"
    assert order(folder, "-m", "slow", "--record-seconds") == "abc"
    recorded = json.loads((folder / "seconds.json").read_text())
    assert list(recorded["slow"]) == ["test_b.py"]
    assert recorded["fast"] == {"test_c.py": 9}
    assert order(folder, "-m", "slow") == "bac"
    assert order(folder, "--record-seconds") == "", "of both sets at once nothing is recorded"


def test_what_is_recorded_exists() -> None:
    recorded = json.loads(longest_first.RECORDED.read_text(encoding="utf-8"))
    assert set(recorded) == set(longest_first.SETS.values())
    gone = [name for files in recorded.values() for name in files if not (HERE.parent / name).is_file()]
    assert gone == []
