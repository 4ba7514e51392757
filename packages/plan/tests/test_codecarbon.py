"""codecarbon's offline estimate of a job, by the real library: its arithmetic, no network, and what is refused. A run's
is tested in `tests/train/test_codecarbon_run.py`.
"""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from modelwright.cli.main import main
from modelwright_plan.carbon import CodecarbonEstimate, codecarbon_estimate
from refusals import config_error


@pytest.fixture(scope="module")
def attempts() -> list[Any]:
    return []


@pytest.fixture(scope="module")
def france(tmp_path_factory: pytest.TempPathFactory, attempts: list[Any]) -> CodecarbonEstimate:
    """Measured once, in an empty folder and without a network."""
    pytest.importorskip("codecarbon")

    def refuse(self: socket.socket, address: Any) -> None:
        attempts.append(address)
        raise OSError("no network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.chdir(folder := tmp_path_factory.mktemp("empty"))
        estimate = codecarbon_estimate("fra", hours=10.0, load_s=1.2)
        assert list(folder.iterdir()) == []
    return estimate


def test_the_estimate_follows_power_and_country(france: CodecarbonEstimate, attempts: list[Any]) -> None:
    assert france.country == "FRA"
    assert france.watts == pytest.approx(france.cpu_watts + france.ram_watts + france.gpu_watts, rel=1e-6)
    assert france.watts > 0
    assert france.kwh == pytest.approx(france.watts * 10 / 1000)
    assert france.co2_g == pytest.approx(france.kwh * france.g_per_kwh)
    assert 10 < france.g_per_kwh < 150  # France's electricity is mostly nuclear
    assert not [address for address in attempts if isinstance(address, tuple)]


def test_a_country_that_is_unknown() -> None:
    pytest.importorskip("codecarbon")
    with config_error("country", match="--country: codecarbon knows no country 'FRX'; write its ISO 3166"):
        codecarbon_estimate("FRX", hours=1.0)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    with config_error("country", match=r"pip install 'modelwright\[carbon\]'"):
        codecarbon_estimate("FRA", hours=1.0)


def test_the_command_calls_it_an_estimate(
    france: CodecarbonEstimate, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelwright_plan.carbon.codecarbon_estimate", lambda country, hours: france)
    table = tmp_path / "carbon.csv"
    table.write_text("time,g_per_kwh\n2026-01-31T00:00,100\n2026-01-31T01:00,50\n")
    words = ["plan", "energy", "--carbon", str(table), "--hours", "1", "--watts", "500", "--country", "FRA"]
    assert main(words) == 0
    assert f"codecarbon {france.version}, an estimate: this machine under load draws" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["codecarbon_estimate"]["country"] == "FRA"
