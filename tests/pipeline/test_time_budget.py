"""`run --minutes N`: training as long as fits into a time budget."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.core.artifacts import read_manifest
from modelwright.core.config import load_yaml, parse
from modelwright.core.errors import ConfigError
from modelwright.core.progress import SilentProgress
from modelwright.pipeline.config import RunConfig
from modelwright.pipeline.process_group import join_ranks
from modelwright.pipeline.resolve import resolve
from modelwright.pipeline.time_budget import num_steps_within, step_seconds
from modelwright.recipes.load import recipe
from rank_processes import run_ranks

TIMED_COMMAND = Path(__file__).with_name("timed_command.py")
STEP_S = 0.05
Command = Callable[..., subprocess.CompletedProcess[str]]


def test_steps_and_validations_share_the_budget() -> None:
    config = recipe("tiny")
    config = replace(
        config,
        validation_tokens=6144,
        pretrain=replace(config.pretrain, batch_tokens=2048, eval_every_steps=10),
        sft=replace(config.sft, batch_tokens=2048, eval_every_steps=0),
    )
    steps = num_steps_within(config, 1000.0, {"pretrain": 1.0, "sft": 2.0})
    assert steps == {"pretrain": int((900 - 1) / 1.1), "sft": int((100 - 2) / 2)}
    assert num_steps_within(config, 1000.0, {"sft": 2.0}) == {"sft": 499}


def test_a_budget_that_is_too_small_says_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"--minutes: 0\.1 is too short for 10 steps of sft; give at least"):
        num_steps_within(recipe("tiny"), 6.0, {"pretrain": 0.01, "sft": 1.0})


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_length_is_measured_once_and_kept(small_words: Sequence[str], tmp_path: Path, num_processes: int) -> None:
    run = tmp_path / "run"
    words = [*small_words, "--run-dir", str(run), "--stages", "clean,tokenize,pack,pretrain"]
    run_ranks(TIMED_COMMAND, STEP_S, *words, "--minutes", "0.12", size=num_processes)
    config = load_yaml(run / "config.yaml")
    num_steps = num_steps_within(parse(RunConfig, config), 7.2, {"pretrain": STEP_S})
    for name, count in num_steps.items():
        assert (config[name]["num_steps"], config[name]["num_tokens"], config[name]["num_epochs"]) == (count, 0, 0.0)
    assert not (run / "time-budget").exists()
    digest = read_manifest(run / "pretrain" / "artifact").content_digest
    run_ranks(TIMED_COMMAND, STEP_S, *words, "--minutes", "1", size=num_processes)
    assert load_yaml(run / "config.yaml") == config
    assert read_manifest(run / "pretrain" / "artifact").content_digest == digest


def test_a_step_takes_as_long_as_the_median_of_those_that_were_timed(tmp_path: Path) -> None:
    """A positive time, of this machine."""
    config = resolve(recipe("tiny"), None, SilentProgress())
    with join_ranks(config, links=tmp_path / "links.json", num_rows=0) as ranks:
        assert ranks is not None
        assert step_seconds(config, "pretrain", tmp_path, ranks, SilentProgress()) > 0.0


@pytest.mark.parametrize("minutes", ["-1", "nan", "inf"])
def test_a_budget_is_a_number_above_0(inside: Command, tmp_path: Path, minutes: str) -> None:
    done = inside("run", "tiny", "--run-dir", str(tmp_path / "run"), "--minutes", minutes)
    assert done.returncode == 2
    assert "--minutes: must be above 0" in done.stderr
