"""codecarbon beside a training: its figures in energy.json and in the report, no network, one error at the start."""

import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_run import run, settings

from modelwright.cli.main import main
from modelwright.core.artifacts import StageDir
from modelwright.pipeline.report.page import energy_section
from modelwright.pipeline.report.run_data import StageData
from modelwright.train.monitors import energy
from modelwright.train.monitors.energy import ENERGY_FILE, read_energy, total_energy
from refusals import config_error

pytestmark = pytest.mark.slow


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Addresses that anything tried to reach, which fails; the current folder is an empty one."""
    pytest.importorskip("codecarbon")
    tried: list[Any] = []

    def refuse(self: socket.socket, address: Any) -> None:
        tried.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tried


def test_its_estimate_stands_beside_ours(tmp_path: Path, attempts: list[Any]) -> None:
    threads = threading.active_count()
    folder = tmp_path / "stage"
    run(folder, settings(num_steps=4))
    run(folder, settings(num_steps=12, energy={"country": "fra", "pue": 1.5}))
    without, entry = read_energy(folder / ENERGY_FILE)
    assert "codecarbon" not in without
    reading = entry["codecarbon"]
    assert reading["country"] == "FRA"
    parts = sum(reading[f"{part}_kwh"] for part in ("cpu", "ram", "gpu"))
    assert reading["kwh"] == pytest.approx(parts)
    assert reading["kwh"] > 0
    assert 10 < reading["co2_g"] / reading["kwh"] < 150  # France's electricity is mostly nuclear
    assert 0 < reading["seconds"] <= entry["seconds"] + 1
    assert not [address for address in attempts if isinstance(address, tuple)]
    assert list((tmp_path / "empty").iterdir()) == []
    assert threading.active_count() == threads, "its threads end with the training"
    total = total_energy([without, entry]).codecarbon
    assert total is not None
    assert (total.num_processes, total.num_tokens) == (1, entry["num_tokens"])
    section = energy_section([StageData("pretrain", StageDir(folder), {}, [], is_done=True)])
    assert section is not None
    ours, theirs = section.blocks[0].rows  # pyright: ignore[reportAttributeAccessIssue]
    assert (ours[0], theirs[0]) == ("pretrain", "codecarbon, an estimate")
    assert len(ours) == len(theirs) == len(section.blocks[0].header)  # pyright: ignore[reportAttributeAccessIssue]
    assert theirs[-1] == "whole machine, FRA"
    assert "1 of pretrain" in section.blocks[-1].text  # pyright: ignore[reportAttributeAccessIssue]


def test_the_data_center_is_in_its_figures(tmp_path: Path, attempts: list[Any]) -> None:
    readings = []
    for pue in (1.0, 4.0):
        run(tmp_path / str(pue), settings(num_steps=8, energy={"country": "FRA", "pue": pue}))
        (entry,) = read_energy(tmp_path / str(pue) / ENERGY_FILE)
        readings.append(entry["codecarbon"])
    alone, four = (reading["ram_kwh"] / reading["seconds"] for reading in readings)  # memory draws constant power
    assert four == pytest.approx(4 * alone, rel=0.1)


def test_a_process_that_is_killed_leaves_its_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written while it trains is there without its end."""
    pytest.importorskip("codecarbon")
    monkeypatch.setattr(energy, "WRITE_EVERY_S", 0.05)
    written: list[bool] = []
    write = energy.EnergyMonitor.write

    def observed(self: energy.EnergyMonitor) -> None:
        write(self)
        written.append("codecarbon" in read_energy(tmp_path / ENERGY_FILE)[-1])

    monkeypatch.setattr(energy.EnergyMonitor, "write", observed)
    run(tmp_path, settings(num_steps=60, energy={"country": "FRA"}))
    assert any(written[:-1])


def test_what_cannot_be_is_refused_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("codecarbon")
    words = ["run", "tiny", "--run-dir", str(tmp_path / "run"), "--energy.country"]
    assert main([*words, "FRX"]) == 2
    assert "pretrain.energy.country: codecarbon knows no country 'FRX'; write its ISO" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    assert main([*words, "FRA"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == (
        "modelwright: pretrain.energy.country: needs codecarbon, which is not installed; install it: pip install "
        "'modelwright[carbon]'"
    )
    assert not list((tmp_path / "run").glob("clean/*"))
    with config_error("energy.country"):
        run(tmp_path / "stage", settings(num_steps=2, energy={"country": "FRA"}))
    assert not (tmp_path / "stage" / "metrics.jsonl").exists()


def test_a_machine_that_it_cannot_track_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codecarbon = pytest.importorskip("codecarbon")
    monkeypatch.setattr(codecarbon.OfflineEmissionsTracker, "start", lambda self: None)
    run(tmp_path, settings(num_steps=4, energy={"country": "FRA"}))
    (entry,) = read_energy(tmp_path / ENERGY_FILE)
    assert "codecarbon" not in entry
    json.dumps(entry)
