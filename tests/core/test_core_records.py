"""Metric records survive a crash and a resume; summaries are those of the textbook."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

from modelwright.core.config import derive_seed
from modelwright.core.records import Recorder, column, read_records, summarize
from modelwright.core.resources import ResourceUse, hardware, versions
from modelwright.core.sinks import MetricSink, Tracking


def sinks_of(folder: Path, first_step: int = 0) -> list[MetricSink]:
    """TensorBoard alone, as a training has it."""
    return Tracking().open(folder, "stage", first_step, pytest.fail)


def record(path: Path, steps: range, first_step: int = 0) -> None:
    recorder = Recorder(path, sinks=sinks_of(path.parent, first_step), first_step=first_step)
    for step in steps:
        recorder.write(step, loss=float(step), note="x")
    recorder.close()


def test_resume_cuts_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record(path, range(1, 8))
    with open(path, "a") as file:
        file.write('{"step": 8, "lo')
    record(path, range(5, 7), first_step=5)
    assert [entry["step"] for entry in read_records(path)] == [1, 2, 3, 4, 5, 6]
    assert list((tmp_path / "tensorboard").iterdir())


def test_tensorboard_shows_every_number_at_its_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "m.jsonl", sinks=sinks_of(tmp_path))
    recorder.write(3, loss=2.5, tokens=7, skipped=True, note="x", norm=math.inf, large=1e300)
    recorder.write(4, loss=2.25)
    recorder.close()
    [file] = (tmp_path / "tensorboard").iterdir()
    found = {event.step: {one.tag: one.simple_value for one in event.summary.value} for event in events(file)}
    assert found[3] == {"loss": 2.5, "tokens": 7.0, "norm": math.inf, "large": math.inf}
    assert found[4] == {"loss": 2.25}


def test_tensorboard_is_told_from_where_a_resumed_run_goes_on(tmp_path: Path) -> None:
    record(tmp_path / "m.jsonl", range(5, 7), first_step=5)
    [file] = (tmp_path / "tensorboard").iterdir()
    version, start, *numbers = events(file)
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (5, SessionLog.START)
    assert [event.step for event in numbers] == [5, 6]


def events(file: Path) -> Iterator[Any]:
    """A TensorBoard file's records: length (8 bytes), its checksum (4), the message, its checksum (4)."""
    data, at = file.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length


def test_values_that_are_not_finite_stay_readable_json(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "m.jsonl")
    recorder.write(1, loss=math.nan, norm=math.inf)
    recorder.close()
    assert read_records(tmp_path / "m.jsonl") == [{"step": 1, "loss": "nan", "norm": "inf"}]


def test_column_takes_what_is_there() -> None:
    assert column([{"step": 1, "a": 2}, {"step": 2, "b": 3}, {"step": 3, "a": "nan"}], "a")[0] == (1, 2.0)


def test_summary() -> None:
    summary = summarize([1.0, 2.0, 3.0, 4.0, math.nan])
    assert summary["count"] == 4
    assert summary["nonfinite"] == 1
    assert summary["mean"] == 2.5
    assert summary["std"] == pytest.approx(math.sqrt(5 / 3))
    assert (summary["min"], summary["p50"], summary["p25"], summary["max"]) == (1.0, 2.5, 1.75, 4.0)
    assert summarize([]) == {"count": 0.0, "nonfinite": 0.0}


def test_resources_of_a_block() -> None:
    with ResourceUse() as use:
        block = bytearray(50_000_000)
    del block
    assert use.peak_bytes > 50_000_000
    assert use.wall_s > 0
    assert hardware()["cores"] >= 1
    assert versions("numpy", "no-such-package").keys() == {"numpy"}


def test_seeds_are_stable_and_independent() -> None:
    assert derive_seed(1, "a", 2) == derive_seed(1, "a", 2) == 1746432839994673124
    assert len({derive_seed(1, "a"), derive_seed(1, "b"), derive_seed(2, "a")}) == 3
    assert 0 <= derive_seed(1, "a") < 2**63
