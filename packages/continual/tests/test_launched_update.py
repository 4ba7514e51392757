"""An update that several processes train: the weights are those of one process, also when a process is lost."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from continual_world import World, words_of
from modelwright.cli.main import main
from modelwright.core.artifacts import RunDir
from modelwright.core.records import read_records
from pipeline.test_launch import finish, num_restarts, wait_until, workers
from rank_processes import Started, start_process
from tolerances import TOLERANCES

MORE = ("--margin=0.9", "--sft.num_steps=60")
STEPS = list(range(1, 61))


def start(world: World, run: Path) -> Started:
    """The command with two processes, once there is a checkpoint."""
    process = start_process("modelwright.cli.main", *words_of(world, run, "--nproc", "2"), *MORE)
    wait_until(process, lambda: has_checkpoint(run))
    return process


def has_checkpoint(run: Path) -> bool:
    found = (run / "sft/checkpoints").glob("step-*/manifest.json")
    return any(path.parent.suffix == "" for path in found)  # not a draft, which has its manifest before its name


def steps(run: Path) -> list[int]:
    return [record["step"] for record in read_records(run / "sft/metrics.jsonl") if "loss" in record]


@pytest.mark.slow
def test_two_processes_of_which_one_is_lost_end_as_one_does(world: World, tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "several"
    assert main([*words_of(world, alone), *MORE]) == 0
    process = start(world, run)
    os.kill(workers(process)[0], signal.SIGKILL)
    code, errors = finish(process)
    assert code == 0, errors
    assert num_restarts(errors) == 1, errors
    assert "resuming from step" in errors, errors
    assert steps(run) == STEPS
    first, last = RunDir(run).read_info()["invocations"]
    assert first["restart"] == 0 < last["restart"]
    assert first["world_size"] == last["world_size"] == 2
    for stage in ("sft", "average"):
        ours, theirs = (load_file(one / stage / "artifact/model.safetensors") for one in (run, alone))
        torch.testing.assert_close(ours, theirs, **TOLERANCES["fp32_trained"])
    assert (run / "release/lineage.json").is_file()
    assert main([*words_of(world, run, "--nproc", "2"), *MORE]) == 0  # nothing is left to be started for
    assert len(RunDir(run).read_info()["invocations"]) == 2


@pytest.mark.slow
def test_asked_to_stop_they_save_and_one_process_goes_on(world: World, tmp_path: Path) -> None:
    run = tmp_path / "next"
    process = start(world, run)
    process.send_signal(signal.SIGTERM)
    code, errors = finish(process)
    assert code == 128 + signal.SIGTERM, errors
    assert errors.count("modelwright: stopped after step") == 1
    assert "Traceback" not in errors
    assert main([*words_of(world, run), *MORE]) == 0
    assert steps(run) == STEPS
    assert [entry["world_size"] for entry in RunDir(run).read_info()["invocations"]] == [2, 1]


def test_it_starts_its_processes_itself(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "next"
    assert main(words_of(world, run, "--nproc", "0")) == 2
    assert "--nproc: must be at least 1" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun would
    monkeypatch.setenv("RANK", "1")
    assert main(words_of(world, run)) == 2
    assert "with --nproc N" in capsys.readouterr().err
    assert not run.exists()
