"""Commands that are forked instead of started as interpreters behave as those would."""

import signal
import subprocess
import sys
from pathlib import Path

from forked_commands import ForkedPopen
from modelwright import __version__

COMMAND = [sys.executable, "-m", "modelwright.cli.main"]


def test_output_errors_and_exit_code() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"modelwright {__version__}\n", "")
    done = subprocess.run(
        [*COMMAND, "no-such"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "no-such: unknown command" in done.stdout


def test_folder_and_environment_are_those_that_were_asked_for(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    command = [*COMMAND, "report", "here"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "here" in done.stderr
    assert "no run" in done.stderr or "not a run" in done.stderr or "run.json" in done.stderr, done.stderr


def test_a_command_can_be_killed() -> None:
    with subprocess.Popen([*COMMAND, "recipes"], stdout=subprocess.DEVNULL) as process:
        assert isinstance(process, ForkedPopen)
        assert process._process is not None
        process.kill()
        assert process.wait(60) == -signal.SIGKILL


def test_other_commands_are_started_as_ever() -> None:
    with subprocess.Popen([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE) as process:
        assert isinstance(process, ForkedPopen)
        assert process._process is None
        assert process.communicate()[0] == b"1\n"
