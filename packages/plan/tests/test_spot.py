"""Checkpoint intervals against Daly's model and publications, the plan of a job on spot instances, and the command."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from scipy.special import lambertw

from modelwright.cli.main import main
from modelwright_plan.intervals import CheckpointCosts, daly_interval_s, expected_wall_s, young_interval_s
from modelwright_plan.spot import SpotJob, plan_spot, spot_tornado
from refusals import config_error

HOUR = 3600.0
JOB = SpotJob(work_s=30 * HOUR, stall_s=30.0, recovery_s=240.0, mtbf_s=5 * HOUR, spot_usd=2.0, on_demand_usd=6.0)


def best_of_model_s(stall_s: float, mtbf_s: float) -> float:
    """The interval at which the derivative of Daly's model is zero."""
    return mtbf_s * (1 + float(lambertw(-math.exp(-stall_s / mtbf_s - 1)).real))


def test_intervals() -> None:
    assert young_interval_s(60, 21_600) == pytest.approx(1609.969, abs=1e-3)
    assert daly_interval_s(60, 21_600) == pytest.approx(1570.217, abs=1e-3)
    assert daly_interval_s(50, 20) == 20
    assert math.isinf(daly_interval_s(60, math.inf))
    # The captions of Daly's figures 3 to 5: checkpoints of 5 minutes, interruptions every 24 h, 6 h and 15 min.
    published = [round(daly_interval_s(300, hours * HOUR) / 60, 1) for hours in (24, 6, 0.25)]
    assert published == pytest.approx([117, 57, 9.1], abs=0.5)
    for stall_s, mtbf_s in itertools.product((5, 60, 600), (HOUR, 6 * HOUR, 48 * HOUR)):
        exact = best_of_model_s(stall_s, mtbf_s)
        assert daly_interval_s(stall_s, mtbf_s) == pytest.approx(exact, rel=2e-3)
        assert abs(daly_interval_s(stall_s, mtbf_s) - exact) < abs(young_interval_s(stall_s, mtbf_s) - exact)


def test_expected_time_without_interruptions_is_work_and_checkpoints() -> None:
    assert expected_wall_s(100, 30, CheckpointCosts(stall_s=2, recovery_s=9), math.inf) == pytest.approx(108)
    assert expected_wall_s(90, 30, CheckpointCosts(stall_s=2, recovery_s=9), 1e9) == pytest.approx(96, rel=1e-6)
    assert math.isinf(expected_wall_s(1e6, 1e6, CheckpointCosts(stall_s=2, recovery_s=9), 100))


def test_the_plan_of_a_job() -> None:
    plan = plan_spot(JOB)
    assert plan.interval_s == daly_interval_s(30.0, 5 * HOUR)
    costs = CheckpointCosts(stall_s=30.0, recovery_s=240.0)
    assert plan.wall_s == expected_wall_s(30 * HOUR, plan.interval_s, costs, 5 * HOUR)
    assert plan.usd == pytest.approx(2.0 * plan.wall_s / HOUR)
    assert plan.on_demand_usd == pytest.approx(6.0 * (30 + 30 / HOUR))
    assert plan_spot(replace(JOB, mtbf_s=1e6 * HOUR)).interval_s == 30 * HOUR  # not beyond the whole work
    assert plan_spot(replace(JOB, recovery_s=None)).wall_s == plan_spot(replace(JOB, recovery_s=0.0)).wall_s
    with config_error("work-hours"):
        replace(JOB, work_s=0.0)


def test_a_job_that_would_never_end_is_refused() -> None:
    with config_error("interruptions-per-hour"):
        plan_spot(replace(JOB, mtbf_s=30.0))


def test_sensitivity_of_a_job() -> None:
    plan = plan_spot(JOB)
    swings = {swing.name: swing for swing in spot_tornado(plan, factor=2.0)}
    price = swings["spot price, $/h"]
    assert (price.at_low, price.at_high) == pytest.approx((plan.usd / 2, plan.usd * 2))
    rare = swings["hours between interruptions"]
    assert rare.at_low > plan.usd > rare.at_high
    unknown = spot_tornado(plan_spot(replace(JOB, recovery_s=None)), factor=2.0)
    assert "recovery, s" not in {swing.name for swing in unknown}


WORDS = ["plan", "spot", "--work-hours", "40", "--stall-s", "5", "--recovery-s", "180", "--instance", "g5.xlarge"]
OFTEN = ["--interruptions-per-hour", "0.2"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "task.yaml"
    made = ["--skypilot", str(task), "--target", "quickstart", "--bucket", "my-runs", "--or-on-demand"]
    assert main([*WORDS, *OFTEN, *made, "--html", str(tmp_path / "spot.html")]) == 0
    shown = capsys.readouterr().out
    assert "a checkpoint stalls it 5 s, a recovery takes 180 s" in shown
    assert "save every       7 min of work" in shown
    written = yaml.safe_load(task.read_text())
    assert written["resources"]["instance_type"] == "g5.xlarge"
    assert written["resources"]["ordered"] == [{"use_spot": True}, {"use_spot": False}]
    assert "<svg" in (tmp_path / "spot.html").read_text()
    assert main([*WORDS, *OFTEN, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["interval_s"] == daly_interval_s(5, 5 * HOUR)
    assert 40 * HOUR < data["expected_wall_s"] < 44 * HOUR


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (WORDS, "--interruptions-per-hour: give it, or --run with a run that was interrupted"),
        ([*WORDS, "--interruptions-per-hour", "0"], "--interruptions-per-hour: must be above 0"),
        ([*WORDS[:4], *OFTEN, *WORDS[-2:]], "--stall-s: give it, or --run"),
        ([*WORDS, *OFTEN, "--bucket", "my-runs"], "--bucket: describes a task; give --skypilot FILE, too"),
        ([*WORDS, *OFTEN, "--or-on-demand"], "--or-on-demand: describes a task; give --skypilot FILE, too"),
        ([*WORDS, *OFTEN, "--stall-s", "0"], "stall: must be above 0 seconds"),
    ],
)
def test_words_that_it_refuses(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_the_documented_commands_work_on_a_run_that_was_never_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most runs are like this one: a few minutes, some checkpoints, no interruption, no recovery."""
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [line.split() for line in re.findall(r"^    modelwright (plan spot .*)$", page, flags=re.M)]
    assert len(commands) == 2
    stage = tmp_path / "runs" / "quickstart" / "pretrain"
    stage.mkdir(parents=True)
    (stage.parent / "run.json").write_text("{}")
    stalls = [{"step": n, "checkpoint_stall_s": stall} for n, stall in enumerate((0.5, 4.0, 0.7))]
    (stage / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in stalls))
    monkeypatch.chdir(tmp_path)
    for words in commands:
        assert main(words) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "a checkpoint stalls it 0.7 s, what a recovery takes is unknown (--recovery-s)" in shown
    assert "expected time    at least 40 h" in shown
    assert (tmp_path / "task.yaml").is_file()
