"""A run that was killed and whose checkpoints were damaged since: what is whole is taken, nothing is deleted, and a run
that would begin again at step 0 asks first."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rank_processes import start_process

Command = Callable[..., subprocess.CompletedProcess[str]]
STEPS = 30
MORE = (f"--pretrain.num_steps={STEPS}", "--pretrain.keep_last=3", "--stages", "clean,tokenize,pack,pretrain")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, small_words: tuple[str, ...]) -> Path:
    """A run that `kill -9` ended in pretraining, when it had written some checkpoints."""
    run = tmp_path_factory.mktemp("killed") / "run"
    started = start_process("modelwright.cli.main", *small_words, *MORE, "--run-dir", run)
    while started.is_alive and len(folders(run)) < 2:
        time.sleep(0.001)
    started.send_signal(signal.SIGKILL)
    assert started.end()[0] == -signal.SIGKILL, "it was over too soon"
    return run


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run"))


def folders(run: Path, *, pattern: str = "step-????????") -> list[Path]:
    return sorted((run / "pretrain" / "checkpoints").glob(pattern))


def damage(path: Path) -> None:
    os.truncate(path / "model.safetensors", 100)


def contents(paths: list[Path]) -> list[tuple[int, bytes]]:
    files = [file for path in paths for file in sorted(path.iterdir())]
    return [(len(file.read_bytes()), file.read_bytes()[-64:]) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--nproc", "2"]])
def test_all_damaged_is_refused_until_restart_is_given(
    run: Path, inside: Command, command: Command, small_words: tuple[str, ...], more: list[str]
) -> None:
    for path in folders(run):
        damage(path)
    before = [path.name for path in folders(run)], contents(folders(run))
    words = (*small_words, *MORE, "--run-dir", str(run), *more)
    done = (command if more else inside)(*words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("modelwright: all checkpoints in "), done.stderr
    assert all(str(path) in last for path in folders(run))
    assert "--restart" in last
    assert ([path.name for path in folders(run)], contents(folders(run))) == before
    assert not (run / "pretrain" / "artifact").exists()

    if more:
        return  # beginning again is the same for several processes
    done = inside(*words, "--restart")
    assert done.returncode == 0, done.stderr
    kept = folders(run, pattern="step-????????.damaged")
    assert ([path.name.removesuffix(".damaged") for path in kept], contents(kept)) == before
    assert folders(run)[-1].name == f"step-{STEPS:08d}"


@pytest.mark.slow
def test_the_newest_whole_one_is_taken_and_the_damaged_one_kept(
    run: Path, inside: Command, small_words: tuple[str, ...]
) -> None:
    *_, whole, newest = folders(run)
    damage(newest)
    before = contents([newest])
    undamaged = Path(shutil.copytree(run, run.with_name("undamaged")))
    shutil.rmtree(undamaged / newest.relative_to(run))
    done = inside(*small_words, *MORE, "--run-dir", str(run))
    assert done.returncode == 0, done.stderr
    assert f"{newest} is damaged" in done.stderr
    assert f"resuming from step {int(whole.name[5:])} of {STEPS}" in done.stderr
    assert contents([newest.with_name(newest.name + ".damaged")]) == before
    assert inside(*small_words, *MORE, "--run-dir", str(undamaged)).returncode == 0
    ours, theirs = (load_file(one / "pretrain" / "artifact" / "model.safetensors") for one in (run, undamaged))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.slow
def test_restart_leaves_whole_checkpoints_alone(run: Path, inside: Command, small_words: tuple[str, ...]) -> None:
    done = inside(*small_words, *MORE, "--run-dir", str(run), "--restart")
    assert done.returncode == 0, done.stderr
    assert "resuming from step" in done.stderr
