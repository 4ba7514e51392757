"""The peers benchmark's arithmetic and its job file; the trainers themselves run in `make bench`."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def task_module(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("trainers.task")
    for name in [name for name in sys.modules if name.split(".")[0] == "trainers"]:
        del sys.modules[name]


def job(task_module, folder: Path):
    return task_module.Task(
        folder=folder, compute="fp32", num_steps=4, warmup_steps=2, batch_rows=2, seq_len=8, threads=1, device="cpu"
    )


def test_a_job_survives_its_file(task_module, tmp_path):
    task = job(task_module, tmp_path)
    task.save()
    assert task_module.Task.load(tmp_path) == task


def test_speed_leaves_the_warm_up_out(task_module, tmp_path):
    clock = task_module.StepClock(job(task_module, tmp_path), ends=[0.0, 10.0, 11.0, 12.0])
    assert clock.tokens_per_s == pytest.approx(2 * 16 / 2.0)


def test_a_trainer_that_stops_early_is_caught(task_module, tmp_path):
    clock = task_module.StepClock(job(task_module, tmp_path), ends=[0.0, 10.0])
    with pytest.raises(AssertionError, match="2 steps of 4"):
        _ = clock.tokens_per_s
