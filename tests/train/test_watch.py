"""The watch list: what it reports, what it leaves alone, what a checkpoint keeps of it."""

import copy
import math
import random

from modelwright.core.records import read_records
from modelwright.train.monitors.anomalies import AnomalyConfig, AnomalyLog
from modelwright.train.technique import StepInfo


def info(step, loss=3.0, grad_norm=1.0, wait=0.0, skipped=False):
    return StepInfo(
        step=step, loss=loss, losses={"loss": loss}, grad_norm=grad_norm, learning_rate=1e-3, num_tokens=100,
        tokens_per_s=100.0, mfu=0.1, data_wait_s=wait, comm_s=0.0, step_time_s=1.0, bytes_sent=0,
        skip_reason="not_finite" if skipped else "",
    )  # fmt: skip


def calm(watch, first, last):
    draw = random.Random(first)
    for step in range(first, last):
        watch.observe(info(step, 3.0 - 0.002 * step + draw.gauss(0, 0.05), 1.0 + draw.gauss(0, 0.1)))


def test_a_calm_run_has_no_events(tmp_path):
    watch = AnomalyLog(tmp_path / "anomalies.jsonl", AnomalyConfig())
    calm(watch, 1, 300)
    assert watch.events == []
    assert read_records(watch.path) == []


def test_each_kind_of_event_is_found_noted_and_written(tmp_path):
    notes = []
    watch = AnomalyLog(tmp_path / "anomalies.jsonl", AnomalyConfig(), note=notes.append)
    calm(watch, 1, 60)
    watch.observe(info(60, loss=6.0))
    watch.observe(info(61, grad_norm=40.0))
    watch.observe(info(62, loss=math.inf, grad_norm=math.nan, skipped=True))
    watch.observe(info(63, wait=0.8))
    events = read_records(watch.path)
    kinds = ["loss_spike", "gradient_outlier", "nonfinite_step", "data_stall"]
    assert [(event["step"], event["kind"]) for event in events] == list(zip(range(60, 64), kinds, strict=True))
    assert events == watch.events
    assert len(notes) == 4
    assert "loss 6 against a median of" in notes[0]
    assert watch.num_events == dict.fromkeys(kinds, 1)


def test_the_first_steps_are_not_judged(tmp_path):
    watch = AnomalyLog(tmp_path / "anomalies.jsonl", AnomalyConfig())
    for step in range(1, 15):
        watch.observe(info(step, loss=10.0 / step, grad_norm=10.0 / step))
    watch.observe(info(15, loss=30.0))
    assert watch.events == []


def test_resume_cuts_what_came_after_the_checkpoint(tmp_path):
    watch = AnomalyLog(tmp_path / "anomalies.jsonl", AnomalyConfig())
    calm(watch, 1, 60)
    watch.observe(info(60, loss=6.0))
    state = copy.deepcopy(watch.state_dict())
    watch.observe(info(61, loss=7.0))
    resumed = AnomalyLog(tmp_path / "anomalies.jsonl", AnomalyConfig())
    resumed.load_state_dict(state)
    assert [event["step"] for event in read_records(resumed.path)] == [60]
    resumed.observe(info(61, loss=7.0))
    assert resumed.events == watch.events
