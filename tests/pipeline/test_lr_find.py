"""The range test: what it proposes from a curve, and the command beside a run."""

import itertools
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from modelwright.core.config import ConfigError, ModelwrightError
from modelwright.pipeline.lr_find import SMOOTHING, RangeConfig, judge
from modelwright.pipeline.report.charts import smooth

Command = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("--data.validation_fraction=0.15", "--tokenizer.vocab_size=400")


def curve(num_points: int = 200) -> list[tuple[float, float]]:
    """Falls steepest at 1e-3, is lowest near 1e-2, and rises from there."""
    rates = [10.0 ** (-6 + 6 * number / (num_points - 1)) for number in range(num_points)]
    return [(rate, 5.0 - 2.0 / (1.0 + (1e-3 / rate) ** 2) + (rate / 3e-2) ** 2) for rate in rates]


def test_lowest_and_steepest_are_found_within_the_lag_of_smoothing():
    found = judge(curve(), diverged=True)
    assert 5e-3 < found.lowest < 3e-2
    assert 5e-4 < found.steepest < 4e-3
    assert found.proposal == pytest.approx(found.lowest / 10)


def test_smoothing_is_unbiased_at_its_start():
    assert smooth([(1.0, 3.0)] * 4, SMOOTHING) == [(1.0, pytest.approx(3.0))] * 4
    values = [value for _, value in smooth([(1.0, 0.0), (2.0, 1.0)], SMOOTHING)]
    assert values == pytest.approx([0.0, 0.1 / 0.19])


def test_a_curve_that_ends_at_once_proposes_nothing():
    with pytest.raises(ModelwrightError, match="--min-lr"):
        judge([(1e-3, 5.0), (1e-2, math.nan)], diverged=True)


@pytest.mark.parametrize(("change", "field"), [({"min_lr": 2.0}, "--min-lr"), ({"num_steps": 3}, "--steps")])
def test_what_makes_no_sense_is_named(change, field):
    with pytest.raises(ConfigError, match=f"^{field}: "):
        RangeConfig(**change)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_command_makes_its_own_rows_or_takes_the_runs_and_leaves_the_run_alone(
    tmp_path: Path, corpus: Path, inside: Command
) -> None:
    settings = ("--data.sources", str(corpus), *SMALL)
    run, beside = tmp_path / "run", tmp_path / "run-lr-find"
    done = inside("lr-find", "tiny", "--run-dir", str(run), "--steps", "40", "--min-lr", "1e-5", *settings)
    assert done.returncode == 0, done.stderr
    assert "proposed peak" in done.stdout
    assert not run.exists()
    record = json.loads((beside / "lr-find.json").read_text())
    rates = [rate for rate, _ in record["points"]]
    assert rates[0] == pytest.approx(1e-5)
    assert all(b > a for a, b in itertools.pairwise(rates))
    assert 1e-5 < record["lowest"] < 1.0
    assert "<svg" in (beside / "lr-find.html").read_text()

    stages = ("--stages", "clean,tokenize,pack")
    assert inside("run", "tiny", "--run-dir", str(run), *stages, *settings).returncode == 0
    before = snapshot(run)
    out = tmp_path / "out"
    sweep = ("--steps", "40", "--min-lr", "1e-5")
    done = inside("lr-find", "tiny", "--run-dir", str(run), *sweep, "--out", str(out), *settings)
    assert done.returncode == 0, done.stderr
    assert snapshot(run) == before
    assert sorted(path.name for path in out.iterdir()) == ["lr-find.html", "lr-find.json"]
    assert json.loads((out / "lr-find.json").read_text())["points"] == record["points"]


def test_it_does_not_write_into_the_run(tmp_path: Path, inside: Command) -> None:
    done = inside("lr-find", "tiny", "--run-dir", str(tmp_path), "--out", str(tmp_path))
    assert done.returncode == 2
    assert "--out: " in done.stderr
