"""A finished run is not lost to another one in its folder, and a report is named only with the stages it describes."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from modelwright.core.artifacts import RunDir
from modelwright.core.config import ConfigError, load_yaml
from modelwright.pipeline.resolve import check_same_run, differences
from modelwright.recipes.load import load, recipe

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, command: Command, small_words: tuple[str, ...]) -> Path:
    """A run of the first stages and the report."""
    run = tmp_path_factory.mktemp("finished") / "run"
    done = command(*small_words, "--run-dir", str(run), "--stages", "clean,tokenize,report")
    assert done.returncode == 0, done.stderr
    assert f"report   {run}/report.html" in done.stdout
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_other_sources_are_another_run(
    inside: Command, small_words: tuple[str, ...], run: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    (tmp_path / "mine.txt").write_text("Another text.\n" * 50)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = (*small_words, "--data.sources", str(tmp_path / "mine.txt"), "--run-dir", str(run))
    done = inside(*words, "--stages", "clean,tokenize,report", *more)
    assert done.returncode == 2
    assert f"modelwright: {run}: contains another run (data.sources: was " in done.stderr
    assert "choose another --run-dir, or replace that run with --restart" in done.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_another_model_is_another_run_unless_restart_replaces_it(
    inside: Command, small_words: tuple[str, ...], run: Path
) -> None:
    words = (*small_words, "--run-dir", str(run), "--model.num_layers", "3", "--stages", "clean")
    done = inside(*words)
    assert done.returncode == 2
    assert "(model.num_layers: was 2, now 3)" in done.stderr
    done = inside(*words, "--restart")
    assert done.returncode == 0, done.stderr
    assert load_yaml(run / "config.yaml")["model"]["num_layers"] == 3


def test_a_report_of_earlier_stages_is_not_named(inside: Command, small_words: tuple[str, ...], run: Path) -> None:
    words = (*small_words, "--run-dir", str(run), "--tokenizer.vocab_size", "390")
    done = inside(*words, "--stages", "clean,tokenize")
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").exists()
    assert "report.html" not in done.stdout


def test_a_run_that_has_no_result_may_change(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    other = load("tiny", {"data": {"sources": ["/a/b?token=secret"]}}).config
    check_same_run(differences(other, recipe("tiny")), run)
    run.stage("pretrain").checkpoints.mkdir(parents=True)
    (run.stage("pretrain").path / "stage.json").write_text("{}")
    check_same_run(differences(other, recipe("tiny")), run)
    (run.stage("pretrain").checkpoints / "step-00000010").mkdir()
    with pytest.raises(ConfigError, match=r"data\.sources: was stdlib, now /a/b\?token=\*\*\*\)"):
        check_same_run(differences(other, recipe("tiny")), run)
