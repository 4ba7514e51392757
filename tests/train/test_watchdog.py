"""A hanging process ends by itself, says where it hung, and is left alone as long as it makes progress."""

import subprocess
import sys
from pathlib import Path

import pytest

from modelwright.train.interruption import Watchdog
from refusals import config_error

PROGRAM = """
import sys, threading, time
from pathlib import Path
from modelwright.train.interruption import Watchdog

def wait_for_a_rank_that_never_comes():
    {hang}

threading.Thread(target=threading.Event().wait, name="writer", daemon=True).start()
with Watchdog(Path(sys.argv[1]), limit_s=2) as dog:
    start = time.monotonic()
    while time.monotonic() < start + 3:
        time.sleep(0.1)
        dog.alive()
    print("lives", flush=True)
    wait_for_a_rank_that_never_comes()
time.sleep(3)
print("done")
"""
HANGS = {
    "waiting": "threading.Event().wait()",
    "spinning": "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
    "leaving": "return",
}


def left_behind(log: Path) -> str:
    return log.read_text() if log.exists() else ""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """By name: exit status, output, and log of a program each; they run at the same time."""
    folder = tmp_path_factory.mktemp("hangs")
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(hang=hang), folder / name / "log.txt"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, hang in HANGS.items()
    }
    said = {name: process.communicate(timeout=120)[0].split() for name, process in started.items()}
    return {name: (started[name].returncode, said[name], left_behind(folder / name / "log.txt")) for name in HANGS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["waiting", "spinning"])
def test_a_hanging_process_ends_with_its_stacks_in_the_log(ended, name):
    """Waiting with the interpreter's lock released, and spinning in C with it held."""
    code, said, log = ended[name]
    assert (code, said) == (1, ["lives"])
    assert "wait_for_a_rank_that_never_comes" in log
    assert log.count("most recent call first") >= 2


def test_leaving_stops_the_clock(ended):
    assert ended["leaving"] == (0, ["lives", "done"], "")


def test_off_means_off(tmp_path):
    with Watchdog(tmp_path / "log.txt", limit_s=0) as dog:
        dog.alive()
    assert not (tmp_path / "log.txt").exists()
    with config_error("hang_after_s"):
        Watchdog(tmp_path / "log.txt", limit_s=-1)
