"""Which of several processes' last words tell the cause."""

import signal
from pathlib import Path

import pytest

from modelwright.cli.main import main
from modelwright.cli.processes import Refused, _before_restart, _tell, print_ending, write_exit_report

LOST = "another process of this run has ended"


@pytest.fixture
def leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Words in the order of time, each by a process of its own."""

    def leave(*said: tuple[int, str]) -> Path:
        for number, (exit_code, text) in enumerate(said):
            monkeypatch.setenv("RANK", str(len(said) - number))
            monkeypatch.setattr("os.getpid", lambda number=number: 1000 + number)
            assert write_exit_report(str(tmp_path), text, exit_code) == exit_code
        return tmp_path

    return leave


@pytest.mark.parametrize(
    ("said", "killed", "asked", "exit_code", "shown"),
    [
        ([(3, LOST), (2, "x: is wrong")], {}, 0, 2, "modelwright: x: is wrong"),
        ([(1, "Traceback\nFirst: bug"), (1, "Traceback\nSecond: bug"), (3, LOST)], {}, 0, 1, "Traceback\nFirst: bug"),
        ([(1, "Traceback\nConnection closed")], {0: 9}, 0, 137, "modelwright: process 0 was ended by SIGKILL"),
        ([(2, "the disk is full")], {0: 9}, 0, 2, "modelwright: the disk is full"),
        ([(3, LOST), (143, "stopped after step 7")], {}, signal.SIGTERM, 143, "modelwright: stopped after step 7"),
        ([(143, "stopped after step 7"), (3, LOST)], {}, signal.SIGINT, 130, "modelwright: stopped after step 7"),
        ([(3, LOST)], {}, signal.SIGINT, 130, "modelwright: stopped; what was finished stays"),
        ([(143, "stopped"), (2, "the disk is full")], {}, signal.SIGINT, 2, "modelwright: the disk is full"),
        ([(3, LOST)], {}, 0, 3, f"modelwright: {LOST}"),
        ([], {}, signal.SIGINT, 130, "modelwright: stopped; what was finished stays"),
        ([], {}, signal.SIGTERM, 143, "modelwright: stopped; what was finished stays"),
    ],
)
def test_the_cause_is_told(leave, capsys, said, killed, asked, exit_code, shown) -> None:
    assert _tell(leave(*said), killed, asked, print_ending) == exit_code
    assert capsys.readouterr().err.startswith(shown)


def test_a_users_error_is_not_tried_again(leave) -> None:
    with pytest.raises(Refused, match="x: is wrong"):
        _before_restart(leave((3, LOST), (2, "x: is wrong")), print_ending)


def test_a_bug_is_named_and_the_words_are_forgotten(leave, capsys) -> None:
    folder = leave((1, "Traceback\nOutOfMemoryError: too large"), (143, "stopped"))
    _before_restart(folder, print_ending)
    assert "OutOfMemoryError: too large" in capsys.readouterr().err
    _before_restart(folder, print_ending)
    assert "OutOfMemoryError" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--hosts", "--devices-per-host"])
def test_plan_names_what_is_wrong(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "layout", "gpt3-175b", option, "0"]) == 2
    assert capsys.readouterr().err == f"modelwright: {option}: must be at least 1, got 0\n"
