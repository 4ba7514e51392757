"""The monitor on made-up traffic: silence without drift, alarms with causes under injected shifts."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from scipy.stats import binom

from continual_requests import CONFIG, WINDOW, write_requests
from drift_traffic import Shift, Traffic
from finetune_files import write_model
from modelwright.core.artifacts import ArtifactError
from modelwright.core.config import ConfigError, DataError
from modelwright_continual.drift.calibrate import BlockSampler
from modelwright_continual.drift.check import DriftReport, check, check_windows, like_sized
from modelwright_continual.drift.reference import DriftReference, freeze_reference, load_reference
from modelwright_continual.drift.report import as_text
from modelwright_continual.drift.requests import read_requests
from refusals import config_error

pytestmark = pytest.mark.slow

Records = list[dict[str, Any]]
NUM_STATIONARY = 15
"""Windows."""


def reports(reference: DriftReference, records: Records) -> list[DriftReport]:
    return list(check_windows(records, reference))


def looks_stationary(reports: list[DriftReport]) -> None:
    """Assert that windows alarm no more often than the reference states, and that the p-values of each feature look
    like uniform ones, whose mean over n is 0.5 with a deviation of 1 / sqrt(12 n), and more because windows share the
    reference: that shows an inflation before it has led to alarms.
    """
    num_alarms = sum(report.alarm for report in reports)
    assert num_alarms <= binom.ppf(0.99, len(reports), 1 / reports[0].run_length)
    for features in zip(*(report.features for report in reports), strict=True):
        mean = np.mean([feature.p_value for feature in features])
        assert abs(mean - 0.5) < 4 / np.sqrt(12 * len(reports)), (features[0].name, mean)


@pytest.mark.slow
def test_stationary_traffic_alarms_as_often_as_stated(reference: DriftReference, traffic: Traffic) -> None:
    """The whole measurement is benchmarks/drift.py."""
    looks_stationary(reports(reference, traffic.requests(NUM_STATIONARY * WINDOW, 2)))
    assert reference.calibration.low < 50 < reference.calibration.high


@pytest.mark.parametrize(
    ("shift", "feature"),
    [
        (Shift(other_language=0.2), "prompt_embedding"),
        (Shift(length=1.6), "prompt_length"),
        (Shift(rare_topic=0.15), "prompt_embedding"),
        (Shift(bad_feedback=0.6), "feedback_label"),
    ],
)
def test_a_shift_is_found_with_its_cause(
    reference: DriftReference, traffic: Traffic, shift: Shift, feature: str
) -> None:
    found = reports(reference, traffic.requests(3 * WINDOW, 3, shift=shift))
    alarms = [one for report in found for one in report.features if one.alarm and one.name == feature]
    assert alarms
    alarm = alarms[0]
    assert alarm.psi > 0
    assert len(alarm.window_examples) == len(alarm.reference_examples) == 3
    if shift.other_language:
        assert all(any(part in text for part in ("czy", "prz", "wsk", "drz", "kie", "dzi", "osc", "niej"))
                   for text in alarm.window_examples)  # fmt: skip
        assert not any("szcz" in text or "czy" in text for text in alarm.reference_examples)
    if shift.length > 1:
        longest = min(len(text.partition(" -> ")[0]) for text in alarm.window_examples)
        assert longest > max(len(text.partition(" -> ")[0]) for text in alarm.reference_examples)
    if shift.bad_feedback:
        assert alarm.category == "wrong"
        assert "wrong" not in alarm.cause
    text = as_text(next(report for report in found if report.alarm))
    assert "ALARM" in text
    assert alarm.cause in text


def test_more_traffic_and_another_order_are_no_drift(reference: DriftReference, traffic: Traffic) -> None:
    looks_stationary(reports(reference, traffic.requests(NUM_STATIONARY * WINDOW, 4, rate=2.0)))
    records = traffic.requests(2 * WINDOW, 5)
    shuffled = random.Random(0).sample(records, len(records))
    assert reports(reference, shuffled) == reports(reference, records)


@pytest.mark.slow
def test_times_that_are_shuffled_are_no_drift(reference: DriftReference, traffic: Traffic) -> None:
    """Then a window has half of the requests of each session. Every window is of another log, because those of one log
    would share its sessions.
    """
    windows: list[DriftReport] = []
    for number in range(NUM_STATIONARY):
        records = traffic.requests(2 * WINDOW, 200 + number)
        times = random.Random(number).sample([record["time"] for record in records], len(records))
        shuffled = [record | {"time": time} for record, time in zip(records, times, strict=True)]
        windows.append(reports(reference, shuffled)[0])
    looks_stationary(windows)


def test_without_texts_a_smallest_effect_that_no_window_reaches_is_silent(traffic: Traffic, tmp_path: Path) -> None:
    """Lengths and labels alone, where 20% must move: windows of the same traffic raise no alarm, a longer one does."""
    config = replace(CONFIG, min_effect=0.2)

    def wordless(records: Records) -> Records:
        return [record | {"prompt": None} for record in records]

    reference = freeze_reference(wordless(traffic.requests(3000, 41)), None, tmp_path / "reference", config)
    assert "prompt_embedding" not in {one.name for one in reference.marginals}
    assert reference.self_alarms == 0
    assert reference.calibration.run_length >= CONFIG.run_length
    assert not any(report.alarm for report in reports(reference, wordless(traffic.requests(3 * WINDOW, 42))))
    worse = wordless(traffic.requests(WINDOW, 43, shift=Shift(bad_feedback=0.9)))
    assert "feedback_score" in reports(reference, worse)[0].alarmed


@pytest.mark.parametrize("num_sessions", [1, 80])
def test_one_busy_user_is_no_drift(reference: DriftReference, traffic: Traffic, num_sessions: int) -> None:
    """40% of the requests are another language, all of one user. Of as many users they are drift."""
    records = traffic.requests(2 * WINDOW, 7)
    foreign = traffic.requests(WINDOW, 8, shift=Shift(other_language=1.0))
    for many in (False, True):
        changed = list(records)
        for number in range(0, len(records), 5):
            for place in (number, number + 1):
                session = f"busy-{place % num_sessions}" if not many else f"session-{place // 4}"
                user = "busy" if not many else session
                other = foreign[place // 5]
                changed[place] |= {"session": session, "user": user, "prompt": other["prompt"]}
        alarmed = [report.alarm for report in reports(reference, changed)]
        assert alarmed == [many, many]


def test_a_session_is_cut_to_like_sizes() -> None:
    blocks = np.repeat(np.arange(40), 10)
    places, codes = like_sized(blocks, np.array([1, 2, 3, 4]), 20, np.random.default_rng(0))
    sizes = np.bincount(codes)
    assert len(sizes) == 20
    assert sorted(set(sizes.tolist())) == [1, 2, 3, 4]
    assert len(set(places.tolist())) == len(places)
    assert all(len(set(blocks[places[codes == code]])) == 1 for code in range(20))


def test_windows_are_drawn_of_whole_sessions() -> None:
    blocks = np.random.default_rng(0).permutation(np.repeat(np.arange(30), 7))
    sampler = BlockSampler(blocks, np.arange(30), 1.0)
    records, units = sampler.draw(40, np.random.default_rng(1))
    assert len(records) == len(units.of_record) == 40
    assert units.sizes.tolist() == [7, 7, 7, 7, 7, 5]
    assert all(len(set(blocks[records[units.of_record == unit]])) == 1 for unit in range(6))


def test_a_reference_is_frozen(reference: DriftReference, reference_folder: Path, traffic: Traffic) -> None:
    records = traffic.requests(WINDOW, 9)
    assert check(records, load_reference(reference_folder)) == check(records, reference)
    with pytest.raises(ConfigError, match="already contains a reference, which never changes"):
        freeze_reference(records, None, reference_folder, CONFIG)
    other = [record | {"version": "2"} for record in records]
    assert "version 2, and the reference is of version 1" in check(other, reference).notes[0]


def test_a_damaged_reference_is_refused(reference: DriftReference, reference_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in reference_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    content = bytearray((copy / "arrays.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "arrays.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"arrays\.safetensors: is damaged"):
        load_reference(copy)


def test_the_served_model_adds_perplexities(tmp_path: Path, traffic: Traffic) -> None:
    model = write_model(tmp_path / "model", max_seq_len=64)
    config = replace(CONFIG, window_requests=100, run_length=5)
    folder = tmp_path / "reference"
    short = [record | {"prompt": record["prompt"][:40]} for record in traffic.requests(600, 10)]
    reference = freeze_reference(short, model, folder, config)
    with pytest.raises(ConfigError, match="give its folder with --model"):
        load_reference(folder)
    with config_error("model", match="is not the model"):
        load_reference(folder, write_model(tmp_path / "other", max_seq_len=64, init_std=0.06))
    assert reference.embeddings.shape[1] == 32 + 4
    window = [record | {"prompt": "0123456789" * 4} for record in traffic.requests(100, 11)]
    found = {feature.name: feature for feature in check(window, reference).features}
    assert found["prompt_perplexity"].effect > 0.9
    assert found["prompt_embedding"].alarm


def test_jsonl_and_parquet_are_read_alike(tmp_path: Path, traffic: Traffic) -> None:
    records = traffic.requests(50, 12)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "r.parquet")
    lines = read_requests([str(write_requests(tmp_path / "r.jsonl", records))])
    rows = read_requests([str(tmp_path / "r.parquet")])
    assert [one["prompt"] for one in lines] == [one["prompt"] for one in rows] == [one["prompt"] for one in records]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time": "noon"}, "time must be a number of seconds, got 'noon'"),
        ({"time": float("nan")}, "time must be a number of seconds, got nan"),
        ({"time": 1.7e12}, "time must be in seconds since 1970, got 1700000000000.0; divide milliseconds by 1000"),
        ({"prompt": 7}, "prompt must be a text or null, got int"),
        ({"id": ""}, "id must be a text, got ''"),
        ({"feedback_score": "good"}, "feedback_score must be a number or null, got 'good'"),
        ({"id": "twice-0"}, r"request 'twice-0' is also at .*r\.jsonl:1; export each request once"),
        (None, "has no 'prompt'; export the requests with modelwright requests export"),
        ("{", r"is not valid JSON .*; correct the line"),
        ("[1]", "holds a JSON list where an object is expected"),
    ],
)
def test_bad_input_names_file_and_line(tmp_path: Path, change: Any, message: str) -> None:
    record = {"id": "twice-0", "time": 1.0, "session": "s", "prompt": "hello"}
    second: Any = record | {"id": "b"}
    if change is None:
        del second["prompt"]
    elif isinstance(change, dict):
        second |= change
    path = write_requests(tmp_path / "r.jsonl", [record])
    with open(path, "a", encoding="utf-8") as file:
        file.write(change if isinstance(change, str) else json.dumps(second))
    with pytest.raises(DataError, match=rf"r\.jsonl:2: {message}"):
        read_requests([str(path)])


def test_other_bad_input(tmp_path: Path, traffic: Traffic, reference: DriftReference) -> None:
    with pytest.raises(DataError, match=r"no\.jsonl: no such file"):
        read_requests([str(tmp_path / "no.jsonl")])
    pyarrow.parquet.write_table(pyarrow.table({"id": ["a"]}), tmp_path / "r.parquet")
    with pytest.raises(DataError, match=r"row 1: has no 'time'"):
        read_requests([str(tmp_path / "r.parquet")])
    with pytest.raises(DataError, match="the reference has 600 requests; it needs at least 5 windows of 500"):
        freeze_reference(traffic.requests(600, 1), None, tmp_path / "new", CONFIG)
    assert not (tmp_path / "new").exists()
    with pytest.raises(DataError, match="too few; give at least 10 sessions"):
        check(traffic.requests(5, 1), reference)
    for change, message in (({"run_length": 1.0}, "run_length"), ({"window_requests": 3}, "window_requests")):
        with pytest.raises(ConfigError, match=message):
            replace(CONFIG, **change)
