"""Curves keep the extremes of every interval, whatever the pieces in which a file was read."""

import json
import math
import os
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from modelwright_board import series
from modelwright_board.series import MOST_BUCKETS, MetricsFile, charts_of, curve_message


def written(folder: Path, records: list[dict], *, mode: str = "w") -> None:
    (folder / "pretrain").mkdir(exist_ok=True)
    with open(folder / "pretrain" / "metrics.jsonl", mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read(folder: Path) -> MetricsFile:
    file = MetricsFile(folder, "pretrain")
    file.read(60)
    return file


def test_a_short_file_is_kept_whole(tmp_path: Path) -> None:
    losses = np.random.default_rng(0).normal(size=300)
    written(tmp_path, [{"step": step, "loss": loss} for step, loss in enumerate(losses)])
    places, values = read(tmp_path).points("loss")
    assert places == list(range(300))
    assert np.allclose(values, losses, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(1, 7), st.integers(0, 1000))
def test_extremes_of_every_interval_survive(tmp_path_factory, losses: list[float], stride: int, cut: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    records = [{"step": stride * place, "loss": loss} for place, loss in enumerate(losses)]
    written(folder, records[:cut])
    file = read(folder)
    written(folder, records[cut:], mode="a")
    file.read(60)
    places, values = file.points("loss")
    shown = dict(zip(places, values, strict=True))
    by_bucket: dict[int, list[tuple[float, float]]] = {}
    for record in records:
        by_bucket.setdefault(int(record["step"] // file.width), []).append((record["loss"], record["step"]))
    assert len(by_bucket) <= MOST_BUCKETS
    for inside in by_bucket.values():
        for extreme in (min(inside)[0], max(inside)[0]):
            assert any(
                math.isclose(shown[step], extreme, rel_tol=1e-5, abs_tol=1e-9) for _, step in inside if step in shown
            )
    assert len(places) <= 2 * MOST_BUCKETS


def test_columns_and_lines_give_the_same(tmp_path: Path, monkeypatch) -> None:
    rng = np.random.default_rng(1)
    records = []
    for step in range(1, 4000):
        records.append({"step": step, "loss": float(rng.normal()), "num_tokens": 64, "skipped": False, "text": "x"})
        if step % 100 == 0:
            records.append({"step": step, "heldout_loss": float(rng.normal())})
    written(tmp_path, records)
    fast = read(tmp_path)
    monkeypatch.setattr(series, "_columns", lambda piece: None)
    slow = read(tmp_path)
    assert set(fast.names) == {"loss", "heldout_loss", "num_tokens"}
    for name in fast.names:
        for axis in ("step", "tokens"):
            assert fast.points(name, axis) == slow.points(name, axis)
    places, _ = fast.points("heldout_loss", "tokens")
    assert np.allclose(places, 64 * np.arange(100, 4000, 100), atol=64 * fast.width)
    assert places[-1] == 64 * 3900


def test_broken_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    written(tmp_path, [{"step": step, "loss": 1.0} for step in range(100)])
    path = tmp_path / "pretrain" / "metrics.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"step": 100, "loss": \n[1]\n{"step": "x", "loss": 3}\n{"step": 1e400, "loss": 9}\n\xff\xfe\n')
        file.write(b'{"step": 101, "loss": "nan"}\n{"step": 102, "loss": 5.0}\n{"step": 103, "lo')
    file = read(tmp_path)
    places, values = file.points("loss")
    assert (places[-1], values[-1], max(values)) == (102, 5.0, 5.0)
    assert file.num_broken >= 3
    assert file.is_whole
    with open(path, "ab") as more:
        more.write(b'ss": 7.0}\n')
    file.read(60)
    assert file.points("loss")[1][-1] == 7.0


def test_a_resumed_run_replaces_its_curve(tmp_path: Path) -> None:
    written(tmp_path, [{"step": step, "loss": 9.0} for step in range(50)])
    file, sent = MetricsFile(tmp_path, "pretrain"), {}
    first = curve_message({"a": file}, "step", sent, budget_s=10)
    assert first["charts"][0]["traces"][0]["since"] == -1.0
    assert curve_message({"a": file}, "step", sent, budget_s=10) == {}
    written(tmp_path, [{"step": 50, "loss": 8.0}], mode="a")
    later = curve_message({"a": file}, "step", sent, budget_s=10)["charts"][0]["traces"][0]
    assert (later["x"][-1], later["y"][-1], later["since"] > 0) == (50, 8.0, True)
    (tmp_path / "new").mkdir()
    written(tmp_path / "new", [{"step": 0, "loss": 1.0}])
    os.replace(tmp_path / "new" / "pretrain" / "metrics.jsonl", tmp_path / "pretrain" / "metrics.jsonl")
    again = curve_message({"a": file}, "step", sent, budget_s=10)["charts"][0]["traces"][0]
    assert (again["since"], again["x"], again["y"]) == (-1.0, [0], [1.0])


def test_a_line_without_an_end_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "pretrain").mkdir()
    with open(tmp_path / "pretrain" / "metrics.jsonl", "wb") as file:
        file.truncate(2_000_000_000)  # a hole: 2 GB without a line
    file = MetricsFile(tmp_path, "pretrain")
    file.read(0.2)
    assert 0 < file.share_read < 1 or file.is_whole
    assert file.names == []


def test_a_link_out_of_the_folder_is_not_read(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    written(other, [{"step": 1, "loss": 1.0}])
    (run / "pretrain").symlink_to(other / "pretrain")
    assert read(run).names == []


def test_related_metrics_share_a_chart() -> None:
    charts = charts_of(["loss", "heldout_loss", "reward", "reward_std", "strange", "num_tokens"])
    assert [(kind["title"], names) for kind, names in charts] == [
        ("Loss", ["loss", "heldout_loss"]),
        ("Reward", ["reward", "reward_std"]),
        ("strange", ["strange"]),
    ]
