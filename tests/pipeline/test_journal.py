"""Stage logs and the formats of numbers that people read."""

from pathlib import Path

import pytest

from modelwright.core.artifacts import StageDir, read_attempts, read_stage_digest
from modelwright.core.config import Stopped
from modelwright.core.progress import SilentProgress
from modelwright.pipeline.runner import StageLog, begin_attempt


def test_log_has_notes_and_how_it_ended(tmp_path: Path) -> None:
    def work() -> None:
        with StageLog(tmp_path / "log.txt", SilentProgress(), "Training") as log:
            log.begin("train", 10, "steps")
            log.advance(1, loss=2.0)
            log.note("a note")
            raise Stopped("asked to")

    with pytest.raises(Stopped):
        work()
    lines = [line.split(" ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert lines == ["Training: begins", "a note", "Training: Stopped: asked to"]


def test_attempts_add_up_over_processes(tmp_path: Path) -> None:
    folder = StageDir(tmp_path)
    with pytest.raises(KeyboardInterrupt), begin_attempt(folder, "abc", 2):
        raise KeyboardInterrupt
    with begin_attempt(folder, "abc", 2) as attempt:
        attempt.child_peak_bytes = 7
    states = [(entry["state"], entry["ranks"], entry["child_peak_bytes"]) for entry in read_attempts(folder)]
    assert states == [("stopped", 2, 0), ("done", 2, 7)]
    assert read_stage_digest(folder) == "abc"


def test_a_damaged_journal_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "stage.json").write_text("{")
    assert read_stage_digest(StageDir(tmp_path)) == ""
    assert read_attempts(StageDir(tmp_path)) == []
