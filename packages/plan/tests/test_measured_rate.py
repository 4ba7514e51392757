"""The rate of interruptions that a run shows: its mean and its interval; a run that had none shows no rate."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import poisson

from modelwright.cli.main import main
from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError
from modelwright_plan.run_cost import MeasuredRate, measured_rate, measured_recovery_s
from refusals import config_error


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


@pytest.mark.parametrize(("hours", "bound"), [(0.004, "750"), (6.0, "0.5")])
def test_a_run_without_interruptions_shows_no_rate(tmp_path: Path, hours: float, bound: str) -> None:
    run = run_of(tmp_path / "run", hours=hours, recoveries=[])
    with pytest.raises(ConfigError, match=f"the rate is unknown .95% confidence: below {bound} an hour"):
        measured_rate(run)
    assert measured_recovery_s(run) is None
    assert math.exp(-float(bound) * hours) == pytest.approx(0.05, abs=0.001)  # at a higher rate none is less likely


def test_a_run_that_has_not_trained(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with config_error("run", match="has trained nothing; give --interruptions-per-hour"):
        measured_rate(RunDir(tmp_path / "run"))


def test_the_interval_holds_the_rate_as_often_as_it_says() -> None:
    rate, hours = 0.3, 10.0
    covers = 0.0
    for count in range(30):
        low, high = MeasuredRate(num_faults=count, num_announced=0, hours=hours).interval
        covers += poisson.pmf(count, rate * hours) * (low <= rate <= high)
    assert 0.95 <= covers < 0.99


def test_the_command_takes_everything_from_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "spot", "--work-hours", "4", "--instance", "g5.xlarge"]
    run = ["--run", str(run_of(tmp_path / "run", hours=20.0, recoveries=RECOVERIES).path)]
    assert main([*words, *run]) == 0
    shown = capsys.readouterr().out
    assert "a checkpoint stalls it 2 s, a recovery takes 80 s" in shown
    assert "interruptions    one in 6 h 40 min on average\n" in shown
    assert "measured: 3 in 20 h of training, 1 of them announced; 95% confidence: 0.0309 to" in shown
    assert main([*words, *run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured_rate"]["per_hour"] == pytest.approx(0.15)
    calm = ["--run", str(run_of(tmp_path / "calm", hours=0.01, recoveries=[]).path)]
    assert main([*words, *calm]) == 2
    assert "was not interrupted in 0.01 h of training, so the rate is unknown" in capsys.readouterr().err
    assert main([*words, *calm, "--interruptions-per-hour", "1"]) == 0
    assert "measured" not in capsys.readouterr().out
