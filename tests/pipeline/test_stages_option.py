"""`--stages`: the same command means the same when it is repeated, and what it leaves out is not asked about."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from modelwright.core.artifacts import is_finished
from modelwright.recipes.load import load

Command = Callable[..., subprocess.CompletedProcess[str]]
NO_SERVE = ("clean", "tokenize", "pack", "pretrain", "report")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, command: Command, small_words: tuple[str, ...]) -> Path:
    """A run without the stages sft, evaluate, quantize and serve of its recipe."""
    run = tmp_path_factory.mktemp("finished") / "run"
    done = command(*small_words, "--run-dir", str(run), "--stages", ",".join(NO_SERVE))
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def stages_of(run: Path) -> tuple[str, ...]:
    return tuple(yaml.safe_load((run / "config.yaml").read_text())["stages"])


@pytest.mark.slow
def test_a_report_without_all_stages_can_be_repeated(inside: Command, run: Path, small_words: tuple[str, ...]) -> None:
    words = (*small_words, "--run-dir", str(run), "--stages", ",".join(NO_SERVE))
    done = inside(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kept     clean, tokenize, pack, pretrain, report" in done.stdout
    shutil.rmtree(run / "report" / "artifact")
    done = inside(*words)
    assert done.returncode == 0, done.stderr
    assert "ran      report" in done.stdout
    assert stages_of(run) == NO_SERVE
    assert inside("run", str(run)).returncode == 0


def test_a_report_takes_what_is_finished(inside: Command, run: Path, small_words: tuple[str, ...]) -> None:
    """A run with all stages of the recipe that was stopped after pretraining."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["stages"] = ["clean", "tokenize", "pack", "pretrain", "sft", "evaluate", "quantize", "serve_check", "report"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    shutil.rmtree(run / "report")
    done = inside(*small_words, "--run-dir", str(run), "--stages", "quantize,report")
    assert (done.returncode, done.stderr) == (
        2, "modelwright: stages: sft was never run and is needed; add sft to --stages\n"
    )  # fmt: skip
    done = inside(*small_words, "--run-dir", str(run), "--stages", "report")
    assert done.returncode == 0, done.stderr
    assert is_finished(run / "report" / "artifact")
    assert len(stages_of(run)) == 9


@pytest.mark.slow
def test_the_example_of_the_help_can_be_repeated(
    inside: Command, run: Path, tmp_path: Path, small_words: tuple[str, ...]
) -> None:
    assert inside("export", str(run), "--to", "hf", str(tmp_path / "model")).returncode == 0
    again = (*small_words, "--run-dir", str(tmp_path / "again"), "--init-from", str(tmp_path / "model"))
    for state in ("ran ", "kept"):
        done = inside(*again, "--stages", "clean,pack,sft,evaluate,report")
        assert done.returncode == 0, done.stderr
        assert f"{state}     init, clean, pack, sft, evaluate, report" in done.stdout
    assert inside("run", str(tmp_path / "again")).returncode == 0


def test_stages_are_added_to_a_run(run: Path) -> None:
    assert load("tiny", {}, str(run), ("report",)).config.stage_names == list(NO_SERVE)
    more = load("tiny", {}, str(run), ("evaluate",)).config.stage_names
    assert more == ["clean", "tokenize", "pack", "pretrain", "evaluate", "report"]


@pytest.mark.parametrize(
    ("only", "overrides"),
    [
        (("clean", "tokenize", "pack", "pretrain"), {"sft": {"batch_tokens": 100}}),
        (("clean", "tokenize", "pack"), {"pretrain": {"batch_tokens": 100}}),
        (("clean",), {"pack": {"seq_len": 4096}}),
        (("clean",), {"tokenizer": {"vocab_size": 5000}}),
    ],
)
def test_settings_of_stages_left_out_are_not_checked(
    only: tuple[str, ...], overrides: dict[str, object], tmp_path: Path
) -> None:
    assert load("tiny", overrides, str(tmp_path), only).config.stage_names == list(only)


def test_no_stage_at_all_is_refused(inside: Command, tmp_path: Path) -> None:
    done = inside("run", "tiny", "--run-dir", str(tmp_path), "--stages", ",")
    assert done.returncode == 2
    assert "--stages: names no stage" in done.stderr
