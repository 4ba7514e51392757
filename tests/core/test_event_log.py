"""Event logs are whole after a kill, and after a resume what they were at the checkpoint."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from modelwright.core.artifacts import StorageError
from modelwright.core.records import EventLog, read_records

WRITER = """
import sys
from pathlib import Path
from modelwright.core.records import EventLog
log = EventLog(Path(sys.argv[1]), max_events=10**9)
number = 0
while True:
    log.append(number=number, text="x" * 5000)
    number += 1
    if number == 50:
        print("many", flush=True)
"""


def test_events_are_lines_and_memory_holds_what_a_reader_finds(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "stage" / "events.jsonl")
    assert not log.path.exists()
    assert log.append(step=3, loss=math.nan, pair=(1, math.inf), nested={"norm": -math.inf})
    assert log.append(step=4, loss=2.5)
    assert log.path.read_text().splitlines() == [
        '{"step": 3, "loss": "nan", "pair": [1, "inf"], "nested": {"norm": "-inf"}}',
        '{"step": 4, "loss": 2.5}',
    ]
    assert log.events == read_records(log.path)


def test_a_checkpoint_takes_later_events_back(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append(step=1)
    state = json.loads(json.dumps(log.state_dict()))
    log.append(step=2)
    resumed = EventLog(log.path)
    resumed.load_state_dict(state)
    assert read_records(log.path) == resumed.events == [{"step": 1}]
    resumed.append(step=3)
    assert [event["step"] for event in read_records(log.path)] == [1, 3]
    assert state == {"events": [{"step": 1}]}, "the state belongs to the checkpoint"


def test_a_run_from_the_start_does_not_show_events_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).append(step=9)
    assert EventLog(path).events == read_records(path) == []


def test_existing_events_stay_on_request_without_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).append(step=1)
    with open(path, "a") as file:
        file.write('{"step": 2, "lo')
    log = EventLog(path, keep_existing=True, max_events=2)
    assert log.append(step=3)
    assert not log.append(step=4)
    assert read_records(path) == log.events == [{"step": 1}, {"step": 3}]
    assert path.read_text().count("\n") == 2


def test_a_full_log_drops_events(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", max_events=3)
    assert [log.append(step=step) for step in range(5)] == [True] * 3 + [False] * 2
    assert [event["step"] for event in read_records(log.path)] == [0, 1, 2]


def test_other_ranks_keep_events_and_write_nothing(tmp_path: Path) -> None:
    first, second = (EventLog(tmp_path / "events.jsonl", is_first=is_first) for is_first in (True, False))
    first.append(step=1)
    second.append(step=1)
    second.append(step=2)
    second.load_state_dict(second.state_dict())
    assert second.state_dict()["events"] == [{"step": 1}, {"step": 2}]
    assert read_records(first.path) == [{"step": 1}]
    EventLog(first.path, is_first=False)
    assert read_records(first.path) == [{"step": 1}]


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"many\n"
        process.send_signal(signal.SIGKILL)
    numbers = [event["number"] for event in read_records(path)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= 50
    assert len(path.read_text().splitlines()) - len(numbers) in (0, 1)
    EventLog(path, keep_existing=True)
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == numbers


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    os.symlink("/dev/full", log.path)
    with pytest.raises(StorageError, match=r"events\.jsonl: the disk is full"):
        log.append(step=1)
