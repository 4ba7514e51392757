"""Drift starts an update, and nothing else does: `modelwright continual run --drift-reference`."""

import json
from pathlib import Path

import pytest

from continual_requests import write_requests
from continual_world import World, words_of
from drift_traffic import Shift, Traffic
from modelwright.cli.main import main
from modelwright_continual.drift.reference import DriftReference


@pytest.mark.slow
def test_an_update_begins_when_requests_have_drifted(
    world: World,
    reference: DriftReference,
    reference_folder: Path,
    traffic: Traffic,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "next"
    steady = write_requests(tmp_path / "steady.jsonl", traffic.requests(500, 77))
    trigger = ("--drift-reference", reference_folder, "--requests")
    assert main(words_of(world, run, *trigger, steady)) == 0
    assert "nothing is updated" in capsys.readouterr().out
    assert sorted(path.name for path in run.iterdir()) == ["drift.json", "loop"]
    assert [report["alarm"] for report in json.loads((run / "drift.json").read_text())] == [False]
    shifted = write_requests(tmp_path / "shifted.jsonl", traffic.requests(500, 78, shift=Shift(other_language=0.5)))
    assert main(words_of(world, run, *trigger, shifted)) == 0
    shown = capsys.readouterr()
    assert "drift: " in shown.err
    assert (run / "release/lineage.json").is_file()
    assert any(report["alarm"] for report in json.loads((run / "drift.json").read_text()))
    assert main(words_of(world, run, *trigger, steady)) == 0  # what has begun goes on, whatever comes in meanwhile
    assert "release" in capsys.readouterr().out


def test_a_reference_without_requests_is_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of(world, tmp_path / "next", "--drift-reference", tmp_path)) == 2
    assert "--requests" in capsys.readouterr().err
    assert main(words_of(world, tmp_path / "next", "--current", tmp_path / "link")) == 2
    assert "--server" in capsys.readouterr().err
