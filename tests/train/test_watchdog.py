"""A hanging process ends by itself, says where it hung, and is left alone as long as it makes progress."""

import subprocess
import sys

import pytest

from modelwright.core.errors import ConfigError
from modelwright.train.watchdog import Watchdog

PROGRAM = """
import sys, threading, time
from pathlib import Path
from modelwright.train.watchdog import Watchdog

def wait_for_a_rank_that_never_comes():
    {hang}

threading.Thread(target=threading.Event().wait, name="writer", daemon=True).start()
with Watchdog(Path(sys.argv[1]), limit_s=0.4) as dog:
    for _ in range(8):
        time.sleep(0.1)
        dog.alive()
    print("lives", flush=True)
    wait_for_a_rank_that_never_comes()
"""


@pytest.mark.parametrize("hang", ["threading.Event().wait()", "import re; re.match('(a+)+$', 'a' * 64 + 'b')"])
def test_a_hanging_process_ends_with_its_stacks_in_the_log(tmp_path, hang):
    """Waiting with the interpreter's lock released, and spinning in C with it held."""
    log = tmp_path / "stage" / "log.txt"
    command = [sys.executable, "-c", PROGRAM.format(hang=hang), log]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "lives"
    assert done.returncode == 1
    assert "wait_for_a_rank_that_never_comes" in log.read_text()
    assert log.read_text().count("most recent call first") >= 2


def test_off_means_off(tmp_path):
    with Watchdog(tmp_path / "log.txt", limit_s=0) as dog:
        dog.alive()
    assert not (tmp_path / "log.txt").exists()
    with pytest.raises(ConfigError, match="hang_after_s"):
        Watchdog(tmp_path / "log.txt", limit_s=-1)


def test_leaving_stops_the_clock(tmp_path):
    program = PROGRAM.format(hang="return") + "\ntime.sleep(1)\nprint('done')"
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "log.txt"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["lives", "done"])
