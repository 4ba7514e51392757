"""What an interruption has cost is one line, announced or not; a stop on purpose is none."""

import signal
import time
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from modelwright.core.artifacts import StorageError
from modelwright.core.config import ModelwrightError, Stopped
from modelwright.core.records import read_records
from modelwright.train.monitors.recovery_time import RecoveryTime, recovery_time
from modelwright.train.technique import StepInfo


def info(step):
    values = {"loss": 1.0, "losses": {}, "grad_norm": 1.0, "learning_rate": 0.1, "num_tokens": 1, "tokens_per_s": 1.0,
              "mfu": 0.0, "data_wait_s": 0.0, "comm_s": 0.0, "step_time_s": 0.1,
              "bytes_sent": 0}  # fmt: skip
    return StepInfo(step=step, **values)


def test_a_fault_is_measured_from_the_last_step_to_the_next(tmp_path):
    path = tmp_path / "recoveries.jsonl"
    before, started = RecoveryTime(path, num_ranks=2, restart=0), time.time()
    for step in (1, 2, 3, 4):
        before.observe(info(step))
    assert read_records(path) == []
    time.sleep(0.2)
    after = RecoveryTime(path, num_ranks=1, restart=1)
    after.observe(info(3))
    after.observe(info(4))
    [found] = read_records(path)
    down_s = found.pop("down_s")
    assert 0.2 <= down_s <= time.time() - started
    assert found == {"kind": "fault", "step": 3, "steps_lost": 2, "num_ranks": 1, "restart": 1}


def test_a_stop_on_purpose_is_no_fault(tmp_path):
    path = tmp_path / "recoveries.jsonl"
    before = RecoveryTime(path, num_ranks=1, restart=0)
    before.observe(info(1))
    before.stopped()
    RecoveryTime(path, num_ranks=1, restart=0).observe(info(2))
    assert read_records(path) == []


def trained(folder, step, error=None):
    """One process that does a step and then ends, in the way that the training loop ends it."""
    with suppress(ModelwrightError), ExitStack() as on_exit:
        run = SimpleNamespace(log_event=object(), folder=folder, world=SimpleNamespace(size=1), on_exit=on_exit)
        technique = recovery_time(cast(Any, run))
        assert technique is not None
        technique.on_step_end(info(step))
        if error:
            raise error


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (Stopped("stopped", signal.SIGTERM), ["announced"]),
        (Stopped("stopped", signal.SIGINT), []),
        (ModelwrightError("diverged"), ["fault"]),
        (None, []),
    ],
)
def test_how_a_process_ends_is_the_kind_of_its_recovery(tmp_path, error, kinds):
    trained(tmp_path, 4, error)
    trained(tmp_path, 5)
    records = read_records(tmp_path / "recoveries.jsonl")
    assert [record["kind"] for record in records] == kinds
    assert [(record["step"], record["steps_lost"]) for record in records] == [(5, 0)] * len(kinds)
    trained(tmp_path, 6)
    assert len(read_records(tmp_path / "recoveries.jsonl")) == len(kinds), "an end on purpose follows"


def test_a_process_that_is_told_to_stop_before_its_first_step_adds_nothing(tmp_path):
    path = tmp_path / "recoveries.jsonl"
    RecoveryTime(path, num_ranks=1, restart=0).observe(info(1))
    RecoveryTime(path, num_ranks=1, restart=0).announced()
    RecoveryTime(path, num_ranks=1, restart=0).observe(info(2))
    assert [record["kind"] for record in read_records(path)] == ["fault"]


def test_a_full_disk_is_one_clear_error(tmp_path):
    path = tmp_path / "recoveries.jsonl"
    recovery = RecoveryTime(path, num_ranks=1, restart=0)
    (tmp_path / "recoveries.jsonl.alive").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"recoveries\.jsonl\.alive: the disk is full"):
        recovery.observe(info(1))
