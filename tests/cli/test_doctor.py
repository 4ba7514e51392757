"""`modelwright doctor`: what it measures, and words that it refuses."""

import json
from pathlib import Path

import pytest

from modelwright.cli.main import main
from modelwright.pipeline.estimate.probes.survey import NAMES


def test_parts_are_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--skip", "rates", "memory", "loopback", "gloo", "--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "disk        writes" in printed
    assert "memory      left out" in printed
    assert printed.endswith("what limits a training here, and what helps: modelwright plan advice quickstart\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_rates_of_a_recipe_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "tiny", "--seconds", "0.02", "--skip", "loopback", "gloo", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data["probes"]["results"]) == set(NAMES)
    assert data["training"]["effective"]["fp32"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--seconds", "0"], "--seconds: must be above 0"),
        (["--skip", "rates", "dsk"], "--skip: 'dsk' is not one of rates, memory, disk"),
        (["--skip", "rates", "--folder", "/nowhere"], "--folder: /nowhere is not a folder"),
    ],
)
def test_words_that_it_refuses(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err
