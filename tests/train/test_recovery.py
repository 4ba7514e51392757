"""What a fault has cost is one line; a stop on purpose is none."""

import time

import pytest

from modelwright.core.errors import StorageError
from modelwright.core.records import read_records
from modelwright.train.monitors.recovery_time import RecoveryTime
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
    assert found == {"step": 3, "steps_lost": 2, "num_ranks": 1, "restart": 1}


def test_a_stop_on_purpose_is_no_fault(tmp_path):
    path = tmp_path / "recoveries.jsonl"
    before = RecoveryTime(path, num_ranks=1, restart=0)
    before.observe(info(1))
    before.stopped()
    RecoveryTime(path, num_ranks=1, restart=0).observe(info(2))
    assert read_records(path) == []


def test_a_full_disk_is_one_clear_error(tmp_path):
    path = tmp_path / "recoveries.jsonl"
    recovery = RecoveryTime(path, num_ranks=1, restart=0)
    (tmp_path / "recoveries.jsonl.alive").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"recoveries\.jsonl\.alive: the disk is full"):
        recovery.observe(info(1))
