"""A full run of the fast tests fails when its processes take more CPU time than the limit, and no other run does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_budget import NAME

HERE = Path(__file__).parent
CONFTEST = """
import json
import sys
from pathlib import Path

import cpu_budget

cpu_budget.LIMITS = Path(__file__).with_name("limits.json")
pytest_plugins = ("cpu_budget",)
"""
TEST = """
import multiprocessing, time


def work():
    end = time.process_time() + SECONDS
    while time.process_time() < end:
        pass


def test_work():
    context = multiprocessing.get_context("forkserver")  # most of the CPU time is that of such processes
    process = context.Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.parametrize(
    ("most", "words", "code"),
    [
        ("2.4", ["-m", "not slow"], 1),
        ("2.4", ["-m", "not slow", "-p", "xdist.plugin", "-n", "1"], 1),
        ("1000", ["-m", "not slow"], 0),
        ("0.01", ["-m", "not slow", "-k", "work"], 0),
        ("0.01", ["-m", "not slow", "test_one.py"], 0),
        ("0.01", [], 0),
    ],
    ids=["too much", "too much in another process", "within", "by name", "a file", "slow ones too"],
)
def test_too_much_cpu_time_fails_the_run(tmp_path: Path, most: str, words: list[str], code: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(TEST.replace("SECONDS", "2.5" if code else "0"))
    (tmp_path / "limits.json").write_text(f'{{"{NAME}": {most}}}')
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {HERE}\ntestpaths = .\nmarkers = slow\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    # Without plugins pytest itself takes less than a second, so only the process that it forked reaches the limit.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert (f"FAILED {NAME}" in done.stdout) == (code == 1)
    assert "1 passed" in done.stdout
