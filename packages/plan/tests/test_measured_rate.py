"""The rate of interruptions that a run shows: its mean, its interval, and the bound of a run that had none."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import poisson

from modelwright.cli.main import main
from modelwright.core.errors import ConfigError
from modelwright.core.rundir import RunDir
from modelwright_plan.run_cost import measured_rate, measured_recovery_s
from modelwright_plan.spot.measured import MeasuredRate


def run_of(folder: Path, *, hours: float, recoveries: list[dict[str, Any]]) -> RunDir:
    """A run whose training took so long in two processes."""
    stage = folder / "pretrain"
    stage.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    rest = {"num_tokens": 1, "joules": {"rapl": 1.0}, "pue": 1.0, "carbon_g_per_kwh": 1.0}
    (stage / "energy.json").write_text(json.dumps([{"seconds": hours * part, **rest} for part in (1000, 2600)]))
    (stage / "recoveries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in recoveries))
    (stage / "metrics.jsonl").write_text('{"step": 1, "checkpoint_stall_s": 2.0}\n')
    return RunDir(folder)


RECOVERIES = [{"kind": "fault", "down_s": 60.0}, {"kind": "announced", "down_s": 900.0}, {"down_s": 100.0}]


def test_interruptions_over_training_hours(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", hours=20.0, recoveries=RECOVERIES)
    rate = measured_rate(run)
    assert (rate.num_faults, rate.num_announced) == (2, 1)
    assert rate.per_hour == pytest.approx(3 / 20)
    assert measured_recovery_s(run) == 80.0  # without the one that was announced
    low, high = rate.interval
    assert 1 - poisson.cdf(2, low * 20) == pytest.approx(0.025)
    assert poisson.cdf(3, high * 20) == pytest.approx(0.025)
    assert "3 in 20 h of training, 1 of them announced" in rate.text


def test_a_run_without_interruptions_gives_the_most_that_is_likely(tmp_path: Path) -> None:
    rate = measured_rate(run_of(tmp_path / "run", hours=6.0, recoveries=[]))
    assert rate.per_hour == pytest.approx(0.5)
    assert math.exp(-rate.per_hour * 6.0) == pytest.approx(0.05, abs=0.001)  # at a higher rate none is less likely
    assert rate.interval[0] == 0.0
    assert "none in 6 h of training, so 0.5 an hour are the most that is likely" in rate.text


def test_a_run_that_has_not_trained(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="has trained nothing; give --interruptions-per-hour or --trace"):
        measured_rate(RunDir(tmp_path / "run"))


def test_the_interval_holds_the_rate_as_often_as_it_says() -> None:
    rate, hours = 0.3, 10.0
    covers = 0.0
    for count in range(30):
        low, high = MeasuredRate(num_faults=count, num_announced=0, hours=hours).interval
        covers += poisson.pmf(count, rate * hours) * (low <= rate <= high)
    assert 0.95 <= covers < 0.99


def test_the_command_takes_everything_from_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "spot", "--work-hours", "4", "--instance", "g5.xlarge", "--samples", "5"]
    run = ["--run", str(run_of(tmp_path / "run", hours=20.0, recoveries=RECOVERIES).path)]
    assert main([*words, *run]) == 0
    shown = capsys.readouterr().out
    assert "interruptions    one in 6 h 40 min of presence on average\n" in shown
    assert "measured: 3 in 20 h of training, 1 of them announced (--notice-s); 95% confidence: 0.0309 to" in shown
    assert main([*words, *run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured_rate"]["per_hour"] == pytest.approx(0.15)
    calm = ["--run", str(run_of(tmp_path / "calm", hours=30.0, recoveries=[]).path), "--recovery-s", "60"]
    assert main([*words, *calm, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured_rate"]["is_upper_bound"] is True
    assert main([*words, *calm, "--interruptions-per-hour", "1"]) == 0
    assert "measured" not in capsys.readouterr().out
    assert main([*words, "--stall-s", "1", "--recovery-s", "1"]) == 2
    assert "--interruptions-per-hour: give it, --trace, or --run" in capsys.readouterr().err
    assert main([*words, *run, "--bursts", "4", "10", "1"]) == 2
    assert "--bursts: needs --interruptions-per-hour" in capsys.readouterr().err
