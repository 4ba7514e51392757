"""The start with the least carbon dioxide against all starts, and tables that are refused."""

import datetime
import json
import random
from pathlib import Path

import pytest

from modelwright.cli.main import main
from modelwright.core.config import DataError
from modelwright_plan.carbon import HOUR, CarbonTable, plan_start, read_carbon_table
from refusals import config_error

MIDNIGHT = datetime.datetime(2026, 1, 31)


def naive_grams(table: CarbonTable, first: int, hours: float, watts: float) -> float:
    """Minute by minute."""
    minutes = round(hours * 60)
    return sum(table.g_per_kwh[first + minute // 60] * watts / 1000 / 60 for minute in range(minutes))


def test_the_best_start_is_the_best_of_all() -> None:
    draw = random.Random(0)
    for _ in range(40):
        table = CarbonTable(MIDNIGHT, [draw.uniform(20, 700) for _ in range(24)])
        hours, watts = draw.choice((0.5, 1.0, 2.25, 5.0)), 300.0
        plan = plan_start(table, hours=hours, watts=watts)
        grams = [naive_grams(table, first, hours, watts) for first in range(24 - -int(-hours // 1) + 1)]
        assert plan.best.co2_g == pytest.approx(min(grams))
        assert plan.best.time == MIDNIGHT + grams.index(min(grams)) * HOUR
        assert plan.at_once.co2_g == pytest.approx(grams[0])


def test_the_start_keeps_to_the_limits() -> None:
    table = CarbonTable(MIDNIGHT, [100.0, 10.0, 90.0, 80.0, 5.0, 5.0])
    first, last = MIDNIGHT + 2 * HOUR, MIDNIGHT + 4.5 * HOUR
    plan = plan_start(table, hours=1.5, watts=1000.0, earliest=first, finish_by=last)
    assert plan.best.time == MIDNIGHT + 3 * HOUR
    assert plan.best.co2_g == pytest.approx(80 + 0.5 * 5)
    assert plan.saved_share == pytest.approx(1 - 82.5 / 130)
    with config_error("hours"):
        plan_start(table, hours=3, watts=1.0, earliest=first, finish_by=last)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hour,g\n", "needs the columns"),
        ("time,g_per_kwh\n2026-01-31T00:30,5\n", ":2: needs a full hour"),
        ("time,g_per_kwh\n2026-01-31T00:00,5\n2026-01-31T02:00,5\n", ":3: .* must be one hour after"),
        ("time,g_per_kwh\n2026-01-31T00:00,low\n", ":2: "),
        ("time,g_per_kwh\n2026-01-31T00:00,nan\n", ":2: needs a full hour and an intensity"),
    ],
)
def test_a_bad_table_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "carbon.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_carbon_table(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "carbon.csv"
    rows = [f"{(MIDNIGHT + hour * HOUR).isoformat()},{400 - 30 * hour}" for hour in range(10)]
    table.write_text("\n".join(["time,g_per_kwh", *rows]))
    words = ["plan", "energy", "--carbon", str(table)]
    assert main([*words, "--hours", "2", "--watts", "500"]) == 0
    assert "best start   2026-01-31T08:00:00  145 g CO2 (145 g per kWh)" in capsys.readouterr().out
    assert main([*words, "--hours", "2"]) == 2
    assert "--hours: give it and --watts" in capsys.readouterr().err
    assert main([*words, "--hours", "2", "--watts", "500", "--finish-by", "2026-01-31T08:00+00:00"]) == 2
    assert "must have no time zone" in capsys.readouterr().err
    run = tmp_path / "run" / "pretrain"
    run.mkdir(parents=True)
    (run.parent / "run.json").write_text("{}")
    entry = {"joules": {"rapl": 3.6e6}, "seconds": 7200.0, "num_tokens": 5, "pue": 1.5, "carbon_g_per_kwh": 1.0}
    (run / "energy.json").write_text(json.dumps([entry]))
    assert main([*words, "--run", str(run.parent), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["hours"], data["watts"]) == (2.0, 750.0)
