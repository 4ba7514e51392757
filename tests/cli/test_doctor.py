"""`modelwright doctor`: what it measures and advises, and words that it refuses."""

import json
from pathlib import Path

import pytest

from modelwright.cli.doctor import _refusal
from modelwright.cli.main import main
from modelwright.core.config import save_yaml
from modelwright.core.rundir import RunDir
from modelwright.pipeline.doctor import usual_processes
from modelwright.plan.probes.survey import NAMES
from modelwright.recipes.load import recipe

FEW = ["--seconds", "0.02", "--skip", "loopback", "gloo"]


def test_without_a_target_it_only_measures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--skip", "rates", "memory", "loopback", "gloo", "--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "disk        writes" in printed
    assert "memory      left out" in printed
    assert "bottleneck" not in printed
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run").create()
    run.write_info({"invocations": [{"world_size": 4}], "stages": {}})
    save_yaml(run.config, recipe("tiny"))
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", str(run.path), *FEW, "--json", "--interruptions-per-hour", "0.5"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data["probes"]["results"]) == set(NAMES)
    assert data["needs"]["num_processes"] == 4  # as the run had
    assert data["times"]["bottleneck"] in data["times"]["seconds"]
    assert {rule["name"] for rule in data["rules"] if rule["applies"]} >= {"young", "daly"}
    assert {one["action"] for one in data["techniques"]} <= {
        "switch on", "switch off", "keep", "impossible here", "not now"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--nproc", "-1"], "--nproc: must be at least 1"),
        (["tiny", "--nproc", "7"], "batch_tokens: "),
        (["tiny", "--skip", "rates"], "--skip: advice for a training needs rates"),
        (["--skip", "rates", "dsk"], "--skip: 'dsk' is not one of rates, memory, disk"),
        (["--skip", "rates", "--folder", "/nowhere"], "--folder: /nowhere is not a folder"),
        (["tiny", "--interruptions-per-hour", "-1"], "--interruptions-per-hour: must not be negative"),
    ],
)
def test_words_that_it_refuses(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err


def test_processes_that_a_layout_needs(tmp_path: Path) -> None:
    parallel = recipe("tiny").parallel
    assert usual_processes(tmp_path, parallel) == 2
    assert _refusal("tiny", ["pretrain.precision.policy=bf16_mixed"], 2) == ""
    assert _refusal("quickstart", ["pretrain.async_updates.mode=hogwild"], 2)  # its optimizer needs whole gradients
